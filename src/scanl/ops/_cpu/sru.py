"""The simple recurrent unit as fused loops over rows of channels.

The backward pass first recomputes c forwards and stores it; it recomputes the gates from c. Let dc be the gradient from
the step after, c₀ the state before the step, and ' mark the argument of a sigmoid. Each step computes

    dc += r dh,  du = (1 − r) dh,  dr' = (c − u) dh r (1 − r),  df' = (c₀ − x) dc f (1 − f),  dx = (1 − f) dc,
    dv_f += df' c₀,  dv_r += dr' c₀,  dc = f dc + v_f df' + v_r dr'
"""

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._cells import FLUSH, blocks, piece, rows, sequences
from scanl.ops._cpu._gates import sigmoid
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import Slots, channels, loaded, view
from scanl.ops._cpu._team import Kernel, array, take

_HEAD, _ROWS = "ranges sequences width count size reverse v_f v_r state", "x f r u"
FORWARD = Slots(_HEAD + " h h_batch", rows=_ROWS)
BACKWARD = Slots(_HEAD + " kept kept_batch carries dv dx df dr du", rows=_ROWS + " dh")


@njit(forceinline=True)
def _gate_row(raw, v, c, gate):
    for i in range(c.size):
        gate[i] = sigmoid(raw[i] + v[i] * c[i])


@njit(forceinline=True)
def _state_row(x, f, c):
    one = c.dtype.type(1)
    for i in range(c.size):
        c[i] = f[i] * c[i] + (one - f[i]) * x[i]


@njit(forceinline=True)
def _output_row(c, u, r, h):
    one = c.dtype.type(1)
    for i in range(c.size):
        h[i] = r[i] * c[i] + (one - r[i]) * u[i]


@njit(forceinline=True)
def _reset_backward_row(dh, c, u, gate, carry, raw):
    """Add h's part of the gradient of c to `carry`; replace `raw` by dr' and `gate` by du."""
    one = c.dtype.type(1)
    for i in range(c.size):
        raw[i] = (c[i] - u[i]) * dh[i] * gate[i] * (one - gate[i])
    for i in range(c.size):
        carry[i] += gate[i] * dh[i]
        gate[i] = (one - gate[i]) * dh[i]


@njit(forceinline=True)
def _forget_backward_row(x, before, gate, carry, dx, raw):
    one = carry.dtype.type(1)
    for i in range(carry.size):
        raw[i] = (before[i] - x[i]) * carry[i] * gate[i] * (one - gate[i])
    for i in range(carry.size):
        dx[i] = (one - gate[i]) * carry[i]
        carry[i] *= gate[i]


