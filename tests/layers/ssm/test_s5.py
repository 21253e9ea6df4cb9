"""S5: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_normal, assert_uniform
from scanl.layers import S5, S7
from scanl.layers.parts import hippo
from tests.layers.ssm.equations import s5


def growing(layer):
    """Some of the real parts of Λ above 0."""
    with torch.no_grad():
        layer.Lambda_re[::2] = 1.0
    return layer


EQUATIONS = {
    "s5": (lambda: S5(DIM, 12, blocks=3), s5),
    "s5_bilinear": (lambda: S5(DIM, discretization="bilinear", activation="half_glu2", clip_eigs=True), s5),
    "s5_all_eigenvalues": (lambda: S5(DIM, 5, conj_sym=False, init="lecun_normal", activation="full_glu"), s5),
    "s5_clipped": (lambda: growing(S5(DIM, clip_eigs=True)), s5),
    "s5_plain": (lambda: S5(DIM, init="complex_normal", activation="none"), s5),
    "s5_gelu": (lambda: S5(DIM, activation="gelu"), s5),
}

WRONG = [
    ("s5", {"blocks": 3}, "state_dim is 8, expected a multiple of 6 because of blocks=3 and conj_sym=True"),
    ("s5", {"blocks": 0}, "blocks is 0, expected at least 1"),
    ("s5", {"init": "normal"}, "unknown init 'normal'; did you mean 'lecun_normal'"),
    ("s5", {"discretization": "euler"}, "unknown discretization 'euler'; known: zoh, bilinear"),
    ("s5", {"activation": "glu"}, "unknown activation 'glu'"),
    ("s5", {"dt_min": 0}, "dt_min is 0, expected more than 0"),
]


@pytest.mark.usefixtures("double")
def test_s7_of_steps_that_do_not_select_is_s5():
    """Also, an event that lasts no time writes, and forgets nothing."""
    plain, layer, x = S5(DIM, 6), S7(DIM, 6, activation="half_glu1"), torch.randn(2, T, DIM)
    layer.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "log_step"}, strict=False)
    with torch.no_grad():
        layer.step_size.weight.zero_()
        layer.step_size.bias.copy_(plain.log_step[:, 0].exp().expm1().log())
    spans = torch.rand(2, T) + 0.1
    torch.testing.assert_close(layer(x, timespans=spans), plain(x, timespans=spans))
    events = S7(DIM, 6, discretization="async")
    before = events(x)[1]
    after = events(0 * x[:, :1], before, timespans=torch.zeros(2, 1))[1]
    torch.testing.assert_close(after, before)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("conj_sym", [True, False])
def test_init_of_s5(conj_sym):
    layer = S5(300, 512, 8, conj_sym)
    block = hippo.diagonal_legs(64)
    kept = 32 if conj_sym else 64
    torch.testing.assert_close(layer.Lambda_re.detach(), torch.full((8 * kept,), -0.5))
    torch.testing.assert_close(layer.Lambda_im.detach(), block.Lambda.imag[:kept].repeat(8))
    assert_uniform(layer.log_step, math.log(1e-3), math.log(1e-1))
    assert_normal(layer.D, 1.0)
    B, C = (torch.complex(*part.detach().unbind(-1)) for part in (layer.B, layer.C))
    if conj_sym:  # with the other eigenvector of each pair, what was drawn is real again
        V = torch.block_diag(*[block.V[:, :32]] * 8)
        drawn = 2 * (V @ B).real
    else:
        V = torch.block_diag(*[block.V] * 8)
        drawn = V @ B
        assert drawn.imag.abs().max() < 1e-9
        drawn, drawn_C = drawn.real, C @ V.mH
        assert abs(drawn_C.real.std() * math.sqrt(512) - 1) < 0.02
        assert drawn_C.real.abs().max() < 2 / 0.8796 / math.sqrt(512)
        assert abs(S5(40, 20, 1, False, "lecun_normal").C.std() * math.sqrt(40 * 20) - 1) < 0.1
    assert abs(drawn.std() * math.sqrt(512) - 1) < 0.02
    assert drawn.abs().max() < 2 / 0.8796 / math.sqrt(512)
    assert_normal(S5(300, init="complex_normal").C, math.sqrt(0.5))
