"""sLSTM as fused loops over rows of all heads. Each load of R serves a few sequences that are processed together.

The backward pass first runs forwards again and stores c, n, m and the gates before their nonlinearities. Let dh, dc, dn
and dm be the gradients from the step after (dh also from the output), let ₀ mark the state before the step, and let s
be the derivative of the maximum by i^. Each step computes

    q = dh / n,  do^ = q c o (1 − o),  dc += q o,  dn −= q o c / n,  dz^ = dc i (1 − z²),  I = i (dc z + dn),
    F = f (dc c₀ + dn n₀),  M = dm − I − F,  di^ = I + s M,  dm = F + (1 − s) M,  df^ = dm d(log f),
    dc = f dc,  dn = f dn

and dh of the step before is Rᵀ times the gradients of the four gates. Each loop uses few rows, because the compiler
must prove that they do not overlap.
"""

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._cells import before, copy, groups, longest, row_at, sequences
from scanl.ops._cpu._gates import log_sigmoid, sigmoid, tanh
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._product import add_part_products
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import CORES, Kernel, array, take
from scanl.ops.slstm import forget_number

_HEAD = "ranges sequences steps size reverse forget heads width blocks w state"
FORWARD = Slots(_HEAD + " x y kept raws")  # kept, raws: 0 unless for the backward pass
BACKWARD = Slots(_HEAD + " raws kept carry dh")

_FLAGS = {"forceinline": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}


@njit(**_FLAGS)
def _kept_row(f, m, forget, kept):
    if forget == 0:
        for k in range(m.size):
            kept[k] = m[k] + log_sigmoid(f[k])
    else:
        for k in range(m.size):
            kept[k] = m[k] + f[k]


@njit(**_FLAGS)
def _step_row(raw, c, n, m, forget, h, y):
    size, zero = c.size, c.dtype.type(0)
    i, f, z, o = raw[:size], raw[size : 2 * size], raw[2 * size : 3 * size], raw[3 * size :]
    _kept_row(f, m, forget, f)
    for k in range(size):
        m[k] = i[k] if (n[k] == zero) | (i[k] > f[k]) else f[k]
    for k in range(size):
        i[k] = exp(i[k] - m[k])
        f[k] = exp(min(f[k] - m[k], zero))
    for k in range(size):
        z[k] = i[k] * tanh(z[k])
    for k in range(size):
        c[k] = f[k] * c[k] + z[k]
    for k in range(size):
        n[k] = f[k] * n[k] + i[k]
    for k in range(size):
        h[k] = y[k] = sigmoid(o[k]) * c[k] / n[k]


@njit(**_FLAGS)
def _output_backward_row(dh, carry, o, c, n, dc, dn, q, gate):
    one = c.dtype.type(1)
    for k in range(c.size):
        q[k] = (dh[k] + carry[k]) / n[k]
    for k in range(c.size):
        gate[k] = sigmoid(o[k])
    for k in range(c.size):
        o[k] = q[k] * c[k] * gate[k] * (one - gate[k])
    for k in range(c.size):
        q[k] *= gate[k]
    for k in range(c.size):
        dc[k] += q[k]
        dn[k] -= q[k] * c[k] / n[k]


@njit(**_FLAGS)
def _gates_backward_row(raw, m, old_c, old_n, old_m, dc, dn, dm, forget, spare):
    """Replace the first three parts of `raw` by their gradients; move dc, dn, dm to the state before."""
    size, half = dc.size, dc.dtype.type(0.5)
    zero, one, two = half - half, half + half, dc.dtype.type(2)
    i, f, z = raw[:size], raw[size : 2 * size], raw[2 * size : 3 * size]
    in_, keep, share = spare[:size], spare[size : 2 * size], spare[2 * size : 3 * size]
    _kept_row(f, old_m, forget, keep)
    for k in range(size):
        to_i = one if i[k] > keep[k] else (half if i[k] == keep[k] else zero)
        only_i = two if keep[k] > i[k] else one  # f' is clamped at 1, so its gate gets no gradient
        share[k] = only_i if old_n[k] == zero else to_i
    for k in range(size):
        in_[k] = exp(i[k] - m[k])
        keep[k] = exp(min(keep[k] - m[k], zero))
    for k in range(size):
        z[k] = tanh(z[k])
    for k in range(size):
        i[k] = in_[k] * (dc[k] * z[k] + dn[k])
    for k in range(size):
        z[k] = dc[k] * in_[k] * (one - z[k] * z[k])
    for k in range(size):
        both = keep[k] * (dc[k] * old_c[k] + dn[k] * old_n[k])
        in_[k] = zero if share[k] == two else both
    for k in range(size):
        dc[k] *= keep[k]
        dn[k] *= keep[k]
    for k in range(size):
        dm[k] -= i[k] + in_[k]
    for k in range(size):
        part = min(share[k], one)
        i[k] += part * dm[k]
        dm[k] = in_[k] + (one - part) * dm[k]
    if forget == 0:
        for k in range(size):
            f[k] = dm[k] * sigmoid(-f[k])
    else:
        for k in range(size):
            f[k] = dm[k]


