"""Cut time into chunks, and sum log decays inside a chunk, for the parallel forms of matrix memories.

All decays are natural logarithms, at most 0. Each sum starts at its own first term. A difference of longer sums would
lose small decays after a large one, and would be NaN after -inf.
"""

import torch
from torch import Tensor


def chunks(x: Tensor, size: int, groups: int) -> Tensor:
    """Reshape (B, T, H, ·) to (B, groups, H / groups, chunks, size, ·); pad time with zeros at the end."""
    batch, steps, heads, width = x.shape
    size = min(size, steps)
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -steps % size))
    return x.view(batch, -1, size, groups, heads // groups, width).permute(0, 3, 4, 1, 2, 5)


def joined(x: Tensor, steps: int) -> Tensor:
    """Undo `chunks`: reshape (B, groups, H / groups, chunks, size, ·) to (B, steps, H, ·)."""
    x = x.permute(0, 3, 4, 1, 2, 5)
    return x.reshape(x.shape[0], -1, x.shape[3] * x.shape[4], x.shape[5])[:, :steps]


def leading(g: Tensor, exclusive: bool) -> Tensor:
    """Sum from the chunk's first step to each step. If `exclusive`, leave out that step."""
    if exclusive:
        g = torch.nn.functional.pad(g, (0, 0, 1, -1))
    return g.cumsum(-2)


def trailing(g: Tensor) -> Tensor:
    """Sum from the step after each step to the chunk's end."""
    return torch.nn.functional.pad(g.flip(-2), (0, 0, 1, -1)).cumsum(-2).flip(-2)


def between(g: Tensor, exclusive: bool) -> Tensor:
    """At (..., i, j, ·), sum over steps j < s <= i (s < i if `exclusive`). The sum is 0 where there is no such step."""
    size = g.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1).unsqueeze(-1)
    sums = torch.where(later, g.unsqueeze(-2), 0).cumsum(-3)
    return torch.nn.functional.pad(sums, (0, 0, 0, 0, 1, -1)) if exclusive else sums


def scores(q: Tensor, k: Tensor, g: Tensor | None, exclusive: bool) -> Tensor:
    """At (..., i, j), multiply q_i by k_j, decayed in between; 0 where j > i (j >= i if `exclusive`)."""
    if g is None:
        inside = q @ k.mT
    elif g.shape[-1] == 1:
        inside = q @ k.mT * between(g, exclusive)[..., 0].exp()
    else:
        inside = (q.unsqueeze(-2) * k.unsqueeze(-3) * between(g, exclusive).exp()).sum(-1)
    return inside.tril(-1 if exclusive else 0)
