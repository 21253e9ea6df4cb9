"""Responses of low-rank systems: the compiled loops against the plain loop, past a block of channels and of steps."""

import pytest
import torch

from scanl.ops._frame.fused import supported
from scanl.ops.fused.low_rank_response import low_rank_response, reference


def operands(width: int, steps: int, dtype: torch.dtype, starts: int = 3) -> list[torch.Tensor]:
    """Systems of two modes whose states neither vanish nor grow."""
    system = torch.randn(4, width, 2, dtype=torch.complex128) / 4
    system[0] = torch.polar(0.8 + 0.15 * torch.rand(width, 2).double(), torch.randn(width, 2).double())
    begin = torch.randn(starts, width, 2, dtype=torch.complex128)
    return [system, begin, torch.randn(2, steps, width, dtype=dtype)]


def results(run, system, begin, x, wanted=(0, 1, 2)):
    """The results, and the gradients of all operands from some of the results."""
    leaves = [leaf.clone().requires_grad_() for leaf in (system, begin, x)]
    found = run(leaves[0], leaves[1], x.shape[1], leaves[2])
    loss = sum((found[n].abs().square() * torch.arange(1, found[n].shape[-1] + 1)).sum() for n in wanted)
    return [*found, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_plain_loop(dtype):
    given = operands(18, 70, dtype)
    assert supported(given[2])
    for found, expected in zip(results(low_rank_response, *given), results(reference, *given), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wanted", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 32])
def test_gradients_of_one_result(wanted, steps):
    """A result that no loss reads has no gradient."""
    given = operands(3, steps, torch.float64)
    found, expected = (results(run, *given, wanted=(wanted,))[3:] for run in (low_rank_response, reference))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_negation_that_torch_has_put_off():
    system, begin, x = operands(3, 5, torch.float64)
    lazy, plain = (low_rank_response(system, begin, 5, each) for each in (torch._neg_view(-x), x))
    torch.testing.assert_close(lazy, plain)


def test_second_derivatives():
    system, begin, x = operands(2, 5, torch.float64, 1)
    leaves = [leaf.requires_grad_() for leaf in (system, begin, x)]
    assert torch.autograd.gradgradcheck(lambda a, s, x: low_rank_response(a, s, 5, x), leaves, fast_mode=True)
