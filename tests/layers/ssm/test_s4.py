"""S4: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import S4
from scanl.layers.parts import hippo
from scanl.layers.ssm import s4 as s4_layer
from scanl.ops import ssm_kernel_dplr
from tests.layers.ssm.equations import legs, s4

EQUATIONS = {"s4": (lambda: S4(DIM, 6), s4)}

WRONG = [
    ("s4", {"state_dim": 5}, "state_dim is 5, expected an even number of at least 2"),
    ("s4", {"dt_max": 1e-4}, "dt_max is 0.0001, expected at least dt_min=0.001"),
]


@pytest.mark.usefixtures("double")
def test_init_of_s4():
    layer, legs_64 = S4(3000), hippo.diagonal_legs(64)
    kernel = layer.layer.kernel
    assert_uniform(kernel.inv_dt, math.log(1e-3), math.log(1e-1))
    assert_normal(kernel.C, math.sqrt(0.5))
    assert_normal(layer.layer.D, 1.0)
    torch.testing.assert_close(kernel.A_real.exp(), torch.full((3000, 32), 0.5))
    torch.testing.assert_close(-kernel.A_imag.detach()[0], legs_64.Lambda.imag[:32])
    B, P = (torch.complex(*part.detach()[0, 0].unbind(-1)) for part in (kernel.B, kernel.P))
    torch.testing.assert_close(P, legs_64.P[:32])
    torch.testing.assert_close(B.real, legs_64.B[:32].real)
    torch.testing.assert_close(B.imag, legs_64.B[:32].imag.clamp(-2, 2))


@pytest.mark.usefixtures("double")
def test_s4_has_the_kernel_of_hippo():
    """With Im B not cut: C e^{jΔA} B of the bilinear rule, where A and B are HiPPO-LegS's own."""
    layer = S4(1, 6)
    kernel = layer.layer.kernel
    whole = hippo.diagonal_legs(6)
    with torch.no_grad():
        kernel.B.copy_(torch.view_as_real(whole.B[:3].resolve_conj())[None, None])
        C = torch.view_as_complex(kernel.C[0, 0])
        step, eye = kernel.inv_dt[0].exp(), torch.eye(6)
        A, B = legs(6), torch.sqrt(2 * torch.arange(6.0) + 1)
        back = torch.linalg.inv(eye - step / 2 * A)
        V = torch.cat([whole.V[:, :3], whole.V[:, :3].conj()], 1)
        row = (torch.cat([C, C.conj()]) @ V.mH).real
        s, expected = back @ B * step, []
        for _ in range(40):
            expected.append(row @ s)
            s = back @ (eye + step / 2 * A) @ s
        system = [part[None] if part.ndim < 2 else part for part in kernel.system()]
        found = ssm_kernel_dplr(*(part.reshape(1, -1) for part in system[:4]), step, 40)[0]
        torch.testing.assert_close(torch.stack(expected), found)
        impulse = torch.zeros(1, 40, 1)
        impulse[:, 0] = 1
        y, _ = s4_layer._convolution(impulse, *kernel.system(), None)
        torch.testing.assert_close(y[0, :, 0], found)
