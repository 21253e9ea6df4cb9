r"""Levels of a Fenwick tree over the past: level l >= 1 is a block of 2^(l-1) steps, and level 0 the present step.

Step t, counted from 0, reads level l if bit l - 1 of t is 1. The level then holds the steps s that agree with t in all
higher bits and whose bit l - 1 is 0. So a memory of its own for each level writes where that bit is 0, reads where it
is 1, and forgets everything where a block of 2^l steps begins.

Source: Guo et al., "Log-Linear Attention", arXiv:2506.04761.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scanl.ops._chunks import between, chunks, leading, trailing
from scanl.ops._frame.context import preferred
from scanl.ops._frame.nonfinite import readable, suspected

SIZE = 64  # steps of a chunk, a power of 2; levels 1 to BITS are inside one
BITS = SIZE.bit_length() - 1


class Levels(NamedTuple):
    """The levels from 1 on that each step writes, reads and begins anew, (B, T, L - 1) of bool."""

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


def divisible(*operands: Tensor) -> bool:
    """Return whether `divided` can take these operands (B, T, ·): finite ones on a CPU, of more than one chunk."""
    return (
        readable(*operands)  # first: a length that is open in an exported program is not compared
        and operands[0].shape[1] > SIZE
        and not {"auto", "parallel"}.isdisjoint(preferred())
        and not suspected(*operands)
    )


def divided(q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of all levels together, and the last states of levels 1 to L - 1, of sequences from step 0.

    q, k: (B, T, G, N), of a group of heads.   v: (B, T, H, P).   g: log decay (B, T, H).   weights: of each level
    at each step, (B, T, H, L).   Returns (B, T, H, P) and (B, H, L - 1, N, P).
    Inside a chunk a pair of steps has the weight of its level. A level above is one block of chunks, read by the block
    after it, so a step reads one matrix for each bit of its chunk's number; as heads of one memory, all L - 1 levels
    would be decayed, written and read at every step.
    """
    steps, groups = q.shape[1:3]
    # (B, G, n, C, ·), and with an axis of a group's r heads (B, G, r, n, C, ·)
    q, k = (chunks(x, SIZE, groups).squeeze(2) for x in (q, k))
    v, g, weights = (chunks(x, SIZE, groups) for x in (v, g[..., None], weights))
    count = q.shape[2]
    slot, chunk = (torch.arange(size, device=q.device) for size in (SIZE, count))
    bits = torch.arange(1, weights.shape[-1], device=q.device)[:, None] - 1  # level l has bit l - 1
    # A step's level for another is the number of bits up to the highest in which their positions differ.
    apart = ((slot[:, None, None] ^ slot[:, None]) >= 1 << bits[:BITS, 0]).sum(-1)
    among = weights.gather(-1, apart.expand(*g.shape[:-1], SIZE)) * between(g, False)[..., 0].exp().tril()
    o = ((q @ k.mT).unsqueeze(2) * among) @ v
    leaving, entering = trailing(g).exp() * v, leading(g, False)

    def beside(x: Tensor) -> Tensor:
        """Bring the heads of a group beside one another: (B, G, r, n, C, P) to (B, G, n, C, r P)."""
        return x.permute(0, 1, 3, 4, 2, 5).flatten(4)

    written = (k.mT @ beside(leaving)).unflatten(-1, (-1, v.shape[-1]))  # (B, G, n, N, r, P)
    total = g.sum((-2, -1)).transpose(2, 3)  # (B, G, n, r)
    blocks, within, half = written, total, 1  # of `half` chunks each: what they wrote, and their decay
    for level in range(BITS + 1, BITS + 1 + (count - 1).bit_length()):
        later = chunk[(chunk & half) > 0]
        answers = q.index_select(2, later) @ blocks.flatten(4).index_select(2, later // half - 1)
        answers = answers.unflatten(-1, (-1, v.shape[-1])).permute(0, 1, 4, 2, 3, 5)
        passed = torch.nn.functional.pad(total, (0, 0, 0, -count % half)).unflatten(2, (-1, half))
        passed = leading(passed, True).flatten(2, 3).index_select(2, later).transpose(2, 3)
        decay = (entering.index_select(3, later) + passed[..., None, None]).exp()
        weight = weights[..., level : level + 1].index_select(3, later)
        o = o.index_add(3, later, answers * (weight * decay))
        pairs = blocks.shape[2] // 2
        first, second = (blocks[:, :, n : 2 * pairs : 2] for n in range(2))
        first_within, second_within = (within[:, :, n : 2 * pairs : 2] for n in range(2))
        blocks = first * second_within.exp()[:, :, :, None, :, None] + second
        within, half = first_within + second_within, 2 * half
    last = steps - 1  # a level holds those steps of its block, of twice the level's length, whose bit is 0

    def held(position: Tensor, end: int, bits: Tensor) -> Tensor:
        """Return the positions that a level holds after the last one, (levels, positions)."""
        return ((position >> (bits + 1) == end >> (bits + 1)) & (position >> bits & 1 == 0)).to(v.dtype)

    low = held(slot, last % SIZE, bits[:BITS])
    low = k[:, :, -1, None].mT @ beside(low[:, :, None] * leaving[:, :, :, -1:])
    low = low.unflatten(-1, (-1, v.shape[-1])).permute(0, 1, 4, 2, 3, 5)  # (B, G, r, levels, N, P)
    high = held(chunk, last // SIZE, bits[BITS:] - BITS) * trailing(total).exp().mT[:, :, :, None]
    high = high @ written.permute(0, 1, 4, 2, 3, 5).flatten(4)
    states = torch.cat([low, high.unflatten(-1, low.shape[-2:])], 3)
    return o.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2, 3)[:, :steps], states.flatten(1, 2)
