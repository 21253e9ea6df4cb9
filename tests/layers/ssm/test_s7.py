"""S7: its equation step by step, how it starts, and what it refuses."""

import math

import torch
from torch.nn import functional as F

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import S7, S7Full
from tests.layers.ssm.equations import s5

EQUATIONS = {
    "s7": (lambda: S7(DIM, 12, blocks=3), s5),
    "s7_async": (lambda: S7(DIM, 5, conj_sym=False, discretization="async", activation="none"), s5),
    "s7_stable": (lambda: S7(DIM, 12, blocks=3, stable=True), s5),
    "s7_bilinear": (lambda: S7(DIM, discretization="bilinear", clip_eigs=True), s5),
}

WRONG = [("s7", {"stable": True, "clip_eigs": True}, "clip_eigs is True, expected False because stable is True")]


def test_init_of_s7():
    layer = S7(64, 2000, blocks=100)
    assert_uniform(layer.step_size.weight, -0.5, 0.5)
    assert_uniform(F.softplus(layer.step_size.bias).log(), math.log(1e-3), math.log(1e-1))


def test_init_of_stable_and_of_full_s7():
    """The eigenvalues of both parametrisations are the same at the start; a decay is never above 1 in size."""
    torch.manual_seed(0)
    plain = S7(8, 48, blocks=3)
    torch.manual_seed(0)
    stable = S7(8, 48, blocks=3, stable=True)
    torch.testing.assert_close(stable._eigenvalues(), plain._eigenvalues(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stable.B, plain.B)
    full = S7Full(64, 5)
    assert_normal(full.x_proj.weight, 0.02)
    assert full.base.tolist() == [-0.5] * 5
    y, last = full(100 * torch.randn(2, 50, 64))
    assert y.isfinite().all()
    assert full(0 * torch.randn(2, 500, 64), last)[1].abs().max() <= last.abs().max()
