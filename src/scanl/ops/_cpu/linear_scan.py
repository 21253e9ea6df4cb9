"""The linear scan as fused loops: one pass over memory forwards, one backwards.

Features are `outer` groups of `inner` channels. In a group, `a` is one per channel or one for all channels, so a
broadcast `a` is never copied. The carry is the row that was just written. A separate carry would double the stores in
the store buffer, and with that the time of a large scan. A sequence is a range of rows of the flattened (B T); packed
sequences are several ranges. A long narrow scan is cut in time into several ranges; `_repair` then adds the
contribution of the carry from one range to the next. The backward pass is the scan in reverse time: each step computes
dx = dy + conj(a after) (dx after), da = dx conj(h before).
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill, move
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import CORES, Kernel, array, take
from scanl.ops.offsets import offsets

_LAYOUT = ("blocks", "block", "outer", "inner", "sequences", "reverse", "a_time", "a_outer", "a_inner", "ranges")
FORWARD = Slots(" ".join(_LAYOUT) + " x a y carry")  # also for the repair
BACKWARD = Slots(" ".join(_LAYOUT) + " dy a y carry state dx da")

WIDEST = 4096  # most channels of a block, so that its carry and rows fit the first-level cache
NARROW = 32  # least channels of a block: in narrower blocks, several cores would write to one cache line
LONG = 4096  # least steps of a sequence that is cut in time
SPLIT = 1024  # from this many channels on, cutting channels is as fast as cutting time and needs no repair
PIECES = 4  # pieces of time, or blocks of channels with one da; a constant, since rounding depends on it
FLUSH = 256  # steps of a partial sum; adding partial sums keeps long sums exact


@helper(forceinline=True)
def _forward_row(x, a, h, y):
    if a.size == y.size:
        for i in range(y.size):
            y[i] = x[i] + a[i] * h[i]
    else:
        decay = a[0]
        for i in range(y.size):
            y[i] = x[i] + decay * h[i]


@helper(forceinline=True)
def _backward_row(dy, a, after, before, dx, da):
    """Take one step backwards, with one da per channel."""
    for i in range(dx.size):
        d = dy[i] + np.conj(a[i]) * after[i]
        dx[i] = d
        da[i] = d * np.conj(before[i])


@helper(forceinline=True)
def _backward_row_summed(dy, a, after, before, dx, total):
    """Like `_backward_row`, but add da to a sum over time."""
    for i in range(dx.size):
        d = dy[i] + np.conj(a[i]) * after[i]
        dx[i] = d
        total[i] += d * np.conj(before[i])


@helper(forceinline=True)
def _backward_row_shared(dy, a, after, before, dx):
    """Like `_backward_row`, for one a for all channels; return its da."""
    decay = np.conj(a[0])
    total = dy[0] * 0
    for i in range(dx.size):
        d = dy[i] + decay * after[i]
        dx[i] = d
        total += d * np.conj(before[i])
    return total


@helper(forceinline=True)
def _forward_repair_row(p, a, y, tiny):
    """Add the decayed carry to a row; return whether later rows need it too.

    The repair stops when the carry is below the smallest normal number: with rounding to nearest, subnormal numbers may
    never decay to zero. NaN does not compare as below it, so a NaN is carried on.
    """
    alive = False
    for i in range(p.size):
        p[i] *= a[i] if a.size == p.size else a[0]
        y[i] += p[i]
        alive |= not abs(p[i].real) + abs(p[i].imag) < tiny
    return alive


@helper(forceinline=True)
def _backward_repair_row(p, a, before, dx, da, tiny):
    alive = False
    for i in range(p.size):
        dx[i] += p[i]
        da[i if a.size == p.size else 0] += p[i] * np.conj(before[i])
        p[i] *= np.conj(a[i] if a.size == p.size else a[0])
        alive |= not abs(p[i].real) + abs(p[i].imag) < tiny
    return alive


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        blocks, block, outer, inner = slots.blocks, slots.block, slots.outer, slots.inner
        sequences, reverse = slots.sequences, slots.reverse
        a_time, a_outer, a_inner = slots.a_time, slots.a_outer, slots.a_inner
        x, a, y, carry = slots.x, slots.a, slots.y, slots.carry
        ranges = array(slots.ranges, 3 * sequences, np.int64)
        width = outer * inner
        while True:
            unit = take(counter)
            if unit >= units:
                return
            n, o, first = unit // (outer * blocks), unit // blocks % outer, unit % blocks * block
            begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
            size = min(block, inner - first)
            a_size = size if a_inner else 1
            channel = o * inner + first
            start = carry + item * (n * width + channel)
            h = start
            for i in range(steps):
                t = steps - 1 - i if reverse else i
                k = item * ((begin + t) * width + channel)
                j = item * (a_begin + t * a_time + o * a_outer + first * a_inner)
                hs, ys = array(h, size, dtype), array(y + k, size, dtype)
                _forward_row(array(x + k, size, dtype), array(a + j, a_size, dtype), hs, ys)
                h = y + k
            if steps:
                last, ends = array(start, size, dtype), array(h, size, dtype)
                for m in range(size):
                    last[m] = ends[m]

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        blocks, block, outer, inner = slots.blocks, slots.block, slots.outer, slots.inner
        sequences, reverse = slots.sequences, slots.reverse
        a_time, a_outer, a_inner = slots.a_time, slots.a_outer, slots.a_inner
        dy, a, y, carry, state = slots.dy, slots.a, slots.y, slots.carry, slots.state
        dx, da = slots.dx, slots.da
        ranges = array(slots.ranges, 3 * sequences, np.int64)
        width = outer * inner
        da_width = width if a_inner else outer * blocks
        recent, total, ones = np.zeros(block, dtype), np.zeros(block, dtype), np.ones(block, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            n, o, first = unit // (outer * blocks), unit // blocks % outer, unit % blocks * block
            begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
            size = min(block, inner - first)
            a_size = size if a_inner else 1
            channel = o * inner + first
            da_channel = channel if a_inner else o * blocks + unit % blocks
            c = array(carry + item * (n * width + channel), size, dtype)
            start = state + item * (n * width + channel)
            decays, after = ones[:a_size], c
            fill(recent, 0, recent.size, 0)
            fill(total, 0, total.size, 0)
            for i in range(steps):
                t = i if reverse else steps - 1 - i
                k = item * ((begin + t) * width + channel)
                j = item * (a_begin + t * a_time + o * a_outer + first * a_inner)
                before = y + k + (item * width if reverse else -item * width)
                dys, dxs = array(dy + k, size, dtype), array(dx + k, size, dtype)
                hs = array(start if i == steps - 1 else before, size, dtype)
                at = ((begin + t if a_time else n) * da_width + da_channel) * item
                if a_inner == 0:
                    d = _backward_row_shared(dys, decays, after, hs, dxs)
                    if a_time:
                        array(da + at, 1, dtype)[0] = d
                    else:
                        recent[0] += d
                elif a_time:
                    _backward_row(dys, decays, after, hs, dxs, array(da + at, size, dtype))
                else:
                    _backward_row_summed(dys, decays, after, hs, dxs, recent)
                decays, after = array(a + j, a_size, dtype), dxs
                if a_time == 0 and i % FLUSH == FLUSH - 1:
                    for m in range(a_size):
                        total[m] += recent[m]
                        recent[m] = 0
            if steps:
                for m in range(size):
                    c[m] = np.conj(decays[m if a_inner else 0]) * after[m]
            if a_time == 0:
                sums = array(da + (n * da_width + da_channel) * item, a_size, dtype)
                for m in range(a_size):
                    sums[m] = total[m] + recent[m]

    return backward


def _build_forward_repair(dtype):
    item, tiny = dtype.itemsize, dtype.type(np.finfo(dtype).tiny).real

    def repair(pointer):
        """In the order of the scan, add to each range the contribution of the carry from the range before it."""
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        blocks, block, outer, inner = slots.blocks, slots.block, slots.outer, slots.inner
        sequences, reverse = slots.sequences, slots.reverse
        a_time, a_outer, a_inner = slots.a_time, slots.a_outer, slots.a_inner
        a, y, carry = slots.a, slots.y, slots.carry
        ranges = array(slots.ranges, 3 * sequences, np.int64)
        width = outer * inner
        row = np.empty(block, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            o, first = unit // blocks, unit % blocks * block
            size = min(block, inner - first)
            a_size = size if a_inner else 1
            channel = o * inner + first
            p = row[:size]
            for s in range(1, sequences):
                n, source = (sequences - 1 - s, sequences - s) if reverse else (s, s - 1)
                begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
                move(array(carry + item * (source * width + channel), size, dtype), 0, size, p, 0)
                for i in range(steps):
                    t = steps - 1 - i if reverse else i
                    k = item * ((begin + t) * width + channel)
                    j = item * (a_begin + t * a_time + o * a_outer + first * a_inner)
                    if not _forward_repair_row(p, array(a + j, a_size, dtype), array(y + k, size, dtype), tiny):
                        break
                h = array(carry + item * (n * width + channel), size, dtype)
                for m in range(size):
                    h[m] += p[m]

    return repair


def _build_backward_repair(dtype):
    item, tiny = dtype.itemsize, dtype.type(np.finfo(dtype).tiny).real

    def repair(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        blocks, block, outer, inner = slots.blocks, slots.block, slots.outer, slots.inner
        sequences, reverse = slots.sequences, slots.reverse
        a_time, a_outer, a_inner = slots.a_time, slots.a_outer, slots.a_inner
        a, y, carry, state = slots.a, slots.y, slots.carry, slots.state
        dx, da = slots.dx, slots.da
        ranges = array(slots.ranges, 3 * sequences, np.int64)
        width = outer * inner
        da_width = width if a_inner else outer * blocks
        row = np.empty(block, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            o, first = unit // blocks, unit % blocks * block
            size = min(block, inner - first)
            a_size = size if a_inner else 1
            channel = o * inner + first
            da_channel = channel if a_inner else unit
            p = row[:size]
            for s in range(1, sequences):
                n, source = (s, s - 1) if reverse else (sequences - 1 - s, sequences - s)
                begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
                move(array(carry + item * (source * width + channel), size, dtype), 0, size, p, 0)
                for i in range(steps):
                    t = i if reverse else steps - 1 - i
                    k = item * ((begin + t) * width + channel)
                    j = item * (a_begin + t * a_time + o * a_outer + first * a_inner)
                    before = y + k + (item * width if reverse else -item * width)
                    if i == steps - 1:
                        before = state + item * (n * width + channel)
                    at = ((begin + t if a_time else n) * da_width + da_channel) * item
                    if not _backward_repair_row(
                        p,
                        array(a + j, a_size, dtype),
                        array(before, size, dtype),
                        array(dx + k, size, dtype),
                        array(da + at, a_size, dtype),
                        tiny,
                    ):
                        break
                c = array(carry + item * (n * width + channel), size, dtype)
                for m in range(size):
                    c[m] += p[m]

    return repair


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)
_forward_repair, _backward_repair = Kernel(_build_forward_repair), Kernel(_build_backward_repair)


class _Layout(NamedTuple):
    """The memory layout of (B, T, *F) operands, and the division of the work into units."""

    a_shape: tuple[int, ...]  # shape of a, expanded over as few axes as the kernel needs
    da_shape: tuple[int, ...]  # shape of da from the kernel: rows or sequences, groups, channels or blocks
    da_view: tuple[int, ...]  # da in x's axes, after summing the blocks
    shared: bool  # one a for all inner channels
    slots: list[dict[str, int]]  # a kernel's slots for this layout: for a forward scan, for a reverse scan
    repair_slots: list[dict[str, int]]  # the same for a repair
    ranges: np.ndarray  # for each range: first row, end row, first row of its a
    cut: bool  # the ranges are pieces of one sequence
    units: int
    repair_units: int


@functools.lru_cache(512)
def _layout(x_shape: tuple[int, ...], a_shape: tuple[int, ...], bounds: tuple[int, ...] | None) -> _Layout:
    batch, steps, *features = x_shape
    a_shape = (1,) * (len(x_shape) - len(a_shape)) + a_shape
    a_features = list(a_shape[2:])
    wide = [i for i, size in enumerate(features) if size != 1]
    shared = bool(wide) and a_features[wide[-1]] == 1
    split = 0  # features from this axis on are the inner ones: either one a for all, or one a for each
    for i in reversed(wide):
        if (a_features[i] == 1) != shared:
            split = i + 1
            break
    if math.prod(a_features[:split]) > 1:
        a_features[:split] = features[:split]
    outer, inner = math.prod(features[:split]), math.prod(features[split:])
    row = math.prod(a_features)
    a_outer = (1 if shared else inner) if math.prod(a_features[:split]) > 1 else 0
    a_time = row if a_shape[1] != 1 else 0
    a_batch = row * a_shape[1] if a_shape[0] > 1 else 0

    pieces = 1
    if bounds is not None:
        first, last = np.array(bounds[:-1]), np.array(bounds[1:])
        a_first = first * a_time
    else:
        if batch == 1 and steps >= LONG and outer * inner < SPLIT:
            pieces = PIECES
        edges = np.array([steps * i // pieces for i in range(pieces + 1)])
        base = np.arange(batch)[:, None]
        first, last = base * steps + edges[:-1], base * steps + edges[1:]
        a_first = base * a_batch + edges[:-1] * a_time
    ranges = np.stack([first.ravel(), last.ravel(), a_first.ravel()], 1).astype(np.int64)

    block, blocks = _blocks(inner, len(ranges) * outer, PIECES if shared else CORES)
    lead = (batch, steps) if a_time else (len(ranges), 1)
    da_shape = (lead[0] * lead[1], outer, blocks if shared else inner)
    da_view = (*lead, *features[:split], *((1 if shared else size) for size in features[split:]))
    told = (outer, inner, len(ranges)), (a_time, a_outer, int(not shared), ranges.ctypes.data)
    # Pieces are repaired in sequence, so cores divide the channels. With one a for all channels, the blocks stay the
    # same, since each block has a partial sum of da.
    repair_block, repair_blocks = (block, blocks) if shared else _blocks(inner, outer, CORES)
    return _Layout(
        (*a_shape[:2], *a_features),
        da_shape,
        da_view,
        shared,
        [dict(zip(_LAYOUT, (blocks, block, *told[0], r, *told[1]), strict=True)) for r in (0, 1)],
        [dict(zip(_LAYOUT, (repair_blocks, repair_block, *told[0], r, *told[1]), strict=True)) for r in (0, 1)],
        ranges,
        pieces > 1,
        len(ranges) * outer * blocks,
        outer * repair_blocks,
    )


def _blocks(inner: int, others: int, cores: int) -> tuple[int, int]:
    """Return the channels of a block and the number of blocks, so that blocks × `others` units occupy all cores."""
    block = -(-inner * min(cores, others) // cores)
    block = max(1, min(-(-block // NARROW) * NARROW, WIDEST, inner))
    return block, -(-inner // block)


def _operands(x: torch.Tensor, a: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, _Layout]:
    bounds = None if cu_seqlens is None else offsets(cu_seqlens, x.shape[1], "linear_scan")
    layout = _layout(tuple(x.shape), tuple(a.shape), bounds)
    return (a if a.shape == layout.a_shape else a.expand(layout.a_shape)).contiguous(), layout


def forward(x, a, state, reverse, cu_seqlens):
    x, y = x.contiguous(), empty(x.shape, x.dtype)
    a, layout = _operands(x, a, cu_seqlens)
    carry = state.clone(memory_format=torch.contiguous_format)
    if layout.cut:
        carry = _of_pieces(carry, len(layout.ranges), last=reverse)
    tensors = {"x": x, "a": a, "y": y, "carry": carry}
    _forward.run(x.dtype, FORWARD.pack(**layout.slots[reverse], **tensors), layout.units, x.numel())
    if layout.cut:
        repair = FORWARD.pack(**layout.repair_slots[reverse], **tensors)
        _forward_repair.run(x.dtype, repair, layout.repair_units, x.numel())
        carry = carry[:1].clone() if reverse else carry[-1:].clone()
    return y, carry


def backward(dy, dlast, a, y, state, reverse, cu_seqlens):
    dy, y, state = dy.contiguous(), y.contiguous(), state.contiguous()
    shape = a.shape
    a, layout = _operands(y, a, cu_seqlens)
    dx, da = empty(dy.shape, dy.dtype), empty(layout.da_shape, dy.dtype)
    carry = dlast.clone(memory_format=torch.contiguous_format)
    if layout.cut:
        carry = _of_pieces(carry, len(layout.ranges), last=not reverse)
        state = _before_pieces(y, state, layout.ranges, reverse)
    tensors = {"dy": dy, "a": a, "y": y, "carry": carry, "state": state, "dx": dx, "da": da}
    _backward.run(dy.dtype, BACKWARD.pack(**layout.slots[reverse], **tensors), layout.units, dy.numel())
    if layout.cut:
        repair = BACKWARD.pack(**layout.repair_slots[reverse], **tensors)
        _backward_repair.run(dy.dtype, repair, layout.repair_units, dy.numel())
        carry = carry[-1:].clone() if reverse else carry[:1].clone()
    if layout.shared:
        da = da.sum(-1)
    da = da.view(layout.da_view)
    return [dx, da.sum_to_size((1,) * (da.ndim - len(shape)) + shape).view(shape), carry]


def _of_pieces(carry: torch.Tensor, pieces: int, *, last: bool) -> torch.Tensor:
    """Give the carry of a sequence to its first (or last) piece; the other pieces start from zero."""
    zeros = carry.new_zeros(pieces - 1, *carry.shape[1:])
    return torch.cat([zeros, carry] if last else [carry, zeros])


def _before_pieces(y: torch.Tensor, state: torch.Tensor, ranges: np.ndarray, reverse: bool) -> torch.Tensor:
    """Return the state before the first step of each piece."""
    if reverse:
        return torch.cat([y[0, ranges[:-1, 1]], state])
    return torch.cat([state, y[0, ranges[1:, 0] - 1]])
