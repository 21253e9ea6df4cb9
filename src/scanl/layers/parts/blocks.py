"""Sequences that are cut into blocks of W steps that do not overlap, for attention within blocks.

A call may begin in the middle of a block, each row at another step of it. The state then holds the keys and values of
the present block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.layers.packing import sequence_index
from scanl.layers.parts.positions import positions
from scanl.ops import SegmentMemory, segment_attention
from scanl.ops._frame.nonfinite import faulty
from scanl.ops.offsets import sequences


class Blocks:
    """Where the steps of one call stand in blocks of `size` steps, W.

    x: the call's input (B, T, ...).   past: (rows, 1) int64, steps read before, one row for each sequence; None for 0.
    steps: (B, T), position of each step in its block.   after: (rows, 1), steps read afterwards.
    at: (N or 1, Q), position in its block of each query, in the arrangement that `queries` returns.

    There are three arrangements. For one step: N = B, with one query and the W keys of its block. For at most W steps
    of new sequences: N = B, with T queries and T keys. Otherwise N counts all blocks, with W queries and W keys each.
    """

    def __init__(self, x: Tensor, past: Tensor | None, size: int, cu_seqlens: Tensor | None) -> None:
        rows, length = sequences(x, cu_seqlens), x.shape[1]
        self.size, self.rows = size, rows
        begun = x.new_zeros(rows, 1, dtype=torch.int64) if past is None else past
        steps, self.after = positions(begun, length, cu_seqlens)
        self.steps = steps % size
        traced = torch.compiler.is_exporting()
        self.one = cu_seqlens is None and length == 1 and past is not None
        self.fresh = cu_seqlens is None and past is None and not traced and length <= size
        if self.one or self.fresh:
            self.at = self.steps
            return
        # New sequences fill no block of more than T steps, so shorter blocks hold the same. One slot more than T keeps
        # the last block from being full.
        self.slots = size if past is not None or traced else min(size, length + 1)
        self.at = torch.arange(self.slots, device=x.device)[None]
        # All rows, or packed sequences, get whole blocks of slots, one row after another. The first slots of a row are
        # those of its present block. The last block is the next state, so it may be empty.
        filled, lengths = begun[:, 0] % size, (self.after - begun)[:, 0]
        blocks = (filled + lengths) // self.slots + 1
        first = self.slots * (blocks.cumsum(0) - blocks)
        self.count = (
            x.shape[0] * length + rows * (self.slots - 1)
        ) // self.slots + rows  # at least the sum of `blocks`
        if cu_seqlens is None:
            owner = torch.arange(rows, device=x.device)[:, None]
        else:
            owner = sequence_index(cu_seqlens, length)[None]
        self.of_steps = (first + filled)[owner] + steps - begun[:, 0][owner]
        self.present, self.last = (
            (first + offset)[:, None] + self.at for offset in (0, self.slots * blocks - self.slots)
        )

    def keys(self, new: Tensor, present: Tensor | None) -> Tensor:
        """Arrange what is known of each step (B, T, ...), and of the present block (rows, W, ...), as (N, S, ...)."""
        if self.fresh:
            return new
        if self.one:
            assert present is not None
            here = torch.arange(self.size, device=new.device) == self.at
            return torch.where(here.view(*here.shape, *(1,) * (new.ndim - 2)), new, present.to(new.dtype))
        empty = new.new_zeros(self.count * self.slots, *new.shape[2:])
        empty = empty if present is None else empty.index_put((self.present,), present.to(new.dtype))
        return empty.index_put((self.of_steps,), new).unflatten(0, (self.count, self.slots))

    def queries(self, new: Tensor) -> Tensor:
        """Arrange what is known of each step (B, T, ...) as (N, Q, ...)."""
        return new if self.one else self.keys(new, None)

    def taken(self, y: Tensor) -> Tensor:
        """Invert `queries`."""
        return y if self.one or self.fresh else y.flatten(0, 1)[self.of_steps]

    def kept(self, keys: Tensor) -> Tensor:
        """Return the present block after the call (rows, W, ...) from what `keys` gave; zeros where no step is."""
        if self.one:
            full = (self.at == self.size - 1).view(-1, *(1,) * (keys.ndim - 1))
            return keys.masked_fill(full, 0)
        last = keys if self.fresh else keys.flatten(0, 1)[self.last]
        if last.shape[1] == self.size:
            return torch.zeros_like(last) if self.fresh else last
        return F.pad(last, (0, 0) * (last.ndim - 2) + (0, self.size - last.shape[1]))

    def seen(self, keys: Tensor) -> Tensor:
        """Return (N or 1, Q, S): whether a query sees a key of its block."""
        return torch.arange(keys.shape[1], device=keys.device) <= self.at[..., None]

    def spoilt(self, k: Tensor, v: Tensor) -> Tensor:
        """Return (N, Q, 1): NaN for a query that sees a key or a value which is not finite, else 1."""
        fault = (faulty(k).flatten(2).any(2) | faulty(v).flatten(2).any(2))[:, None] & self.seen(k)
        return torch.where(fault.any(2, keepdim=True), torch.nan, 1.0)


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> Tensor:
    """Return the softmax attention of queries (B, T, H, K) to k, v (N, S, H, ·) of `blocks.keys`, within blocks."""
    if blocks.one:
        here = torch.arange(q.shape[0], device=q.device), blocks.at[:, 0]
        memory = SegmentMemory(k, v, here[1])
        return segment_attention(q, k[here][:, None], v[here][:, None], memory, window=blocks.size, scale=scale)[0]
    y, _ = segment_attention(blocks.queries(q), k, v, window=max(1, k.shape[1]), scale=scale)
    return blocks.taken(y)
