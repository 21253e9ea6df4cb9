"""The short convolution as fused loops over rows of channels: one pass over memory forwards, one backwards.

A unit of work is a piece of time of one sequence and a block of channels. Rows before the sequence are read from the
state. Four taps at a time are summed into the row of y, which stays in the first-level cache; then SiLU is applied.

The backward pass recomputes s, the value before SiLU, and writes ds = dy SiLU'(s) into the memory of dx: dx_t needs
ds_t to ds_{t+W-1}, and overwrites ds_t once all of them are computed. The W-1 rows of ds after the piece belong to
another unit, so they are computed in scratch memory. Each piece writes its own sums over time, for dw and dbias.
"""

import functools
import itertools

import numpy as np

from scanl.ops._cpu._cells import rows
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import outlined
from scanl.ops._cpu._rows import fill, move
from scanl.ops._cpu._sigmoid import sigmoid
from scanl.ops._cpu._slots import itemsize, units
from scanl.ops._cpu._team import CORES
from scanl.ops.offsets import offsets

_HEAD = "pieces piece_count width count size window sign silu w w_tap w_channel bias"
_STATE = " state state_sequence state_step state_channel"

MAX_WIDTH = 512  # most channels of a block, so that four rows and their sums fit the first-level cache
STEPS = 256  # least steps of a piece; also at least PER_TAP steps per tap
PER_TAP = 4

_FLAGS = {"forceinline": True, "error_model": "numpy"}


@helper(**_FLAGS)
def _tap(y, x, w):
    for i in range(y.size):
        y[i] += w[i] * x[i]


@helper(**_FLAGS)
def _taps(y, x0, x1, x2, x3, w0, w1, w2, w3):
    for i in range(y.size):
        y[i] += (w0[i] * x0[i] + w1[i] * x1[i]) + (w2[i] * x2[i] + w3[i] * x3[i])


@helper(**_FLAGS)
def _silu(y):
    for i in range(y.size):
        y[i] = y[i] * sigmoid(y[i])


@helper(**_FLAGS)
def _silu_backward(s, dy):
    """Overwrite s with ds."""
    one = s.dtype.type(1)
    for i in range(s.size):
        gate = sigmoid(s[i])
        s[i] = dy[i] * gate * (one + s[i] * (one - gate))


@helper(**_FLAGS)
def _add(target, source):
    for i in range(target.size):
        target[i] += source[i]


@helper(**_FLAGS)
def _products(sums, d, x0, x1, x2, x3):
    """Add to the gradients of four weights; their sums are MAX_WIDTH apart."""
    for i in range(d.size):
        sums[i] += d[i] * x0[i]
        sums[MAX_WIDTH + i] += d[i] * x1[i]
        sums[2 * MAX_WIDTH + i] += d[i] * x2[i]
        sums[3 * MAX_WIDTH + i] += d[i] * x3[i]


@helper(forceinline=True)
def _row(i, start, step, other, other_step):
    """Return the address of row i. Rows with i < 0 are at other + i * other_step."""
    return start + i * step if i >= 0 else other + i * other_step


@helper(forceinline=True)
def _convolve(out, i, taps, start, step, other, other_step, w, w_step):
    """Add w_j times row i - j to `out`, for j < taps."""
    size, kind, j = out.size, out.dtype, 0
    while j + 4 <= taps:
        _taps(
            out,
            array(_row(i - j, start, step, other, other_step), size, kind),
            array(_row(i - j - 1, start, step, other, other_step), size, kind),
            array(_row(i - j - 2, start, step, other, other_step), size, kind),
            array(_row(i - j - 3, start, step, other, other_step), size, kind),
            array(w + j * w_step, size, kind),
            array(w + (j + 1) * w_step, size, kind),
            array(w + (j + 2) * w_step, size, kind),
            array(w + (j + 3) * w_step, size, kind),
        )
        j += 4
    while j < taps:
        x = array(_row(i - j, start, step, other, other_step), size, kind)
        _tap(out, x, array(w + j * w_step, size, kind))
        j += 1


@helper(forceinline=True)
def _correlate(sums, d, i, taps, start, step, other, other_step):
    """Add step i to the weight gradients: d times row i - j, into row j of the sums."""
    size, kind, j = d.size, d.dtype, 0
    while j + 4 <= taps:
        _products(
            sums[j * MAX_WIDTH : (j + 4) * MAX_WIDTH],
            d,
            array(_row(i - j, start, step, other, other_step), size, kind),
            array(_row(i - j - 1, start, step, other, other_step), size, kind),
            array(_row(i - j - 2, start, step, other, other_step), size, kind),
            array(_row(i - j - 3, start, step, other, other_step), size, kind),
        )
        j += 4
    while j < taps:
        x = array(_row(i - j, start, step, other, other_step), size, kind)
        _tap(sums[j * MAX_WIDTH : j * MAX_WIDTH + size], x, d)
        j += 1


