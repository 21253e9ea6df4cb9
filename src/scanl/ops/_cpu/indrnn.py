"""IndRNN as fused loops over rows of channels.

The backward pass needs only the outputs, since they determine φ' (s > 0, 1 - s², 1). With c the gradient from the step
after, each step computes dx = (dy + c) φ'(s), dw = Σ dx s_before, c = w dx.
"""

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._cells import FLUSH, blocks, piece, rows, sequences
from scanl.ops._cpu._gates import tanh
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import Slots, channels, loaded, view
from scanl.ops._cpu._team import Kernel, array, take
from scanl.ops.indrnn import activation_number

_HEAD = "ranges sequences width count size reverse activation"
FORWARD = Slots(_HEAD + " y y_batch w state", rows="x")
BACKWARD = Slots(_HEAD + " y y_batch w state carry dx dw", rows="dy")


@njit(forceinline=True)
def _forward_row(x, w, s, y, activation):
    if activation == 0:
        zero = s.dtype.type(0)
        for i in range(s.size):
            raw = x[i] + w[i] * s[i]
            s[i] = y[i] = zero if raw <= 0 else raw  # NaN stays NaN
    elif activation == 1:
        for i in range(s.size):
            s[i] = y[i] = tanh(x[i] + w[i] * s[i])
    else:
        for i in range(s.size):
            s[i] = y[i] = x[i] + w[i] * s[i]


@njit(forceinline=True)
def _backward_row(dy, y, c, dx, activation):
    if activation == 0:
        zero = c.dtype.type(0)
        for i in range(c.size):
            d = dy[i] + c[i]
            dx[i] = zero if y[i] <= 0 else d
    elif activation == 1:
        one = c.dtype.type(1)
        for i in range(c.size):
            dx[i] = (dy[i] + c[i]) * (one - y[i] * y[i])
    else:
        for i in range(c.size):
            dx[i] = dy[i] + c[i]


@njit(forceinline=True)
def _carry_row(dx, w, before, c, total):
    for i in range(c.size):
        c[i] = w[i] * dx[i]
    for i in range(c.size):
        total[i] += dx[i] * before[i]


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        width, count, size, reverse, activation = slots.width, slots.count, slots.size, slots.reverse, slots.activation
        x, y, y_batch, w, state = loaded(slots.x), slots.y, slots.y_batch, slots.w, slots.state
        while True:
            unit = take(counter)
            if unit >= units:
                return
            n, b, begin, end, channel, part = piece(ranges, unit, count, size, width)
            s = array(state + item * (n * width + channel), part, dtype)
            ws = array(w + item * channel, part, dtype)
            for i in range(end - begin):
                t = end - 1 - i if reverse else begin + i
                _forward_row(
                    channels(x, b, t, channel, part, dtype),
                    ws,
                    s,
                    array(y + item * (b * y_batch + t * width + channel), part, dtype),
                    activation,
                )

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        width, count, size, reverse, activation = slots.width, slots.count, slots.size, slots.reverse, slots.activation
        dy, y, y_batch, w, state = loaded(slots.dy), slots.y, slots.y_batch, slots.w, slots.state
        carry, dx, dw = slots.carry, slots.dx, slots.dw
        recent = np.zeros(size, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            n, b, begin, end, channel, part = piece(ranges, unit, count, size, width)
            at = item * (n * width + channel)
            c, total = array(carry + at, part, dtype), array(dw + at, part, dtype)
            ws = array(w + item * channel, part, dtype)
            recent[:] = 0
            total[:] = 0
            for i in range(end - begin):
                t = begin + i if reverse else end - 1 - i
                k = item * (b * y_batch + t * width + channel)
                before = y + k + (item * width if reverse else -item * width)
                if i == end - begin - 1:
                    before = state + at
                dxs = array(dx + k, part, dtype)
                dys = channels(dy, b, t, channel, part, dtype)
                _backward_row(dys, array(y + k, part, dtype), c, dxs, activation)
                _carry_row(dxs, ws, array(before, part, dtype), c, recent)
                if i % FLUSH == FLUSH - 1:
                    for m in range(part):
                        total[m] += recent[m]
                        recent[m] = 0
            for m in range(part):
                total[m] += recent[m]

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def forward(x, w, state, reverse, cu_seqlens, activation):
    ranges = sequences(x, cu_seqlens, "indrnn")
    x, y, w = rows(x), empty(x.shape, x.dtype), w.contiguous()
    last = state.clone(memory_format=torch.contiguous_format)
    count, size = blocks(len(ranges), x.shape[2])
    slots = FORWARD.pack(
        ranges=ranges, sequences=len(ranges), width=x.shape[2], count=count, size=size, reverse=reverse,
        activation=activation_number(activation), x=x, y=y, y_batch=y.stride(0), w=w, state=last,
    )  # fmt: skip
    _forward.run(x.dtype, slots, len(ranges) * count, x.numel())
    return y, last


def backward(dy, dlast, x, w, state, y, reverse, cu_seqlens, activation):
    ranges = sequences(y, cu_seqlens, "indrnn")
    dy, y, w, state = rows(dy), y.contiguous(), w.contiguous(), state.contiguous()
    dx, dw = empty(y.shape, y.dtype), state.new_empty(state.shape)
    carry = dlast.clone(memory_format=torch.contiguous_format)
    count, size = blocks(len(ranges), y.shape[2])
    slots = BACKWARD.pack(
        ranges=ranges, sequences=len(ranges), width=y.shape[2], count=count, size=size, reverse=reverse,
        activation=activation_number(activation), dy=dy, y=y, y_batch=y.stride(0), w=w, state=state, carry=carry,
        dx=dx, dw=dw,
    )  # fmt: skip
    _backward.run(y.dtype, slots, len(ranges) * count, y.numel())
    return [dx, dw.sum(0), carry]
