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
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill, move
from scanl.ops._cpu._slots import constant_of, itemsize, units
from scanl.ops._cpu._team import CORES, array
from scanl.ops._frame.context import exactly
from scanl.ops.offsets import offsets

_LAYOUT = ("blocks", "block", "outer", "inner", "sequences", "reverse", "a_time", "a_outer", "a_inner", "ranges")
_FORWARD, _BACKWARD = " ".join(_LAYOUT) + " x a y carry", " ".join(_LAYOUT) + " dy a y carry state dx da"

MAX_WIDTH = 4096  # most channels of a block, so that its carry and rows fit the first-level cache
MIN_BLOCK_CHANNELS = 32  # least channels of a block: in narrower blocks, several cores would write to one cache line
MIN_CUT_STEPS = 4096  # least steps of a sequence that is cut in time
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
def _backward_row(dy, a, after, previous, dx, da):
    """Take one step backwards, with one da per channel."""
    for i in range(dx.size):
        d = dy[i] + np.conj(a[i]) * after[i]
        dx[i] = d
        da[i] = d * np.conj(previous[i])


@helper(forceinline=True)
def _backward_row_summed(dy, a, after, previous, dx, total):
    """Like `_backward_row`, but add da to a sum over time."""
    for i in range(dx.size):
        d = dy[i] + np.conj(a[i]) * after[i]
        dx[i] = d
        total[i] += d * np.conj(previous[i])


@helper(forceinline=True)
def _backward_row_shared(dy, a, after, previous, dx):
    """Like `_backward_row`, for one a for all channels; return its da."""
    decay = np.conj(a[0])
    total = dy[0] * 0
    for i in range(dx.size):
        d = dy[i] + decay * after[i]
        dx[i] = d
        total += d * np.conj(previous[i])
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
def _backward_repair_row(p, a, previous, dx, da, tiny):
    alive = False
    for i in range(p.size):
        dx[i] += p[i]
        da[i if a.size == p.size else 0] += p[i] * np.conj(previous[i])
        p[i] *= np.conj(a[i] if a.size == p.size else a[0])
        alive |= not abs(p[i].real) + abs(p[i].imag) < tiny
    return alive


_tiny = constant_of(lambda dtype: dtype.type(np.finfo(dtype).tiny).real)  # the smallest normal number


class _Channels(NamedTuple):
    """The channels of a unit: the first within its group and within a row, their number, and that of their decays."""

    inner: int
    first: int
    size: int
    a_size: int


@helper(forceinline=True)
def _channels(slots, group, block):
    inner = block * slots.block
    size = min(slots.block, slots.inner - inner)
    return _Channels(inner, group * slots.inner + inner, size, size if slots.a_inner else 1)


@kernel(_FORWARD)
def _forward(slots):
    dtype, reverse, x, a, y = slots.dtype, slots.reverse, slots.x, slots.a, slots.y
    a_time, a_outer, a_inner, item = slots.a_time, slots.a_outer, slots.a_inner, itemsize(dtype)
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    width = slots.outer * slots.inner
    for unit in units(slots):
        n, o = unit // (slots.outer * slots.blocks), unit // slots.blocks % slots.outer
        first, channel, size, a_size = _channels(slots, o, unit % slots.blocks)
        begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
        start = slots.carry + item * (n * width + channel)
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


@kernel(_BACKWARD)
def _backward(slots):
    dtype = slots.dtype
    item = itemsize(dtype)
    blocks, block, outer = slots.blocks, slots.block, slots.outer
    a_time, a_inner = slots.a_time, slots.a_inner
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    width = outer * slots.inner
    da_width = width if a_inner else outer * blocks
    recent, total, ones = np.zeros(block, dtype), np.zeros(block, dtype), np.ones(block, dtype)
    for unit in units(slots):
        n, o = unit // (outer * blocks), unit // blocks % outer
        first, channel, size, a_size = _channels(slots, o, unit % blocks)
        begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
        da_channel = channel if a_inner else o * blocks + unit % blocks
        c = array(slots.carry + item * (n * width + channel), size, dtype)
        start = slots.state + item * (n * width + channel)
        decays, after = ones[:a_size], c
        fill(recent, 0, recent.size, 0)
        fill(total, 0, total.size, 0)
        for i in range(steps):
            t = i if slots.reverse else steps - 1 - i
            k = item * ((begin + t) * width + channel)
            j = item * (a_begin + t * a_time + o * slots.a_outer + first * a_inner)
            previous = slots.y + k + (item * width if slots.reverse else -item * width)
            dys, dxs = array(slots.dy + k, size, dtype), array(slots.dx + k, size, dtype)
            hs = array(start if i == steps - 1 else previous, size, dtype)
            at = ((begin + t if a_time else n) * da_width + da_channel) * item
            if a_inner == 0:
                d = _backward_row_shared(dys, decays, after, hs, dxs)
                if a_time:
                    array(slots.da + at, 1, dtype)[0] = d
                else:
                    recent[0] += d
            elif a_time:
                _backward_row(dys, decays, after, hs, dxs, array(slots.da + at, size, dtype))
            else:
                _backward_row_summed(dys, decays, after, hs, dxs, recent)
            decays, after = array(slots.a + j, a_size, dtype), dxs
            if a_time == 0 and i % FLUSH == FLUSH - 1:
                for m in range(a_size):
                    total[m] += recent[m]
                    recent[m] = 0
        if steps:
            for m in range(size):
                c[m] = np.conj(decays[m if a_inner else 0]) * after[m]
        if a_time == 0:
            sums = array(slots.da + (n * da_width + da_channel) * item, a_size, dtype)
            for m in range(a_size):
                sums[m] = total[m] + recent[m]


