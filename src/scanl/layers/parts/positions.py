"""Which step of its sequence a step is, for layers that need to know: they carry the count in their state."""

import torch
from torch import Tensor

from scanl.layers.packing import sequence_index


def positions(count: Tensor, length: int, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The number of each step in its sequence, and the count after the last.

    count: steps read before, (B, 1) int64, one row a sequence.   Returns (B, length), or (1, length) where the
    sequences are packed, from 0 on, and (B, 1).

    >>> [each.tolist() for each in positions(torch.tensor([[5]]), 2)]
    [[[5, 6]], [[7]]]
    """
    steps = torch.arange(length, device=count.device)
    if cu_seqlens is None:
        return count + steps, count + length
    owner = sequence_index(cu_seqlens, length)
    return (count[owner, 0] + steps - cu_seqlens[owner])[None], count + cu_seqlens.diff()[:, None]
