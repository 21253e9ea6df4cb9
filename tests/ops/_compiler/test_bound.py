"""Kernels whose state stays where it is: against the same kernels that make it anew in each call."""

import pytest
import torch
from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.ops._compiler.bound import BoundKernel
from scanl.ops._compiler.recorded import RecordedFunction

X = torch.arange(6.0).view(2, 3)


def test_a_state_is_read_in_one_place_and_written_in_another() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)

    def function(x: Tensor, state: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad():
            y = linear(x) * state
            return y.sum(1), y.real > 0, torch.polar(x, x) + state.flip(0), count + 1

    first, count = torch.polar(X, X), torch.tensor([3])
    recorded = RecordedFunction(function, X, first, count)
    places = [[first.clone(), count.clone()] for _ in range(2)]
    kernels = [BoundKernel(recorded, *both) for both in (places, places[::-1])]
    for step in range(4):
        if step == 2:
            linear.weight.data = torch.randn(3, 3)  # another memory
        expected = recorded(X + step, first, count)
        y, positive = kernels[step % 2](X + step)
        assert positive.dtype is torch.bool
        for mine, other in zip((y, positive, *places[1 - step % 2]), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        first, count = expected[2:]
    assert places[0][1].tolist() == [7]


def test_other_operands_are_refused() -> None:
    kernel = BoundKernel(RecordedFunction(lambda x, s: (x + s, s + 1), X, X.clone()), [X.clone()], [X.clone()])
    for other in (X.T, X.double()):
        with pytest.raises(ShapeError, match=r"expected torch.float32 \(2, 3\) because of the example"):
            kernel(other)
    before = kernel(X.T.contiguous().T)  # strides of its own
    torch.testing.assert_close(before[0], 2 * X)
    assert kernel(X)[0].data_ptr() != before[0].data_ptr()  # a result stays as it is


def test_a_conjugate_is_an_operand() -> None:
    """In torch it is a view of the numbers, with a mark."""
    z = torch.polar(X, X)
    recorded = RecordedFunction(lambda z, s: (2 * z, s + 1), z, X)
    kernel = BoundKernel(recorded, [X.clone()], [X.clone()])
    for y, *_ in (kernel(z.conj()), recorded(z.conj(), X)):
        torch.testing.assert_close(y, torch.complex(2 * z.real, -2 * z.imag))
