"""The position of each step in its sequence, for layers that carry a count of steps in their state."""

import torch
from torch import Tensor

from scanl.layers.packing import sequence_index


def positions(count: Tensor, length: int, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The position of each step in its sequence, counted from 0, and the count of steps after the last.

    count: steps read before, (B, 1) int64, one row for each sequence.   Returns positions (B, length), or (1, length)
    of packed sequences, and the new count (B, 1).

    >>> [each.tolist() for each in positions(torch.tensor([[5]]), 2)]
    [[[5, 6]], [[7]]]
    """
    steps = torch.arange(length, device=count.device)
    if cu_seqlens is None:
        return count + steps, count + length
    owner = sequence_index(cu_seqlens, length)
    return (count[owner, 0] + steps - cu_seqlens[owner])[None], count + cu_seqlens.diff()[:, None]
