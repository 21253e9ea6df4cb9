"""LSSL: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, gelu
from scanl.layers import LSSL
from tests.layers.ssm.equations import held, legs, without_decay


def lssl(layer, xs, spans=None):
    N = layer.state_dim
    s, ys = torch.zeros(layer.dim, N), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        moved = []
        for i in range(layer.dim):
            P, Q, d, T = (part[i if layer.learn == 2 else 0] for part in (layer.P, layer.Q, layer.d, layer.T))
            tridiagonal = torch.diag(T[1]) + torch.diag(T[0, 1:], -1) + torch.diag(T[2, :-1], 1)
            A = torch.diag(P) @ (torch.diag(d) + torch.linalg.solve(tridiagonal, torch.eye(N))) @ torch.diag(Q)
            step = torch.exp(layer.log_dt[i]) * span
            right = (torch.eye(N) - step / 2 * A) @ s[i] + step * torch.sqrt(2 * torch.arange(N) + 1.0) * x[i]
            moved.append(torch.linalg.solve(torch.eye(N) + step / 2 * A, right))
        s = torch.stack(moved)
        y = gelu((layer.C * s).sum(1) + layer.skip * x)
        ys.append(layer.output_linear.weight @ y + layer.output_linear.bias)
    return ys


EQUATIONS = {
    "lssl": (lambda: LSSL(DIM, 5), lssl),
    "lssl_fixed": (lambda: LSSL(DIM, 3, learn=0), lssl),
    "lssl_of_each_channel": (lambda: LSSL(DIM, 3, learn=2, dt_min=0.1), lssl),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("learn", [0, 1, 2])
def test_lssl_starts_as_hippo(learn):
    layer, eye = LSSL(3, 12, learn=learn), torch.eye(12)
    A, B = layer.system()
    for i in range(3):
        step = torch.exp(layer.log_dt[i])
        back = torch.linalg.inv(eye - step / 2 * legs(12))
        torch.testing.assert_close(A[i], back @ (eye + step / 2 * legs(12)))
        torch.testing.assert_close(B[i], back @ (step * torch.sqrt(2 * torch.arange(12.0) + 1)))
    free = {"C", "skip", "output_linear.weight", "output_linear.bias"}
    learned = {name for name, _ in layer.named_parameters()} - free
    assert learned == ({"P", "Q", "d", "T", "log_dt"} if learn else set())
    assert layer.P.shape[0] == (3 if learn == 2 else 1)
    rates = {**dict.fromkeys(("P", "Q", "d", "T"), 1e-4), "log_dt": 1e-3} if learn else {}
    found = dict.fromkeys(("C", "skip", "output_linear.bias"), (0.0, None))
    assert without_decay(layer) == found | {name: (0.0, rate) for name, rate in rates.items()}


@pytest.mark.usefixtures("double")
def test_init_of_lssl():
    layer = LSSL(3000, 8)
    assert_uniform(layer.log_dt, math.log(1e-3), math.log(1e-1))
    assert_normal(layer.C, 1.0)
    assert_normal(layer.skip, 1.0)
