"""Cut a sequence into the stretches of the ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scanl.errors import ShapeError


def bounds(steps: int, rank: int, size: int) -> tuple[int, int]:
    """Return where the stretch of a rank begins and ends: all are as equal as can be, the longer ones first."""
    begin = rank * (steps // size) + min(rank, steps % size)
    return begin, begin + steps // size + (rank < steps % size)


def stretch(x: Tensor, rank: int, size: int, *, lengths: Sequence[int] | None = None, dim: int = 1) -> Tensor:
    """Return the stretch of rank `rank` of `size`, a view.

    lengths: steps of each rank's stretch; None: as equal as can be, the longer ones first.   dim: the axis of time.
    Raises ShapeError if the lengths do not add up to the steps of x.
    """
    steps = x.shape[dim]
    if lengths is None:
        lengths = [end - begin for begin, end in (bounds(steps, at, size) for at in range(size))]
    if len(lengths) != size or sum(lengths) != steps:
        raise ShapeError(f"lengths: {list(lengths)}, expected {size} numbers whose sum is the {steps} steps of x")
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def stretch_offsets(cu_seqlens: Tensor, start: int, end: int) -> Tensor:
    """Return the offsets of the sequences in the steps from `start` to `end`, counted from `start`.

    The first of them is the one that goes on from before `start`; it is empty if a sequence begins there. At step 0
    nothing goes on, and the offsets are as they were.

    >>> stretch_offsets(torch.tensor([0, 3, 5, 9]), 4, 9)
    tensor([0, 1, 5])
    >>> stretch_offsets(torch.tensor([0, 3, 5, 9]), 5, 9)
    tensor([0, 0, 4])
    """
    begins = cu_seqlens[:-1]
    ends_here = end == int(cu_seqlens[-1])  # empty sequences at the end begin there
    inside = begins[(begins >= start) & ((begins < end) | ends_here)] - start
    first = inside.new_zeros(0 if start == 0 else 1)
    return torch.cat([first, inside, inside.new_full((1,), end - start)])