@helper()
def _gather(target, source, count, size, step, stride):
    """Copy rows of channels, with row stride `step` and channel stride `stride`, to rows MAX_WIDTH apart.

    For a short sequence whose channels are not contiguous, a copy by torch would cost more than all other work.
    """
    outlined()
    item = target.itemsize
    for r in range(count):
        row = target[r * MAX_WIDTH : r * MAX_WIDTH + size]
        if stride == item:
            move(array(source + r * step, size, target.dtype), 0, size, row, 0)
        else:
            column = array(source + r * step, (size - 1) * (stride // item) + 1, target.dtype)
            for i in range(size):
                row[i] = column[i * (stride // item)]


@helper(forceinline=True)
def _begin(out, source):
    """Copy the row at an address; write zeros if the address is 0."""
    if source != 0:
        move(array(source, out.size, out.dtype), 0, out.size, out, 0)
    else:
        fill(out, 0, out.size, 0)


@kernel(_HEAD + _STATE + " y y_batch last", rows="x")
def _forward(slots):
    dtype = slots.dtype
    item = itemsize(dtype)
    pieces = array(slots.pieces, 6 * slots.piece_count, np.int64)
    width = slots.width
    w_tap, w_channel = item * slots.w_tap, item * slots.w_channel
    state_step, state_channel = item * slots.state_step, item * slots.state_channel
    row, history, apart = item * width, slots.window - 1, item * MAX_WIDTH
    weights, past = np.empty(slots.window * MAX_WIDTH, dtype), np.empty(history * MAX_WIDTH, dtype)
    newest, old = weights.ctypes.data + history * apart, past.ctypes.data + history * apart
    for unit in units(slots):
        piece, channel = 6 * (unit // slots.count), unit % slots.count * slots.size
        n, b, first, steps = pieces[piece], pieces[piece + 1], pieces[piece + 2], pieces[piece + 3]
        channels, step = min(slots.size, width - channel), slots.sign * item * slots.x.time
        xs = slots.x.at + item * (b * slots.x.batch + first * slots.x.time + channel)
        ys = slots.y + item * (b * slots.y_batch + first * width + channel)
        _gather(weights, slots.w + channel * w_channel, slots.window, channels, w_tap, w_channel)
        if pieces[piece + 4] < history or steps < history:
            at = slots.state + item * n * slots.state_sequence + channel * state_channel
            _gather(past, at, history, channels, state_step, state_channel)
        for i in range(pieces[piece + 4], pieces[piece + 5]):
            out = array(ys + i * slots.sign * row, channels, dtype)
            _begin(out, slots.bias + item * channel if slots.bias else 0)
            _convolve(out, i, slots.window, xs, step, old, apart, newest, -apart)
            if slots.silu:
                _silu(out)
        if pieces[piece + 5] == steps:
            for r in range(history):
                source = array(_row(steps - history + r, xs, step, old, apart), channels, dtype)
                move(
                    source,
                    0,
                    channels,
                    array(slots.last + item * ((n * history + r) * width + channel), channels, dtype),
                    0,
                )


@kernel(_HEAD + _STATE + " dlast dx dx_batch dw dbias dstate", rows="x dy")
def _backward(slots):
    dtype = slots.dtype
    item = itemsize(dtype)
    pieces = array(slots.pieces, 6 * slots.piece_count, np.int64)
    width, count, size, window = slots.width, slots.count, slots.size, slots.window
    w_tap, w_channel = item * slots.w_tap, item * slots.w_channel
    state_step, state_channel = item * slots.state_step, item * slots.state_channel
    row, history, apart = item * width, window - 1, item * MAX_WIDTH
    weights, past = np.empty(window * MAX_WIDTH, dtype), np.empty(history * MAX_WIDTH, dtype)
    newest, old = weights.ctypes.data + history * apart, past.ctypes.data + history * apart
    sums, spare = np.empty(window * MAX_WIDTH, dtype), np.empty(MAX_WIDTH, dtype)
    ahead = np.empty(window * size, dtype)
    for unit in units(slots):
        piece, channel = 6 * (unit // count), unit % count * size
        n, b, first, steps = pieces[piece], pieces[piece + 1], pieces[piece + 2], pieces[piece + 3]
        begin, end = pieces[piece + 4], pieces[piece + 5]
        channels, step = min(size, width - channel), slots.sign * item * slots.x.time
        xs = slots.x.at + item * (b * slots.x.batch + first * slots.x.time + channel)
        _gather(weights, slots.w + channel * w_channel, window, channels, w_tap, w_channel)
        if begin < history or steps < history:
            at = slots.state + item * n * slots.state_sequence + channel * state_channel
            _gather(past, at, history, channels, state_step, state_channel)
        corner = item * (n * history * width + channel)
        dold, dnew = slots.dstate + corner, slots.dlast + corner
        dys = slots.dy.at + item * (b * slots.dy.batch + first * slots.dy.time + channel)
        dy_step = slots.sign * item * slots.dy.time
        dxs, dx_step = slots.dx + item * (b * slots.dx_batch + first * width + channel), slots.sign * row
        # addresses of the rows of ds, and of its rows from `end` on
        ds, ds_step, over, over_step = dys, dy_step, dys + end * dy_step, dy_step
        if slots.silu:
            ds, ds_step, over, over_step = dxs, dx_step, ahead.ctypes.data, item * size
        bias_sums = array(slots.dbias + item * (unit // count * width + channel), channels, dtype)
        fill(bias_sums, 0, bias_sums.size, 0)
        fill(sums, 0, sums.size, 0)
        if begin == 0:
            for r in range(history):
                _begin(array(dold + r * row, channels, dtype), dnew + (r - steps) * row if r >= steps else 0)
        for i in range(begin, end + history):
            if i < steps:
                d = array(ds + i * ds_step if i < end else over + (i - end) * over_step, channels, dtype)
                if slots.silu:
                    _begin(d, slots.bias + item * channel if slots.bias else 0)
                    _convolve(d, i, window, xs, step, old, apart, newest, -apart)
                    _silu_backward(d, array(dys + i * dy_step, channels, dtype))
                if i < end:
                    _correlate(sums, d, i, window, xs, step, old, apart)
                    _add(bias_sums, d)
                if begin == 0:
                    for r in range(i, history):
                        tap = array(newest - (history - r + i) * apart, channels, dtype)
                        _tap(array(dold + r * row, channels, dtype), d, tap)
            done = i - history
            if done >= begin:
                out, border = spare[:channels], steps - history
                _begin(out, dnew + (done - border) * row if done >= border else 0)
                # rows done + j, counted backwards from the piece's last row
                _convolve(
                    out, end - 1 - done, min(window, steps - done), ds + (end - 1) * ds_step, -ds_step,
                    over - over_step, -over_step, newest, -apart,
                )  # fmt: skip
                move(out, 0, channels, array(dxs + done * dx_step, channels, dtype), 0)
        for j in range(window):
            out = array(slots.dw + item * ((unit // count * window + history - j) * width + channel), channels, dtype)
            move(sums, j * MAX_WIDTH, channels, out, 0)


@functools.lru_cache(512)
def _pieces(batch: int, steps: int, bounds: tuple[int, ...] | None, window: int, reverse: bool) -> np.ndarray:
    """Return, for each piece: sequence, batch row, time index of the scan's first step, steps of the sequence, and the
    piece's first step and end step, counted in the order of the scan."""
    ranges = [(b, 0, steps) for b in range(batch)]
    if bounds is not None:
        ranges = [(0, *pair) for pair in itertools.pairwise(bounds)]
    pieces = []
    for n, (b, begin, end) in enumerate(ranges):
        size = max(PER_TAP * window, min(STEPS, -(-(end - begin) // CORES)))
        first = end - 1 if reverse else begin
        for start in range(0, max(1, end - begin), size):
            pieces.append((n, b, first, end - begin, start, min(start + size, end - begin)))
    return np.array(pieces, np.int64).reshape(-1, 6)


def _inputs(x, w, bias, state, reverse, cu_seqlens, silu):
    """Return the arguments of both kernels, by slot, and the numbers of pieces and of units."""
    batch, steps, width = x.shape
    bounds = None if cu_seqlens is None else offsets(cu_seqlens, steps, "short_convolution")
    pieces = _pieces(batch, steps, bounds, w.shape[1], reverse)
    size = min(width, MAX_WIDTH)
    count = -(-width // size) if size else 0
    head = {
        "pieces": pieces,
        "piece_count": len(pieces),
        "width": width,
        "count": count,
        "size": size,
        "window": w.shape[1],
    }
    head |= {"sign": -1 if reverse else 1, "silu": silu, "x": rows(x)}
    head |= {
        "w": w,
        "w_tap": w.stride(1),
        "w_channel": w.stride(0),
        "bias": None if bias is None else bias.contiguous(),
    }
    strides = zip(("state_sequence", "state_step", "state_channel"), state.stride(), strict=True)
    return {**head, "state": state, **dict(strides)}, len(pieces), count * len(pieces)


def forward(x, w, bias, state, reverse, cu_seqlens, silu):
    head, _, units = _inputs(x, w, bias, state, reverse, cu_seqlens, silu)
    y, last = empty(x.shape, x.dtype), x.new_empty(state.shape)
    _forward.run(x.dtype, _forward.pack(**head, y=y, y_batch=y.stride(0), last=last), units, x.numel())
    return y, last


def backward(dy, dlast, x, w, bias, state, reverse, cu_seqlens, silu):
    head, pieces, units = _inputs(x, w, bias, state, reverse, cu_seqlens, silu)
    dy, dlast, dx = rows(dy), dlast.contiguous(), empty(x.shape, x.dtype)
    dw, dbias = x.new_empty(pieces, w.shape[1], w.shape[0]), x.new_empty(pieces, w.shape[0])
    dstate = x.new_empty(state.shape)
    slots = _backward.pack(**head, dy=dy, dlast=dlast, dx=dx, dx_batch=dx.stride(0), dw=dw, dbias=dbias, dstate=dstate)
    _backward.run(x.dtype, slots, units, 2 * x.numel())
    return [dx, dw.sum(0).mT.contiguous(), *([] if bias is None else [dbias.sum(0)]), dstate]
