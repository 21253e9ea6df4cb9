"""The light gated recurrent unit as fused loops. Each load of U serves a few sequences that are processed together.

The backward pass recomputes all a_t and z_t from the outputs with one matrix product. Let c be the gradient from the
step after, h₀ the state before the step, and ' mark the argument of a nonlinearity. Each step computes

    δ = dh + c,  dz' = δ (h₀ − ReLU(a)) z (1 − z),  da' = δ (1 − z) [a > 0],  c = δ z + U_aᵀ da' + U_zᵀ dz'.

At the end, one more matrix product gives dU.
"""

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._cells import before, copy, groups, longest, row_at, sequences
from scanl.ops._cpu._gates import sigmoid
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._product import add_products
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import Kernel, array, take

_HEAD = "ranges sequences width steps size reverse w"
FORWARD = Slots(_HEAD + " x state y")
BACKWARD = Slots(_HEAD + " raw carry dh old")


@njit(forceinline=True)
def _step_row(raw, h, y):
    zero, one = h.dtype.type(0), h.dtype.type(1)
    a, z = raw[: h.size], raw[h.size :]
    for i in range(h.size):
        gate = sigmoid(z[i])
        h[i] = y[i] = gate * h[i] + (one - gate) * (zero if a[i] <= 0 else a[i])


@njit(forceinline=True)
def _backward_row(dh, old, c, raw, z):
    """Replace `raw` by its gradient; c becomes δ z, the gate's direct part of the gradient of the state before."""
    zero, one = c.dtype.type(0), c.dtype.type(1)
    a, gate = raw[: c.size], raw[c.size :]
    for i in range(c.size):
        z[i] = sigmoid(gate[i])
        c[i] += dh[i]
    for i in range(c.size):
        gate[i] = c[i] * (old[i] - (zero if a[i] <= 0 else a[i])) * z[i] * (one - z[i])
        a[i] = zero if a[i] <= 0 else c[i] * (one - z[i])
    for i in range(c.size):
        c[i] *= z[i]


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        count, width, steps, size, reverse = slots.sequences, slots.width, slots.steps, slots.size, slots.reverse
        w = array(slots.w, 2 * width * width, dtype)
        x, state, y = slots.x, slots.state, slots.y
        scratch = np.zeros(2 * width * size, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            first = unit * size
            members = min(size, count - first)
            h, raw = array(state + item * first * width, members * width, dtype), scratch[: 2 * members * width]
            for i in range(longest(ranges, first, members)):
                for m in range(members):
                    row = row_at(ranges, first + m, i, steps, reverse)
                    if row >= 0:
                        both = array(x + item * 2 * row * width, 2 * width, dtype)
                        copy(both, raw[2 * m * width : 2 * (m + 1) * width])
                add_products(raw, h, w, members)
                for m in range(members):
                    row = row_at(ranges, first + m, i, steps, reverse)
                    if row >= 0:
                        _step_row(
                            raw[2 * m * width : 2 * (m + 1) * width],
                            h[m * width : (m + 1) * width],
                            array(y + item * row * width, width, dtype),
                        )

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        count, width, steps, size, reverse = slots.sequences, slots.width, slots.steps, slots.size, slots.reverse
        w = array(slots.w, 2 * width * width, dtype)
        raw, carry, dh, old = slots.raw, slots.carry, slots.dh, slots.old
        z, scratch = np.empty(width, dtype), np.zeros(2 * width * size, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            first = unit * size
            members = min(size, count - first)
            c, grads = array(carry + item * first * width, members * width, dtype), scratch[: 2 * members * width]
            for i in range(longest(ranges, first, members)):
                for m in range(members):
                    row = row_at(ranges, first + m, i, steps, 1 - reverse)
                    mine = grads[2 * m * width : 2 * (m + 1) * width]
                    if row >= 0:
                        at = item * row * width
                        both = array(raw + 2 * at, 2 * width, dtype)
                        _backward_row(
                            array(dh + at, width, dtype),
                            array(old + at, width, dtype),
                            c[m * width : (m + 1) * width],
                            both,
                            z,
                        )
                        copy(both, mine)
                    else:
                        mine[:] = 0
                add_products(c, grads, w, members)

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def forward(x, u, state, reverse, cu_seqlens):
    ranges = sequences(x, cu_seqlens, "ligru")
    batch, steps, _, width = x.shape
    x, w = x.contiguous(), u.permute(2, 0, 1).contiguous()
    y, last = empty((batch, steps, width), x.dtype), state.clone(memory_format=torch.contiguous_format)
    count, size = groups(len(ranges))
    slots = FORWARD.pack(
        ranges=ranges, sequences=len(ranges), width=width, steps=steps, size=size, reverse=reverse, w=w, x=x,
        state=last, y=y,
    )  # fmt: skip
    _forward.run(x.dtype, slots, count, x.numel() * width)
    return y, last


def backward(dh, dlast, x, u, state, y, reverse, cu_seqlens):
    ranges = sequences(x, cu_seqlens, "ligru")
    batch, steps, _, width = x.shape
    old, w = before(y, state, ranges, reverse), u.contiguous()
    flat, matrix = old.view(-1, width), w.view(2 * width, width)
    raw = empty((batch, steps, 2, width), x.dtype)
    torch.addmm(x.reshape(-1, 2 * width), flat, matrix.T, out=raw.view(-1, 2 * width))
    dh, carry = dh.contiguous(), dlast.clone(memory_format=torch.contiguous_format)
    count, size = groups(len(ranges))
    slots = BACKWARD.pack(
        ranges=ranges, sequences=len(ranges), width=width, steps=steps, size=size, reverse=reverse, w=w, raw=raw,
        carry=carry, dh=dh, old=old,
    )  # fmt: skip
    _backward.run(x.dtype, slots, count, x.numel() * width)
    return [raw, (raw.view(-1, 2 * width).T @ flat).view_as(u), carry]
