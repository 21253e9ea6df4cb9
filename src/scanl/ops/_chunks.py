"""Cut time into chunks, and sum log decays inside a chunk, for the parallel forms of matrix memories.

All decays are natural logarithms, at most 0. Sums are added up from their own first term, never as differences of
longer sums: a difference loses the small decays after a large one, and is NaN after -inf.
"""

import torch
from torch import Tensor


def chunks(x: Tensor, size: int, groups: int) -> Tensor:
    """(B, T, H, ·) as (B, groups, H / groups, chunks, size, ·), padded with zeros at the end."""
    batch, steps, heads, width = x.shape
    size = min(size, steps)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -steps % size))
    return x.view(batch, -1, size, groups, heads // groups, width).permute(0, 3, 4, 1, 2, 5)


def joined(x: Tensor, steps: int) -> Tensor:
    """Undo `chunks`: (B, groups, H / groups, chunks, size, ·) as (B, steps, H, ·)."""
    x = x.permute(0, 3, 4, 1, 2, 5)
    return x.reshape(x.shape[0], -1, x.shape[3] * x.shape[4], x.shape[5])[:, :steps]


def leading(g: Tensor, before: bool) -> Tensor:
    """The sum from the chunk's first step to each step, that step left out when `before`."""
    if before:
        g = torch.nn.functional.pad(g, (0, 0, 1, -1))
    return g.cumsum(-2)


def trailing(g: Tensor) -> Tensor:
    """The sum of the steps after each step, to the chunk's end."""
    return torch.nn.functional.pad(g.flip(-2), (0, 0, 1, -1)).cumsum(-2).flip(-2)


def between(g: Tensor, before: bool) -> Tensor:
    """The sum over steps s, j < s <= i (s < i when `before`), at (..., i, j, ·); 0 where no step lies between."""
    size = g.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1).unsqueeze(-1)
    sums = torch.where(later, g.unsqueeze(-2), 0).cumsum(-3)
    return torch.nn.functional.pad(sums, (0, 0, 0, 0, 1, -1)) if before else sums
