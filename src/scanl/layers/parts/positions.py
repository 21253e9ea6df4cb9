"""Positions of steps in their sequences, for layers whose state counts steps."""

import torch
from torch import Tensor

from scanl.layers.packing import sequence_index


def positions(count: Tensor, length: int, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the position of each step in its sequence, from 0, and the new count of steps.

    count: (B, 1) int64, steps read before, one row for each sequence.   Returns positions (B, length), or (1, length)
    for packed sequences, and the count (B, 1) after the last step.

    >>> [each.tolist() for each in positions(torch.tensor([[5]]), 2)]
    [[[5, 6]], [[7]]]
    """
    steps = torch.arange(length, device=count.device)
    if cu_seqlens is None:
        return count + steps, count + length
    owner = sequence_index(cu_seqlens, length)
    return (count[owner, 0] + steps - cu_seqlens[owner])[None], count + cu_seqlens.diff()[:, None]
