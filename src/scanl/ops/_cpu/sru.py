"""The simple recurrent unit as fused loops over rows of channels.

The backward pass first runs c forwards again and keeps it; the gates are made anew from it. With dc what arrives from
the step after, per step (' before the sigmoid, c₀ the state before)

    dc += r dh,  du = (1 − r) dh,  dr' = (c − u) dh r (1 − r),  df' = (c₀ − x) dc f (1 − f),  dx = (1 − f) dc,
    dv_f += df' c₀,  dv_r += dr' c₀,  dc = f dc + v_f df' + v_r dr'
"""

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._cells import FLUSH, blocks, piece, rows, sequences
from scanl.ops._cpu._gates import sigmoid
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._team import Kernel, array, take


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
    """`carry` gains what h gives c; `raw` becomes dr', `gate` becomes du."""
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
        counter, units = pointer[0], pointer[1]
        ranges = array(pointer[2], 3 * pointer[3], np.int64)
        width, count, size, reverse = pointer[4], pointer[5], pointer[6], pointer[7]
        x, f, r, u, v_f, v_r = pointer[8], pointer[9], pointer[10], pointer[11], pointer[12], pointer[13]
        strides = array(pointer[14], 8, np.int64)
        state, h, h_batch = pointer[15], pointer[16], pointer[17]
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
                _gate_row(array(r + item * (b * strides[4] + t * strides[5] + channel), part, dtype), vr, c, out)
                _gate_row(array(f + item * (b * strides[2] + t * strides[3] + channel), part, dtype), vf, c, gate)
                _state_row(array(x + item * (b * strides[0] + t * strides[1] + channel), part, dtype), gate, c)
                _output_row(c, array(u + item * (b * strides[6] + t * strides[7] + channel), part, dtype), out, out)

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        counter, units = pointer[0], pointer[1]
        ranges = array(pointer[2], 3 * pointer[3], np.int64)
        width, count, size, reverse = pointer[4], pointer[5], pointer[6], pointer[7]
        x, f, r, u, v_f, v_r = pointer[8], pointer[9], pointer[10], pointer[11], pointer[12], pointer[13]
        strides = array(pointer[14], 8, np.int64)
        state, kept, kept_batch = pointer[15], pointer[16], pointer[17]
        dh, dh_batch, dh_time, carries, dv = pointer[18], pointer[19], pointer[20], pointer[21], pointer[22]
        dx, df, dr, du = pointer[23], pointer[24], pointer[25], pointer[26]
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
                _gate_row(array(f + item * (b * strides[2] + t * strides[3] + channel), part, dtype), vf, c, gate)
                new[:] = c
                _state_row(array(x + item * (b * strides[0] + t * strides[1] + channel), part, dtype), gate, new)
                c = new
            for i in range(end - begin):
                t = begin + i if reverse else end - 1 - i
                k = item * (b * kept_batch + t * width + channel)
                c = array(kept + k, part, dtype)
                before = start
                if i < end - begin - 1:
                    before = array(kept + k + (item * width if reverse else -item * width), part, dtype)
                dhs = array(dh + item * (b * dh_batch + t * dh_time + channel), part, dtype)
                us = array(u + item * (b * strides[6] + t * strides[7] + channel), part, dtype)
                dus = array(spare.ctypes.data if du == 0 else du + k, part, dtype)  # no highway: nobody reads it
                raw = array(dr + k, part, dtype)
                _gate_row(array(r + item * (b * strides[4] + t * strides[5] + channel), part, dtype), vr, before, dus)
                _reset_backward_row(dhs, c, us, dus, carry, raw)
                _gate_row(array(f + item * (b * strides[2] + t * strides[3] + channel), part, dtype), vf, before, gate)
                xs = array(x + item * (b * strides[0] + t * strides[1] + channel), part, dtype)
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


def _inputs(x, f, r, u, v_f, v_r):
    """The operands as the kernels read them, absent ones as zeros, a row that never advances; and their strides."""
    timed = [rows(value) for value in (x, f, r)]
    timed.append(x.new_zeros(x.shape[2]).expand(x.shape) if u is None else rows(u))
    constant = [x.new_zeros(x.shape[2]) if v is None else v.contiguous() for v in (v_f, v_r)]
    return [*timed, *constant], np.array([value.stride()[:2] for value in timed], np.int64)


def forward(x, f, r, u, v_f, v_r, state, reverse, cu_seqlens):
    ranges = sequences(x, cu_seqlens, "sru")
    operands, strides = _inputs(x, f, r, u, v_f, v_r)
    h, last = empty(x.shape, x.dtype), state.clone(memory_format=torch.contiguous_format)
    count, size = blocks(len(ranges), x.shape[2])
    head = [ranges.ctypes.data, len(ranges), x.shape[2], count, size, int(reverse)]
    pointers = [value.data_ptr() for value in operands]
    _forward.run(
        x.dtype,
        [*head, *pointers, strides.ctypes.data, last.data_ptr(), h.data_ptr(), h.stride(0)],
        len(ranges) * count,
        x.numel(),
    )
    return h, last


def backward(dh, dlast, x, f, r, u, v_f, v_r, state, reverse, cu_seqlens):
    ranges = sequences(x, cu_seqlens, "sru")
    operands, strides = _inputs(x, f, r, u, v_f, v_r)
    dh, state, kept = rows(dh), state.contiguous(), empty(x.shape, x.dtype)
    dx, df, dr = (empty(x.shape, x.dtype) for _ in range(3))
    count, size = blocks(len(ranges), x.shape[2])
    du = None if u is None else empty(x.shape, x.dtype)
    carry = dlast.clone(memory_format=torch.contiguous_format)
    dv = x.new_empty(len(ranges), 2, x.shape[2])
    head = [ranges.ctypes.data, len(ranges), x.shape[2], count, size, int(reverse)]
    pointers = [value.data_ptr() for value in operands]
    _backward.run(
        x.dtype,
        [
            *head, *pointers, strides.ctypes.data, state.data_ptr(), kept.data_ptr(), kept.stride(0),
            dh.data_ptr(), *dh.stride()[:2], carry.data_ptr(), dv.data_ptr(),
            dx.data_ptr(), df.data_ptr(), dr.data_ptr(), 0 if du is None else du.data_ptr(),
        ],
        len(ranges) * count,
        x.numel(),
    )  # fmt: skip
    optional = [du, None if v_f is None else dv[:, 0].sum(0), None if v_r is None else dv[:, 1].sum(0)]
    return [dx, df, dr, *[grad for grad in optional if grad is not None], carry]
