r"""Levels of a Fenwick tree over the past: level l >= 1 is a block of 2^(l-1) steps, and level 0 the present step.

Step t, counted from 0, reads level l if bit l - 1 of t is 1. The level then holds the steps s that agree with t in all
higher bits and whose bit l - 1 is 0. So a memory of its own for each level writes where that bit is 0, reads where it
is 1, and forgets everything where a block of 2^l steps begins.

Source: Guo et al., "Log-Linear Attention", arXiv:2506.04761.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Levels(NamedTuple):
    """Which levels from 1 on each step writes, reads and begins anew, (B, T, L - 1) of bool."""

    writes: Tensor
    reads: Tensor
    begins: Tensor


def count_levels(max_length: int) -> int:
    """Return L, so that levels 0 to L - 1 hold the past of any step of a sequence.

    >>> count_levels(16384), count_levels(5), count_levels(1)
    (15, 4, 1)
    """
    return (max_length - 1).bit_length() + 1


def levels(positions: Tensor, count: int) -> Levels:
    """Return the levels of steps. positions: (B, T), from 0.   count: L.

    >>> [part.int().tolist() for part in levels(torch.tensor([[5]]), 4)]  # 5 = 101 in binary: it reads 4, and 0 to 3
    [[[[0, 1, 0]]], [[[1, 0, 1]]], [[[0, 0, 0]]]]
    """
    level = torch.arange(1, count, device=positions.device)
    position = positions.unsqueeze(-1)
    reads = ((position >> (level - 1)) & 1).bool()
    return Levels(~reads, reads, (position & ((1 << level) - 1)) == 0)
