"""Sequences that are cut into blocks of W steps that do not overlap, for attention within blocks.

A call may begin in the middle of a block, each row at another step of it. The state then holds the keys and values of
the present block.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.layers.packing import sequence_index
from scanl.layers.parts.positions import positions
from scanl.ops import SegmentMemory, linear_scan, segment_attention
from scanl.ops._frame.nonfinite import faulty
from scanl.ops.offsets import sequences


class Blocks:
    """Positions of the steps of one call in blocks of `size` steps, W.

    x: the call's input (B, T, ...).   past: (rows, 1) int64, steps read before, one row for each sequence; None for 0.
    causal: False if a step sees its whole block, as it is after the call.
    steps: (B, T), position of each step in its block.   after: (rows, 1), steps read afterwards.
    first_block, last_block: (rows,), the indices of a row's first and last block in the third arrangement below.
    at: (N or 1, Q), position in its block of each query, in the arrangement that `queries` returns.

    There are three arrangements. For one step: N = B, with one query and the W keys of its block. For at most W steps
    of new sequences: N = B, with T queries and T keys. Otherwise N counts all blocks, with W queries and W keys each.
    """

    def __init__(
        self, x: Tensor, past: Tensor | None, size: int, cu_seqlens: Tensor | None, causal: bool = True
    ) -> None:
        rows, length = sequences(x, cu_seqlens), x.shape[1]
        self.size, self.rows, self.length, self.packed = size, rows, length, cu_seqlens is not None
        self.causal, self.past = causal, past
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
        # Whole blocks of slots for each row, one row after another. The first slots of a row are those of its present
        # block. Its last block is the next state, so it may be empty.
        filled, lengths = begun[:, 0] % size, (self.after - begun)[:, 0]
        full = (filled + lengths) // self.slots
        if cu_seqlens is None:
            self.row_blocks = (length + self.slots - 1) // self.slots + 1
            self.count = rows * self.row_blocks
            self.first_block = self.row_blocks * torch.arange(rows, device=x.device)
            owner = torch.arange(rows, device=x.device)[:, None]
        else:
            self.count = (length + rows * (self.slots - 1)) // self.slots + rows  # at least the sum of full + 1
            self.first_block = (full + 1).cumsum(0) - full - 1
            owner = sequence_index(cu_seqlens, length)[None]
        self.last_block = self.first_block + full
        first = self.slots * self.first_block
        self.of_steps = (first + filled)[owner] + steps - begun[:, 0][owner]
        self.present, self.last = (
            (self.slots * block)[:, None] + self.at for block in (self.first_block, self.last_block)
        )

    def keys(self, new: Tensor, present: Tensor | None) -> Tensor:
        """Arrange values of each step (B, T, ...), and of the present block (rows, W, ...), as (N, S, ...)."""
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
        """Arrange values of each step (B, T, ...) as (N, Q, ...)."""
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

    def sums(self, new: Tensor, present: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of the full blocks before each block, and the sums of the present and of all full blocks.

        new: (N, ...), sum of the new steps of each block.   present: (rows, ...), sum of the earlier steps of the
        present block.   past: (rows, ...), sum of the full blocks before it.
        """
        present, past = present.to(new.dtype), past.to(new.dtype)
        if self.one or self.fresh:
            total = present + new
            full = self.at[:, -1:] == self.size - 1 if self.length else self.at.new_zeros(1, 1, dtype=torch.bool)
            full = full.view(-1, *(1,) * (new.ndim - 1))
            return past, total.masked_fill(full, 0), torch.where(full, past + total, past)
        total = new.index_add(0, self.first_block, present)
        # A block reads the sum of the previous one, and the first of a row what is past.
        begins = torch.isin(torch.arange(self.count, device=new.device), self.first_block)
        shifted = total.roll(1, 0).masked_fill(begins.view(-1, *(1,) * (new.ndim - 1)), 0)
        one = new.new_ones(())
        if self.packed:  # blocks that no row needs are a row of their own
            ends = torch.stack([self.last_block[-1] + 1, torch.full_like(self.last_block[0], self.count)])
            offsets, past = torch.cat([self.first_block, ends]), torch.cat([past, new.new_zeros(1, *new.shape[1:])])
            at_blocks = linear_scan(shifted[None], one, past, cu_seqlens=offsets)[0][0]
        else:
            at_blocks = linear_scan(shifted.unflatten(0, (self.rows, self.row_blocks)), one, past)[0].flatten(0, 1)
        return at_blocks, total[self.last_block], at_blocks[self.last_block]

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the values of each row (rows, ...) for each of its blocks (N, ...)."""
        if self.one or self.fresh:
            return values
        blocks = torch.arange(self.count, device=values.device)
        return values[torch.searchsorted(self.first_block, blocks, right=True) - 1]

    def seen(self, keys: Tensor) -> Tensor:
        """Return (N or 1, Q or 1, S): whether a query sees a key of its block."""
        if not self.causal:
            filled = None if self.past is None else torch.arange(self.size, device=keys.device) < self.past % self.size
            return self.keys(torch.ones_like(self.steps, dtype=torch.bool), filled)[:, None]
        return torch.arange(keys.shape[1], device=keys.device) <= self.at[..., None]

    def bias(self, of_places: Callable[[Tensor], Tensor], keys: int) -> Tensor:
        """Return the bias of scores, as `softmax_attention` takes it. of_places: of a key's place less a query's."""
        if self.one:
            return of_places(torch.arange(keys, device=self.at.device) - self.at[..., None])[:, None]
        return of_places(torch.arange(min(0, 1 - self.at.shape[1]), keys, device=self.at.device))[None, None]

    def spoilt(self, k: Tensor, v: Tensor) -> Tensor:
        """Return (N, Q or 1, 1): NaN for a query that sees a key or a value which is not finite, else 1."""
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