def _build_forward(dtype):
    item = dtype.itemsize

    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        count, steps, size, reverse, forget = slots.sequences, slots.steps, slots.size, slots.reverse, slots.forget
        heads, width, blocks, x = slots.heads, slots.width, slots.blocks, slots.x
        all_heads = heads * width
        w, state = array(slots.w, 4 * all_heads * width, dtype), slots.state
        y, kept, raws = slots.y, slots.kept, slots.raws
        per_block = -(-heads // blocks)
        scratch = np.zeros(4 * per_block * width * size, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            first, head = unit // blocks * size, unit % blocks * per_block
            members, part = min(size, count - first), min(per_block, heads - head) * width
            channel = head * width
            states = array(state + item * first * 4 * all_heads, members * 4 * all_heads, dtype)
            raw = scratch[: 4 * members * part]
            for i in range(longest(ranges, first, members)):
                for r in range(members):
                    row = row_at(ranges, first + r, i, steps, reverse)
                    if row >= 0:
                        for g in range(4):
                            gate = array(x + item * ((row * 4 + g) * all_heads + channel), part, dtype)
                            copy(gate, raw[(4 * r + g) * part : (4 * r + g + 1) * part])
                for at in range(0, part, width):
                    for g in range(4):
                        matrix = (g * all_heads + channel + at) * width
                        add_part_products(
                            raw, g * part + at, 4 * part, width, states, channel + at, 4 * all_heads, width,
                            w, matrix, width, members,
                        )  # fmt: skip
                for r in range(members):
                    row = row_at(ranges, first + r, i, steps, reverse)
                    if row >= 0:
                        mine = raw[4 * r * part : 4 * (r + 1) * part]
                        if raws != 0:
                            for g in range(4):
                                place = raws + item * ((row * 4 + g) * all_heads + channel)
                                copy(mine[g * part : (g + 1) * part], array(place, part, dtype))
                        at = 4 * r * all_heads + channel
                        h, c = states[at : at + part], states[at + all_heads : at + all_heads + part]
                        n = states[at + 2 * all_heads : at + 2 * all_heads + part]
                        m = states[at + 3 * all_heads : at + 3 * all_heads + part]
                        out = array(y + item * (row * all_heads + channel), part, dtype)
                        _step_row(mine, c, n, m, forget, h, out)
                        if kept != 0:
                            place = kept + item * (row * 3 * all_heads + channel)
                            copy(c, array(place, part, dtype))
                            copy(n, array(place + item * all_heads, part, dtype))
                            copy(m, array(place + item * 2 * all_heads, part, dtype))

    return forward


def _build_backward(dtype):
    item = dtype.itemsize

    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
        count, steps, size, reverse, forget = slots.sequences, slots.steps, slots.size, slots.reverse, slots.forget
        heads, width, blocks, raws = slots.heads, slots.width, slots.blocks, slots.raws
        all_heads = heads * width
        w, state = array(slots.w, 4 * all_heads * width, dtype), slots.state
        kept, carry, dh = slots.kept, slots.carry, slots.dh
        per_block = -(-heads // blocks)
        scratch = np.zeros(4 * per_block * width * size, dtype)
        q, spare = np.empty(per_block * width, dtype), np.empty(3 * per_block * width, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            first, head = unit // blocks * size, unit % blocks * per_block
            members, part = min(size, count - first), min(per_block, heads - head) * width
            channel = head * width
            carries = array(carry + item * first * 4 * all_heads, members * 4 * all_heads, dtype)
            raw = scratch[: 4 * members * part]
            raw[:] = 0
            for i in range(longest(ranges, first, members)):
                for r in range(members):
                    row = row_at(ranges, first + r, i, steps, 1 - reverse)
                    mine = raw[4 * r * part : 4 * (r + 1) * part]
                    if row < 0:
                        mine[:] = 0
                        continue
                    at = 4 * r * all_heads + channel
                    dhs, dc = carries[at : at + part], carries[at + all_heads : at + all_heads + part]
                    dn = carries[at + 2 * all_heads : at + 2 * all_heads + part]
                    dm = carries[at + 3 * all_heads : at + 3 * all_heads + part]
                    for g in range(4):
                        gate = array(raws + item * ((row * 4 + g) * all_heads + channel), part, dtype)
                        copy(gate, mine[g * part : (g + 1) * part])
                    new = kept + item * (row * 3 * all_heads + channel)
                    old = new + item * (3 * all_heads if reverse else -3 * all_heads)
                    if row_at(ranges, first + r, i + 1, steps, 1 - reverse) < 0:
                        old = state + item * ((first + r) * 4 * all_heads + all_heads + channel)
                    c, n = array(new, part, dtype), array(new + item * all_heads, part, dtype)
                    m = array(new + item * 2 * all_heads, part, dtype)
                    outside = array(dh + item * (row * all_heads + channel), part, dtype)
                    _output_backward_row(outside, dhs, mine[3 * part :], c, n, dc, dn, q[:part], spare[:part])
                    old_c, old_n = array(old, part, dtype), array(old + item * all_heads, part, dtype)
                    old_m = array(old + item * 2 * all_heads, part, dtype)
                    _gates_backward_row(mine, m, old_c, old_n, old_m, dc, dn, dm, forget, spare)
                    for g in range(4):
                        gate = array(raws + item * ((row * 4 + g) * all_heads + channel), part, dtype)
                        copy(mine[g * part : (g + 1) * part], gate)
                    dhs[:] = 0
                for at in range(0, part, width):
                    for g in range(4):
                        matrix = (g * all_heads + channel + at) * width
                        add_part_products(
                            carries, channel + at, 4 * all_heads, width, raw, g * part + at, 4 * part, width,
                            w, matrix, width, members,
                        )  # fmt: skip

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def _units(ranges, x, reverse, number):
    """Return the number of units, and the slots of the division of the work.

    A unit is a group of sequences. If there are fewer groups than cores, the heads are divided too.
    """
    count, size = groups(len(ranges))
    heads, width = x.shape[3:]
    blocks = max(1, min(heads, CORES // max(count, 1)))
    blocks = -(-heads // -(-heads // blocks)) if heads else 1
    head = {"ranges": ranges, "sequences": len(ranges), "steps": x.shape[1], "size": size, "reverse": reverse}
    return count * blocks, {**head, "forget": number, "heads": heads, "width": width, "blocks": blocks}


def _run(x, r, state, ranges, reverse, number, *, keep):
    """Return the outputs, the last state, and if `keep`, c, n, m after each step and the gates' arguments."""
    batch, steps, _, heads, width = x.shape
    x, w = x.contiguous(), r.transpose(2, 3).contiguous()
    y, last = empty((batch, steps, heads, width), x.dtype), state.clone(memory_format=torch.contiguous_format)
    kept = empty((batch, steps if keep else 0, 3, heads, width), x.dtype)
    raw = empty(kept.shape[:2] + x.shape[2:], x.dtype)
    units, head = _units(ranges, x, reverse, number)
    asked = {"kept": kept, "raws": raw} if keep else {"kept": None, "raws": None}
    _forward.run(x.dtype, FORWARD.pack(**head, w=w, state=last, x=x, y=y, **asked), units, x.numel() * width)
    return y, last, kept, raw


def forward(x, r, state, reverse, cu_seqlens, forget):
    ranges = sequences(x, cu_seqlens, "slstm")
    return _run(x, r, state, ranges, reverse, forget_number(forget), keep=False)[:2]


def backward(dh, dlast, x, r, state, reverse, cu_seqlens, forget):
    ranges, number = sequences(x, cu_seqlens, "slstm"), forget_number(forget)
    heads, width = x.shape[3:]
    y, _, kept, raw = _run(x, r, state, ranges, reverse, number, keep=True)
    w, state, dh = r.contiguous(), state.contiguous(), dh.contiguous()
    carry = dlast.clone(memory_format=torch.contiguous_format)
    units, head = _units(ranges, x, reverse, number)
    slots = BACKWARD.pack(**head, w=w, state=state, raws=raw, kept=kept, carry=carry, dh=dh)
    _backward.run(x.dtype, slots, units, x.numel() * width)
    old = before(y, state[:, 0], ranges, reverse).view(-1, heads, width).transpose(0, 1)
    gates = raw.view(-1, 4, heads, width).permute(1, 2, 3, 0)
    return [raw, torch.stack([gates[g] @ old for g in range(4)]), carry]
