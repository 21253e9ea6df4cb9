"""What depends on weights alone is computed again when their numbers have changed, however that was done."""

import torch
from torch import Tensor

from scanl.ops._compiler.kept_values import BytesOfTensors
from scanl.ops._compiler.recorded import RecordedFunction

WIDE = (1 << 13) + 2  # numbers whose exponentials take longer than to compare them, and which fill no last vector


def recorded(weight: Tensor, *, portable: bool = False) -> RecordedFunction:
    def function(x: Tensor) -> Tensor:
        part, other = (weight * 2).exp().split(weight.shape[0] // 2)
        return x * part.flip(0).sum() + other[:3] + weight[:3]

    return RecordedFunction(function, torch.ones(1, 3), by_rows=True, portable=portable)


def test_values_are_those_of_the_weights_of_each_call() -> None:
    weight, x = torch.linspace(-1, 0, WIDE), torch.randn(1, 3)
    call = recorded(weight)
    assert call.kept is not None
    assert len(call.kept.values) == 2
    changes = [
        lambda: None,
        lambda: weight.mul_(0.5),
        lambda: weight.data.add_(0.1),
        lambda: weight.numpy().__setitem__(slice(4), 0.3),
        lambda: weight.set_(torch.linspace(-2, 0, WIDE)),
        lambda: weight[:2].fill_(torch.nan),
        lambda: weight[:2].fill_(0.5),
        lambda: weight[-1:].fill_(1.5),
    ]
    for change in changes:
        change()
        values = (weight.double() * 2).exp().split(WIDE // 2)
        expected = x * values[0].sum() + values[1][:3] + weight[:3]
        torch.testing.assert_close(call(x), expected.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_rows_that_are_one_in_memory() -> None:
    """A value that stands for all rows, as the transition of a layer in a batch does."""
    weight, x = torch.linspace(-1, 0, WIDE), torch.randn(4, 3)
    call = RecordedFunction(lambda x: x * weight.exp().expand(4, WIDE)[:, :3], torch.ones(4, 3), by_rows=True)
    assert call.kept is not None
    assert [value.stride(0) for value in call.kept.values.values()] == [0]
    for _ in range(2):
        torch.testing.assert_close(call(x), x * weight.exp()[:3])
        weight.mul_(0.5)


def test_what_is_computed_quickly_is_computed_in_each_call() -> None:
    call = recorded(torch.ones(8))
    assert call.kept is not None
    assert not call.kept.values


def test_nothing_is_kept_where_the_bits_are_those_of_every_machine() -> None:
    """Torch computes what is kept, and its bits are of one machine."""
    assert recorded(torch.linspace(-1, 0, WIDE), portable=True).kept is None


def test_the_digest_of_bytes_changes_with_each_of_them() -> None:
    for size in (3, 64, 200, 261, 512):
        one, other = torch.arange(size, dtype=torch.uint8), torch.ones(2 * size)
        kept = BytesOfTensors([one, other])
        assert kept.same()
        for at in range(size):
            one[at] += 128
            assert not kept.same()
            one[at] -= 128
        for change in (other.neg_, lambda other=other: other[::64].neg_()):
            change()
            assert not kept.same()
            change()
        assert kept.same()
