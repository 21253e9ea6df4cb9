"""S4D: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, gelu
from scanl import layers
from scanl.layers import S4D
from scanl.layers.base import Layer
from scanl.layers.parts import hippo
from tests.layers.ssm.equations import held, legs


def s4d(layer, xs, spans=None):
    A = torch.complex(-torch.exp(layer.kernel.log_A_real), layer.kernel.A_imag)
    C = torch.complex(*layer.kernel.C.unbind(-1))
    conv = layer.output_linear[0]
    s, ys = torch.zeros_like(A), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        step = (layer.kernel.log_dt.exp() * span)[:, None]
        if layer.discretization == "zoh":
            s = torch.exp(step * A) * s + (torch.exp(step * A) - 1) / A * x[:, None]
        elif layer.discretization == "bilinear":
            s = ((1 + step / 2 * A) * s + step * x[:, None]) / (1 - step / 2 * A)
        else:
            s = torch.exp(step * A) * s + x[:, None]
        y = conv.weight[..., 0] @ gelu(2 * (C * s).sum(1).real + layer.D * x) + conv.bias
        ys.append(y[: layer.dim] / (1 + torch.exp(-y[layer.dim :])))
    return ys


EQUATIONS = {
    "s4d": (lambda: S4D(DIM, 6), s4d),
    "s4d_bilinear": (lambda: S4D(DIM, 4, discretization="bilinear", init="inv"), s4d),
    "s4d_dirac": (lambda: S4D(DIM, 4, discretization="dirac"), s4d),
}

WRONG = [
    ("s4d", {"state_dim": 3}, "state_dim is 3, expected an even number of at least 2"),
    ("s4d", {"init": "leg"}, r"unknown init 'leg'; did you mean 'legs'\?"),
    ("s4d", {"discretization": "euler"}, "unknown discretization 'euler'; known: zoh, bilinear"),
    ("s4d", {"dt_max": 0.0}, "dt_max is 0.0, expected at least dt_min=0.001"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("init", "frequencies"),
    [
        ("lin", lambda n: math.pi * n),
        ("inv", lambda n: 64 / math.pi * (64 / (2 * n + 1) - 1)),
        ("real", lambda n: 0 * n),
    ],
)
def test_init_of_s4d(init, frequencies):
    layer = S4D(3000, init=init)
    n = torch.arange(32.0)
    torch.testing.assert_close(layer.kernel.A_imag.detach(), frequencies(n).expand(3000, 32))
    real = n + 1 if init == "real" else torch.full_like(n, 0.5)
    torch.testing.assert_close(layer.kernel.log_A_real.exp(), real.expand(3000, 32))
    assert_uniform(layer.kernel.log_dt, math.log(1e-3), math.log(1e-1))
    assert_normal(layer.kernel.C, math.sqrt(0.5))
    assert_normal(layer.D, 1.0)
    assert layer.output_linear[0].weight.shape == (6000, 3000, 1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("size", [2, 5, 64])
def test_legs_is_diagonal_and_of_rank_one(size):
    Lambda, P, B, V = hippo.diagonal_legs(size)
    A = V @ (torch.diag(Lambda) - P[:, None] * P.conj()) @ V.mH
    torch.testing.assert_close(A, legs(size).to(A.dtype), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(V @ B, torch.sqrt(2 * torch.arange(float(size)) + 1).to(B.dtype))
    assert (Lambda.imag.diff() > 0).all()
    if size % 2 == 0:
        layer = S4D(1, size, init="legs")
        both = torch.cat([layer.kernel.A_imag[0], -layer.kernel.A_imag[0]]).sort()[0]
        torch.testing.assert_close(both, Lambda.imag)
        spread = torch.view_as_complex(S4D(4000, size, init="legs").kernel.C.detach()).abs().square().mean(0).sqrt()
        cut = torch.complex(B.real, B.imag.clamp(-2, 2))[size // 2 :].abs()
        torch.testing.assert_close(spread, cut, rtol=0.1, atol=0)


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("begun", [False, True])
def test_outputs_at_places_are_those_of_all_steps(first, begun):
    layer = layers.build("s4d", 4, state_dim=4).double()
    x, places = torch.randn(2, 37, 4, dtype=torch.float64, requires_grad=True), range(first, 37, 7)
    states = [torch.randn(2, 4, 2, dtype=torch.complex128) if begun else None] * 2
    results = []
    for kind in (Layer, type(layer)):
        ys, after = kind.at_places([layer, layer], x, states, places)
        (dx,) = torch.autograd.grad(sum(y.square().sum() for y in ys), x)
        results.append([*ys, *after, dx])
    torch.testing.assert_close(results[1], results[0])