@kernel(_FORWARD)
def _forward_repair(slots):
    """In the order of the scan, add to each range the contribution of the carry from the range before it."""
    dtype = slots.dtype
    item = itemsize(dtype)
    sequences = slots.sequences
    ranges = array(slots.ranges, 3 * sequences, np.int64)
    width = slots.outer * slots.inner
    row = np.empty(slots.block, dtype)
    for unit in units(slots):
        o = unit // slots.blocks
        first, channel, size, a_size = _channels(slots, o, unit % slots.blocks)
        p = row[:size]
        for s in range(1, sequences):
            n, source = (sequences - 1 - s, sequences - s) if slots.reverse else (s, s - 1)
            begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
            move(array(slots.carry + item * (source * width + channel), size, dtype), 0, size, p, 0)
            for i in range(steps):
                t = steps - 1 - i if slots.reverse else i
                k = item * ((begin + t) * width + channel)
                j = item * (a_begin + t * slots.a_time + o * slots.a_outer + first * slots.a_inner)
                if not _forward_repair_row(
                    p, array(slots.a + j, a_size, dtype), array(slots.y + k, size, dtype), _tiny(dtype)
                ):
                    break
            h = array(slots.carry + item * (n * width + channel), size, dtype)
            for m in range(size):
                h[m] += p[m]


@kernel(_BACKWARD)
def _backward_repair(slots):
    dtype = slots.dtype
    item = itemsize(dtype)
    sequences = slots.sequences
    ranges = array(slots.ranges, 3 * sequences, np.int64)
    width = slots.outer * slots.inner
    da_width = width if slots.a_inner else slots.outer * slots.blocks
    row = np.empty(slots.block, dtype)
    for unit in units(slots):
        o = unit // slots.blocks
        first, channel, size, a_size = _channels(slots, o, unit % slots.blocks)
        da_channel = channel if slots.a_inner else unit
        p = row[:size]
        for s in range(1, sequences):
            n, source = (s, s - 1) if slots.reverse else (sequences - 1 - s, sequences - s)
            begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
            move(array(slots.carry + item * (source * width + channel), size, dtype), 0, size, p, 0)
            for i in range(steps):
                t = i if slots.reverse else steps - 1 - i
                k = item * ((begin + t) * width + channel)
                j = item * (a_begin + t * slots.a_time + o * slots.a_outer + first * slots.a_inner)
                previous = slots.y + k + (item * width if slots.reverse else -item * width)
                if i == steps - 1:
                    previous = slots.state + item * (n * width + channel)
                at = ((begin + t if slots.a_time else n) * da_width + da_channel) * item
                if not _backward_repair_row(
                    p,
                    array(slots.a + j, a_size, dtype),
                    array(previous, size, dtype),
                    array(slots.dx + k, size, dtype),
                    array(slots.da + at, a_size, dtype),
                    _tiny(dtype),
                ):
                    break
            c = array(slots.carry + item * (n * width + channel), size, dtype)
            for m in range(size):
                c[m] += p[m]


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
def _layout(x_shape: tuple[int, ...], a_shape: tuple[int, ...], bounds: tuple[int, ...] | None, cut: bool) -> _Layout:
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
        if cut and batch == 1 and steps >= MIN_CUT_STEPS and outer * inner < SPLIT:
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
    sizes = (outer, inner, len(ranges)), (a_time, a_outer, int(not shared), ranges.ctypes.data)
    # Pieces are repaired in sequence, so cores divide the channels. With one a for all channels, the blocks stay the
    # same, since each block has a partial sum of da.
    repair_block, repair_blocks = (block, blocks) if shared else _blocks(inner, outer, CORES)
    return _Layout(
        (*a_shape[:2], *a_features),
        da_shape,
        da_view,
        shared,
        [dict(zip(_LAYOUT, (blocks, block, *sizes[0], r, *sizes[1]), strict=True)) for r in (0, 1)],
        [dict(zip(_LAYOUT, (repair_blocks, repair_block, *sizes[0], r, *sizes[1]), strict=True)) for r in (0, 1)],
        ranges,
        pieces > 1,
        len(ranges) * outer * blocks,
        outer * repair_blocks,
    )


def _blocks(inner: int, others: int, cores: int) -> tuple[int, int]:
    """Return the channels of a block and the number of blocks, so that blocks × `others` units occupy all cores."""
    block = -(-inner * min(cores, others) // cores)
    block = max(1, min(-(-block // MIN_BLOCK_CHANNELS) * MIN_BLOCK_CHANNELS, MAX_WIDTH, inner))
    return block, -(-inner // block)


def _operands(x: torch.Tensor, a: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, _Layout]:
    bounds = None if cu_seqlens is None else offsets(cu_seqlens, x.shape[1], "linear_scan")
    layout = _layout(tuple(x.shape), tuple(a.shape), bounds, not exactly())
    return (a if a.shape == layout.a_shape else a.expand(layout.a_shape)).contiguous(), layout


def forward(x, a, state, reverse, cu_seqlens):
    x, y = x.contiguous(), empty(x.shape, x.dtype)
    a, layout = _operands(x, a, cu_seqlens)
    carry = state.clone(memory_format=torch.contiguous_format)
    if layout.cut:
        carry = _of_pieces(carry, len(layout.ranges), last=reverse)
    tensors = {"x": x, "a": a, "y": y, "carry": carry}
    _forward.run(x.dtype, _forward.pack(**layout.slots[reverse], **tensors), layout.units, x.numel())
    if layout.cut:
        repair = _forward_repair.pack(**layout.repair_slots[reverse], **tensors)
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
    _backward.run(dy.dtype, _backward.pack(**layout.slots[reverse], **tensors), layout.units, dy.numel())
    if layout.cut:
        repair = _backward_repair.pack(**layout.repair_slots[reverse], **tensors)
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
