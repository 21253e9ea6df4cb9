"""The linear scan as fused loops: one pass over memory forwards, one backwards.

Features are `outer` groups of `inner` channels. In a group, `a` is one per channel or one for all channels, so a
broadcast `a` is never copied. The carry is the row that was just written. A separate carry would double the stores in
the store buffer, and with that the time of a large scan. In half precision the carry is a row of float32 of its own,
since the row that was written is rounded. Only what is one number for each step and channel has half precision; sums
over steps or channels are float32. A sequence is a range of rows of the flattened (B T); packed sequences are several
ranges. A long narrow scan is cut in time into several ranges; `_repair` then adds the contribution of the carry from
one range to the next. The backward pass is the scan in reverse time: each step computes
dx = dy + conj(a after) (dx after), da = dx conj(h before).
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._half import HALF_TYPES, keep, put, unrounded, widened
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import at, pointer, prefetch, separate
from scanl.ops._cpu._rows import fill, move
from scanl.ops._cpu._slots import constant_of, itemsize, units
from scanl.ops._cpu._team import CORES
from scanl.ops._frame.context import exactly
from scanl.ops.offsets import offsets

_LAYOUT = ("blocks", "block", "outer", "inner", "sequences", "reverse", "a_time", "a_outer", "a_inner", "ranges")
_FORWARD, _BACKWARD = " ".join(_LAYOUT) + " x a y carry", " ".join(_LAYOUT) + " dy a y carry state dx da"

MAX_WIDTH = 4096  # most channels of a block, so that its carry and rows fit the first-level cache
MIN_BLOCK_CHANNELS = 32  # least channels of a block: in narrower blocks, several cores would write to one cache line
MIN_CUT_STEPS = 4096  # least steps of a sequence that is cut in time
SPLIT = 1024  # from this many channels on, cutting channels is as fast as cutting time and needs no repair
PIECES = 4  # pieces of time, or blocks of channels with one da; a constant, since rounding depends on it
STRIP = 64  # channels that the compiler makes vectors of
LINE = 64  # bytes of a line of the cache
PREFETCH_ROWS = 2  # how many rows ahead the lines are that a block of a row asks for
FLUSH = 256  # steps of a partial sum; adding partial sums keeps long sums exact


@helper(forceinline=True)
def _fetch(row, first, dtype):
    """Ask for the strip of a row from its element `first` on."""
    lanes = LINE // itemsize(dtype)
    for channel in range(first, first + STRIP, lanes):
        prefetch(at(row, channel))


@helper(forceinline=True)
def _forward_strip(x, a, h, y, own, first, count):
    if own:
        for i in range(first, first + count):
            value = widened(x[i]) + widened(a[i]) * h[i]
            put(y, i, value)
            keep(h, i, value, y)
    else:
        decay = widened(a[0])
        for i in range(first, first + count):
            value = widened(x[i]) + decay * h[i]
            put(y, i, value)
            keep(h, i, value, y)


@helper()
def _forward_row(x, a, h, y, own, timed, size, later, down, dtype):
    """Take one step. own, timed, later, down: as in `_backward_row`."""
    separate()
    strips = size // STRIP
    for s in range(strips):
        first = (strips - 1 - s if down else s) * STRIP
        if later:
            _fetch(x, first + later, dtype)
            _fetch(y, first + later, dtype)
        if later and own and timed:
            _fetch(a, first + later, dtype)
        _forward_strip(x, a, h, y, own, first, STRIP)
    _forward_strip(x, a, h, y, own, strips * STRIP, size - strips * STRIP)


@helper(forceinline=True)
def _backward_strip(dy, a, after, previous, dx, da, sums, own, timed, first, count):
    if not own:
        decay = np.conj(widened(a[0]))
        total = decay * 0
        for i in range(first, first + count):
            d = widened(dy[i]) + decay * after[i]
            put(dx, i, d)
            total += d * np.conj(widened(previous[i]))
            keep(after, i, d, dx)
        sums[0] += total
    elif timed:
        for i in range(first, first + count):
            d = widened(dy[i]) + np.conj(widened(a[i])) * after[i]
            put(dx, i, d)
            put(da, i, d * np.conj(widened(previous[i])))
            keep(after, i, d, dx)
    else:
        for i in range(first, first + count):
            d = widened(dy[i]) + np.conj(widened(a[i])) * after[i]
            put(dx, i, d)
            sums[i] += d * np.conj(widened(previous[i]))
            keep(after, i, d, dx)


@helper()
def _backward_row(dy, a, after, previous, dx, da, sums, own, timed, size, later, down, dtype):
    """Take one step backwards.

    own: whether each channel has its a.   timed: whether each step has. If both, da is written, else added to `sums`.
    later: elements to a row that is read later, of which lines are asked for.   down: whether rows are read from the
    last to the first; then channels are too, because memory comes fastest in its own order.
    """
    separate()
    strips = size // STRIP
    for s in range(strips):
        first = (strips - 1 - s if down else s) * STRIP
        if later:
            _fetch(dy, first + later, dtype)
            _fetch(previous, first + later, dtype)
            _fetch(dx, first + later, dtype)
        if later and own and timed:
            _fetch(a, first + later, dtype)
            _fetch(da, first + later, dtype)
        _backward_strip(dy, a, after, previous, dx, da, sums, own, timed, first, STRIP)
    rest = strips * STRIP
    _backward_strip(dy, a, after, previous, dx, da, sums, own, timed, rest, size - rest)


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
    dtype, wide, reverse, a_time = slots.dtype, slots.sum_dtype, slots.reverse, slots.a_time
    x, a, y = pointer(slots.x, dtype), pointer(slots.a, dtype), pointer(slots.y, dtype)
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    width = slots.outer * slots.inner
    later = PREFETCH_ROWS * (-width if reverse else width) if slots.blocks > 1 else 0
    for unit in units(slots):
        n, o = unit // (slots.outer * slots.blocks), unit // slots.blocks % slots.outer
        first, channel, size, a_size = _channels(slots, o, unit % slots.blocks)
        begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
        a_begin += o * slots.a_outer + first * slots.a_inner
        start = at(pointer(slots.carry, wide), n * width + channel)
        h = start
        for i in range(steps):
            t = steps - 1 - i if reverse else i
            k, j = (begin + t) * width + channel, a_begin + t * a_time
            _forward_row(at(x, k), at(a, j), h, at(y, k), a_size == size, a_time, size, later, reverse, dtype)
            h = unrounded(at(y, k), h)
        if steps:
            for m in range(size):
                start[m] = h[m]


@kernel(_BACKWARD)
def _backward(slots):
    dtype, wide = slots.dtype, slots.sum_dtype
    reverse, a_time, a_inner = slots.reverse, slots.a_time, slots.a_inner
    blocks, outer = slots.blocks, slots.outer
    dy, a, y, dx = (
        pointer(slots.dy, dtype), pointer(slots.a, dtype), pointer(slots.y, dtype), pointer(slots.dx, dtype)
    )  # fmt: skip
    da, da_sums = pointer(slots.da, dtype), pointer(slots.da, wide)
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    width = outer * slots.inner
    da_width = width if a_inner else outer * blocks
    row = width if reverse else -width
    later = PREFETCH_ROWS * row if blocks > 1 else 0
    recent, total, ones = np.zeros(slots.block, wide), np.zeros(slots.block, wide), np.empty(slots.block, dtype)
    sums = pointer(recent.ctypes.data, wide)
    for m in range(slots.block):
        put(ones, m, total[m] + 1)
    for unit in units(slots):
        n, o = unit // (outer * blocks), unit // blocks % outer
        first, channel, size, a_size = _channels(slots, o, unit % blocks)
        begin, steps, a_begin = ranges[3 * n], ranges[3 * n + 1] - ranges[3 * n], ranges[3 * n + 2]
        a_begin += o * slots.a_outer + first * a_inner
        da_channel = channel if a_inner else o * blocks + unit % blocks
        carry, state = pointer(slots.carry, wide), pointer(slots.state, wide)
        carry, state = at(carry, n * width + channel), at(state, n * width + channel)
        decays, after = pointer(ones.ctypes.data, dtype), carry
        fill(recent, 0, recent.size, 0)
        fill(total, 0, total.size, 0)
        for i in range(steps):
            t = i if reverse else steps - 1 - i
            k, to = (begin + t) * width + channel, (begin + t) * da_width + da_channel
            if i < steps - 1:
                _backward_row(
                    at(dy, k), decays, after, at(y, k + row), at(dx, k), at(da, to), sums,
                    a_inner, a_time, size, later, not reverse, dtype,
                )  # fmt: skip
            else:
                _backward_row(
                    at(dy, k), decays, after, state, at(dx, k), at(da, to), sums,
                    a_inner, a_time, size, later, not reverse, dtype,
                )  # fmt: skip
            decays, after = at(a, a_begin + t * a_time), unrounded(at(dx, k), after)
            if a_time and not a_inner:
                da_sums[to], recent[0] = recent[0], 0
            elif a_time == 0 and i % FLUSH == FLUSH - 1:
                for m in range(a_size):
                    total[m] += recent[m]
                    recent[m] = 0
        if steps:
            for m in range(size):
                carry[m] = np.conj(widened(decays[m if a_inner else 0])) * after[m]
        if a_time == 0:
            for m in range(a_size):
                da_sums[n * da_width + da_channel + m] = total[m] + recent[m]


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
    sums: bool  # da from the kernel are sums over time or channels
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
        shared or not a_time,
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
    # A repair would round what is in half precision once more.
    layout = _layout(tuple(x.shape), tuple(a.shape), bounds, not exactly() and x.dtype not in HALF_TYPES)
    a = a.to(x.dtype)  # a second derivative scans a in half precision beside an x in float32
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
    dx = empty(dy.shape, dy.dtype)
    da = empty(layout.da_shape, state.dtype if layout.sums else dy.dtype)
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
    return [dx, da.sum_to_size((1,) * (da.ndim - len(shape)) + shape).view(shape).to(dy.dtype), carry]


def _of_pieces(carry: torch.Tensor, pieces: int, *, last: bool) -> torch.Tensor:
    """Give the carry of a sequence to its first (or last) piece; the other pieces start from zero."""
    zeros = carry.new_zeros(pieces - 1, *carry.shape[1:])
    return torch.cat([zeros, carry] if last else [carry, zeros])


def _before_pieces(y: torch.Tensor, state: torch.Tensor, ranges: np.ndarray, reverse: bool) -> torch.Tensor:
    """Return the state before the first step of each piece."""
    if reverse:
        return torch.cat([y[0, ranges[:-1, 1]], state])
    return torch.cat([state, y[0, ranges[1:, 0] - 1]])
