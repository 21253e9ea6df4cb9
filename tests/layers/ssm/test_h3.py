"""H3: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import H3


def h3(layer, xs):
    """Both systems as recurrences: the shift register moves by one a step, the diagonal one has a state a product."""
    shift, diagonal = layer.ssm_k_kernel.kernel, layer.kernel.kernel
    A = torch.complex(-torch.exp(diagonal.inv_A_real), diagonal.A_imag)
    B, C = torch.complex(*diagonal.B.unbind(-1)), torch.complex(*diagonal.C[0].unbind(-1))
    step, K = torch.exp(diagonal.log_dt)[:, None], layer.head_dim
    if layer.discretization == "bilinear":
        a, b = (1 + step / 2 * A) / (1 - step / 2 * A), step * B / (1 - step / 2 * A)
    else:
        a, b = torch.exp(step * A), (torch.exp(step * A) - 1) / A * B
    register = torch.zeros(layer.dim, layer.state_dim)
    states = torch.zeros(K, K, *A.shape, dtype=A.dtype)
    ys = []
    for x in xs:
        q, k, v = (project(x) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        register = torch.cat([torch.zeros(layer.dim, 1), register[:, :-1]], 1) + shift.B * k[:, None]
        k = (shift.C[0] * register).sum(1) + layer.ssm_k_D * k
        q, k, v = (each.view(-1, K).T for each in (q, k, v))  # (K, H)
        product = k[:, None] * v[None]  # (K, K, H)
        states = a * states + b * product[..., None]
        read = 2 * (C * states).sum(-1).real + layer.D * product
        ys.append(layer.output_linear((q[:, None] * read).sum(0).flatten()))
    return ys


EQUATIONS = {"h3": (lambda: H3(DIM, 6, 2), h3), "h3_alone": (lambda: H3(DIM, 4, discretization="zoh", init="legs"), h3)}

WRONG = [
    ("h3", {"state_dim": 3}, "state_dim is 3, expected an even number of at least 2"),
    ("h3", {"head_dim": 3}, "head_dim is 3, expected a divisor of dim=8"),
    ("h3", {"init": "invs"}, r"unknown init 'invs'; did you mean 'inv'\?"),
    ("h3", {"discretization": "euler"}, "unknown discretization 'euler'; known: zoh, bilinear"),
    ("h3", {"dt_min": -1}, "dt_min is -1, expected more than 0"),
]


@pytest.mark.usefixtures("double")
def test_init_of_h3():
    layer = H3(3000)
    shift, kernel = layer.ssm_k_kernel.kernel, layer.kernel.kernel
    assert (shift.B[:, 0] == 1).all()
    assert not shift.B[:, 1:].any()
    assert_uniform(shift.C, -1 / 8, 1 / 8)
    torch.testing.assert_close(kernel.inv_A_real.exp(), torch.full((3000, 32), 0.5))
    torch.testing.assert_close(kernel.A_imag.detach(), (math.pi * torch.arange(32.0)).expand(3000, 32))
    assert_uniform(kernel.log_dt, math.log(1e-3), math.log(1e-1))
    torch.testing.assert_close(kernel.B.detach(), torch.tensor([1.0, 0.0]).expand(3000, 32, 2))
    for normal, std in ((kernel.C, math.sqrt(0.5)), (layer.D, 1.0), (layer.ssm_k_D, 1.0)):
        assert_normal(normal, std)
