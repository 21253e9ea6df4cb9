"""Counts above thresholds: the compiled loop against the plain one, and against convolutions."""

import pytest
import torch

from scanl.ops._frame.fused import supported
from scanl.ops.fused.exceedances import exceedances, plain

BOUNDS = torch.tensor([0, 9, 9, 20])  # the second sequence is empty


def operands(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    decay = torch.polar(0.9 * torch.rand(3, 5, generator=draw), 3 * torch.rand(3, 5, generator=draw))
    shapes = [(2, 3, 5), (2, 3, 5), (2, 5), (4, 5), (3, 4, 3, 5)]
    mix, c, e, thresholds, state = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in shapes)
    x = torch.randn(20, 2, generator=draw, dtype=dtype)
    return [x, torch.stack([decay.real, decay.imag]).to(dtype), mix, c, e, thresholds, state]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_plain_loop(dtype):
    given = operands(dtype)
    before = given[-1].clone()
    assert supported(*given)
    for found, expected in zip(exceedances(*given, BOUNDS), plain(*given, BOUNDS), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected)
    assert torch.equal(given[-1], before)


def test_it_counts_a_convolution():
    """With double poles, the response to an impulse after t steps is (t + 1) λ^t."""
    x, decay, mix, c, e, thresholds, state = operands()
    count, _ = exceedances(x, decay, mix, c, e, thresholds, torch.zeros_like(state), BOUNDS)
    powers = torch.complex(*decay) ** torch.arange(11)[:, None, None]
    kernel = (torch.complex(*c).conj() * torch.arange(1, 12)[:, None, None] * powers).real
    y = [
        sum(torch.einsum("c,cfk,fk->k", x[s], mix, kernel[t - s]) for s in range(9, t + 1)) + x[t] @ e
        for t in range(9, 20)
    ]
    expected = (torch.stack(y)[:, None] > thresholds).sum(0)
    torch.testing.assert_close(count[2], expected.to(count))
    assert 0 < count.mean() < 11


def test_pieces_are_the_whole():
    x, *system, state = operands()
    whole, last = exceedances(x, *system, state[:1], torch.tensor([0, 20]))
    first, middle = exceedances(x[:7], *system, state[:1], torch.tensor([0, 7]))
    second, end = exceedances(x[7:], *system, middle, torch.tensor([0, 13]))
    assert torch.equal(first + second, whole)
    assert torch.equal(end, last)
