"""Positions of steps in their sequences, for layers whose state counts steps."""

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.layers.packing import sequence_index
from scanl.ops._frame.context import holds


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


def check_length(who: str, x: Tensor, past: Tensor | None, cu_seqlens: Tensor | None, longest: int | None) -> None:
    """Raise ShapeError if x makes a sequence of more steps than `longest`; not where the length is not known.

    past: the steps read before, one number for each sequence; None for 0.   longest: as in `Layer`.
    """
    length = x.shape[1]
    if longest is None:
        return
    unknown = torch.compiler.is_compiling() or x.device.type == "meta"
    if not unknown and (past is not None or cu_seqlens is not None):
        reached = x.new_zeros(1, dtype=torch.int64) if past is None else past.flatten()
        reached = reached + (length if cu_seqlens is None else cu_seqlens.diff())
        if not reached.numel() or holds(reached <= longest):
            return
        length = int(reached.max())
    elif past is not None or cu_seqlens is not None:
        return
    if length > longest:
        raise ShapeError(
            f"{who}: x makes a sequence of {length} steps, expected at most max_length={longest}; build "
            "the layer with a larger one"
        )