@njit(forceinline=True)
def _peephole_backward_row(raw, v, before, carry, total):
    for i in range(carry.size):
        carry[i] += v[i] * raw[i]
    for i in range(carry.size):
        total[i] += raw[i] * before[i]


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        width, count, size, reverse = slots.width, slots.count, slots.size, slots.reverse
        x, f, r, u = loaded(slots.x), loaded(slots.f), loaded(slots.r), loaded(slots.u)
        v_f, v_r, state = slots.v_f, slots.v_r, slots.state
        h, h_batch = slots.h, slots.h_batch
        gate_row = np.empty(size, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            n, b, begin, end, channel, part = piece(ranges, unit, count, size, width)
            c = array(state + item * (n * width + channel), part, dtype)
            vf, vr = array(v_f + item * channel, part, dtype), array(v_r + item * channel, part, dtype)
            gate = gate_row[:part]
            for i in range(end - begin):
                t = end - 1 - i if reverse else begin + i
                out = array(h + item * (b * h_batch + t * width + channel), part, dtype)
                _gate_row(channels(r, b, t, channel, part, dtype), vr, c, out)
                _gate_row(channels(f, b, t, channel, part, dtype), vf, c, gate)
                _state_row(channels(x, b, t, channel, part, dtype), gate, c)
                _output_row(c, channels(u, b, t, channel, part, dtype), out, out)

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        width, count, size, reverse = slots.width, slots.count, slots.size, slots.reverse
        x, f, r, u = loaded(slots.x), loaded(slots.f), loaded(slots.r), loaded(slots.u)
        v_f, v_r, state = slots.v_f, slots.v_r, slots.state
        kept, kept_batch, dh, carries, dv = slots.kept, slots.kept_batch, loaded(slots.dh), slots.carries, slots.dv
        dx, df, dr, du = slots.dx, slots.df, slots.dr, slots.du
        row, spare, recent = np.empty(size, dtype), np.empty(size, dtype), np.zeros(2 * size, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            n, b, begin, end, channel, part = piece(ranges, unit, count, size, width)
            at = item * (n * width + channel)
            vf, vr = array(v_f + item * channel, part, dtype), array(v_r + item * channel, part, dtype)
            total_f = array(dv + item * (2 * n * width + channel), part, dtype)
            total_r = array(dv + item * ((2 * n + 1) * width + channel), part, dtype)
            recent_f, recent_r = recent[:part], recent[size : size + part]
            total_f[:] = total_r[:] = 0
            recent_f[:] = recent_r[:] = 0
            carry, gate = array(carries + at, part, dtype), row[:part]
            start = array(state + at, part, dtype)
            c = start
            for i in range(end - begin):
                t = end - 1 - i if reverse else begin + i
                new = array(kept + item * (b * kept_batch + t * width + channel), part, dtype)
                _gate_row(channels(f, b, t, channel, part, dtype), vf, c, gate)
                new[:] = c
                _state_row(channels(x, b, t, channel, part, dtype), gate, new)
                c = new
            for i in range(end - begin):
                t = begin + i if reverse else end - 1 - i
                k = item * (b * kept_batch + t * width + channel)
                c = array(kept + k, part, dtype)
                before = start
                if i < end - begin - 1:
                    before = array(kept + k + (item * width if reverse else -item * width), part, dtype)
                dhs = channels(dh, b, t, channel, part, dtype)
                us = channels(u, b, t, channel, part, dtype)
                dus = array(spare.ctypes.data if du == 0 else du + k, part, dtype)  # without a highway du is not used
                raw = array(dr + k, part, dtype)
                _gate_row(channels(r, b, t, channel, part, dtype), vr, before, dus)
                _reset_backward_row(dhs, c, us, dus, carry, raw)
                _gate_row(channels(f, b, t, channel, part, dtype), vf, before, gate)
                xs = channels(x, b, t, channel, part, dtype)
                dfs = array(df + k, part, dtype)
                _forget_backward_row(xs, before, gate, carry, array(dx + k, part, dtype), dfs)
                _peephole_backward_row(dfs, vf, before, carry, recent_f)
                _peephole_backward_row(raw, vr, before, carry, recent_r)
                if i % FLUSH == FLUSH - 1 or i == end - begin - 1:
                    for m in range(part):
                        total_f[m] += recent_f[m]
                        total_r[m] += recent_r[m]
                    recent_f[:] = recent_r[:] = 0

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def _inputs(x, f, r, u, v_f, v_r, reverse, cu_seqlens):
    """Return the arguments of both kernels, by slot, and the number of units. Absent operands are zeros."""
    ranges = sequences(x, cu_seqlens, "sru")
    count, size = blocks(len(ranges), x.shape[2])
    zero = x.new_zeros(x.shape[2])
    head = {"ranges": ranges, "sequences": len(ranges), "width": x.shape[2], "count": count, "size": size}
    head |= {"reverse": reverse, "x": rows(x), "f": rows(f), "r": rows(r)}
    head["u"] = zero.expand(x.shape) if u is None else rows(u)
    head["v_f"], head["v_r"] = (zero if v is None else v.contiguous() for v in (v_f, v_r))
    return head, len(ranges) * count


def forward(x, f, r, u, v_f, v_r, state, reverse, cu_seqlens):
    head, units = _inputs(x, f, r, u, v_f, v_r, reverse, cu_seqlens)
    h, last = empty(x.shape, x.dtype), state.clone(memory_format=torch.contiguous_format)
    _forward.run(x.dtype, FORWARD.pack(**head, state=last, h=h, h_batch=h.stride(0)), units, x.numel())
    return h, last


def backward(dh, dlast, x, f, r, u, v_f, v_r, state, reverse, cu_seqlens):
    head, units = _inputs(x, f, r, u, v_f, v_r, reverse, cu_seqlens)
    dh, state, kept = rows(dh), state.contiguous(), empty(x.shape, x.dtype)
    dx, df, dr = (empty(x.shape, x.dtype) for _ in range(3))
    du = None if u is None else empty(x.shape, x.dtype)
    carry = dlast.clone(memory_format=torch.contiguous_format)
    dv = x.new_empty(head["sequences"], 2, x.shape[2])
    slots = BACKWARD.pack(
        **head, state=state, kept=kept, kept_batch=kept.stride(0), dh=dh, carries=carry, dv=dv, dx=dx, df=df, dr=dr,
        du=du,
    )  # fmt: skip
    _backward.run(x.dtype, slots, units, x.numel())
    optional = [du, None if v_f is None else dv[:, 0].sum(0), None if v_r is None else dv[:, 1].sum(0)]
    return [dx, df, dr, *[grad for grad in optional if grad is not None], carry]
