"""The weighted average as fused loops over rows of channels, with p, z and m in float64 for every operand dtype.

With gap = k - (m + w), one of the two weights of a step is 1 and the other is e^-|gap|. So a step takes one
exponential, and one more with a bonus, in the operands' dtype. Sums over time are float64, and the past's weight a is
stored as 1 - a. So a sum of a million terms, or a decay of 1e-6 per step, is as exact as its terms.

The backward pass stores (p, z, m) every CHUNK steps and recomputes the weights in between once. It carries P and Z, the
gradients of p and z at fixed m. They are e^m times the gradients of the true numerator and denominator, so they do not
grow. It also carries M, the gradient of m, which goes to k or to the past, whichever is larger. With a, b the weights
of the past and the current step, each step computes

    dv = b P,  dk = b (P v + Z) + M [b > a],  dw = a (P p + Z z) + M [a > b],  P = a P,  Z = a Z,  M = M [a > b]

with p, z from before the step. An output o = (A p + B v) / D, with g = do / D, adds A g to P, -A g o to Z, B g to dv
and B g (v - o) to dk and du. Without a bonus A = a and B = b.
"""

import math

import numpy as np
import torch

from scanl.ops._cpu._cells import blocks, longest, piece, rows, sequences
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import move
from scanl.ops._cpu._slots import channels, itemsize, units
from scanl.ops._frame.context import exactly

_HEAD, _ROWS = "ranges sequences width count size reverse bonus state", "k v decay"

WIDTH = 128  # channels at a time; constant, so that the compiler knows that rows in scratch do not overlap
CHUNK = 32  # steps between the states that the backward pass stores
LOWEST_LOG = -1e308  # replaces -inf, so that no difference is NaN

# Rows of WIDTH in the float64 scratch, and in the scratch of the operands' dtype
P, Z, M, DP, DZ, DM, DW, DU = (n * WIDTH for n in range(8))
LOST, NEW, READ_A, READ_B = (n * WIDTH for n in range(4))  # a step's weights; the rows below overwrite them
TO_K, TO_V, TO_W = (n * WIDTH for n in range(3))

_FLAGS = {"forceinline": True, "error_model": "numpy"}


@helper(**_FLAGS)
def _weigh(k, w, s, c):
    """Write the weight of the current step and 1 minus the weight of the past; update m. NaN or +inf makes all NaN."""
    kind = c.dtype.type
    one, zero, near = kind(1), kind(0), kind(0.0625 if c.itemsize == 4 else 0)
    half, third, fourth, fifth = kind(1 / 2), kind(1 / 3), kind(1 / 4), kind(1 / 5)
    for i in range(k.size):
        old = s[M + i] + w[i]
        old = LOWEST_LOG if old < LOWEST_LOG else old
        gap = k[i] - old
        good = k[i] < math.inf and old < math.inf
        far = c.dtype.type(abs(gap))
        small = exp(-far)
        lost = far * (one - half * far * (one - third * far * (one - fourth * far * (one - fifth * far))))
        lost = lost if far < near else one - small
        lost = lost if gap > 0 else zero
        c[LOST + i] = lost if old > LOWEST_LOG else one
        new = one if gap > 0 else small
        c[NEW + i] = new if good else kind(math.nan)
        highest = np.float64(k[i]) if gap > 0 else old
        s[M + i] = highest if good else math.nan


@helper(**_FLAGS)
def _weigh_bonus(k, u, s, c):
    """Write the weights of the output with a bonus, which is read before the step is written."""
    one, zero, nan = c.dtype.type(1), c.dtype.type(0), c.dtype.type(math.nan)
    for i in range(k.size):
        now = k[i] + np.float64(u[i])
        gap = now - s[M + i]
        small = exp(c.dtype.type(-abs(gap)))
        past = small if gap > 0 else one
        c[READ_A + i] = past if s[M + i] > LOWEST_LOG else zero
        present = one if gap > 0 else small
        c[READ_B + i] = present if now < math.inf and s[M + i] < math.inf else nan


@helper(**_FLAGS)
def _write(v, s, c):
    for i in range(v.size):
        old, new = 1.0 - c[LOST + i], np.float64(c[NEW + i])
        s[P + i] = old * s[P + i] + new * v[i]
        s[Z + i] = old * s[Z + i] + new


@helper(**_FLAGS)
def _output(s, o):
    for i in range(o.size):
        z = s[Z + i]
        o[i] = s[P + i] / (z if z != 0 else 1.0)


@helper(**_FLAGS)
def _output_bonus(v, s, c, o):
    for i in range(o.size):
        a, b = np.float64(c[READ_A + i]), np.float64(c[READ_B + i])
        z = a * s[Z + i] + b
        o[i] = (a * s[P + i] + b * v[i]) / (z if z != 0 else 1.0)


@helper(**_FLAGS)
def _backward_row(do, v, s, x, c):
    """Go back one step without a bonus. The gradients overwrite the weights in c."""
    for i in range(do.size):
        a, b, p, z = 1.0 - c[LOST + i], np.float64(c[NEW + i]), x[P + i], x[Z + i]
        denominator = a * z + b
        inverse = 1.0 / (denominator if denominator != 0 else 1.0)
        g = do[i] * inverse
        to_p = s[DP + i] + g
        to_z = s[DZ + i] - g * (a * p + b * v[i]) * inverse
        key = 1.0 if b > a else 0.0
        key = 0.5 if b == a else key
        c[TO_K + i] = b * (to_p * v[i] + to_z) + key * s[DM + i]
        c[TO_V + i] = b * to_p
        to_w = a * (to_p * p + to_z * z) + (1.0 - key) * s[DM + i]
        c[TO_W + i] = to_w
        s[DW + i] += to_w
        s[DM + i] *= 1.0 - key
        s[DP + i] = a * to_p
        s[DZ + i] = a * to_z


@helper(**_FLAGS)
def _backward_row_bonus(do, v, s, x, c):
    for i in range(do.size):
        a, b, p, z = 1.0 - c[LOST + i], np.float64(c[NEW + i]), x[P + i], x[Z + i]
        read_a, read_b = np.float64(c[READ_A + i]), np.float64(c[READ_B + i])
        inverse = read_a * z + read_b
        inverse = 1.0 / (inverse if inverse != 0 else 1.0)
        g = do[i] * inverse
        o = (read_a * p + read_b * v[i]) * inverse
        to_u = read_b * g * (v[i] - o)
        to_p, to_z = s[DP + i], s[DZ + i]
        key = 1.0 if b > a else 0.0
        key = 0.5 if b == a else key
        c[TO_K + i] = b * (to_p * v[i] + to_z) + key * s[DM + i] + to_u
        c[TO_V + i] = b * to_p + read_b * g
        to_w = a * (to_p * p + to_z * z) + (1.0 - key) * s[DM + i]
        c[TO_W + i] = to_w
        s[DW + i] += to_w
        s[DU + i] += to_u
        s[DM + i] *= 1.0 - key
        s[DP + i] = a * to_p + read_a * g
        s[DZ + i] = a * to_z - read_a * g * o


@helper(forceinline=True)
def _of_step(scratch, count, step):
    """Return the rows of one step as an array: offsets in the indices would hide from LLVM that rows are disjoint."""
    return scratch[step * count * WIDTH : (step + 1) * count * WIDTH]


@helper(forceinline=True)
def _put(source, start, target):
    for i in range(target.size):
        target[i] = source[start + i]


@helper(**_FLAGS)
def _start(state, step, size, s):
    for i in range(size):
        s[P + i] = state[i]
        s[Z + i] = state[step + i]
        m = np.float64(state[2 * step + i])
        s[M + i] = LOWEST_LOG if m < LOWEST_LOG else m


@helper(**_FLAGS)
def _finish(s, size, state, step):
    """Write the state in the operands' dtype; scale p and z by m as rounded to that dtype."""
    for i in range(size):
        m = state.dtype.type(-math.inf if s[M + i] <= LOWEST_LOG else s[M + i])
        state[2 * step + i] = m
        factor = exp(s[M + i] - m) if m > LOWEST_LOG else 1.0
        state[i] = s[P + i] * factor
        state[step + i] = s[Z + i] * factor


@kernel(_HEAD + " o o_batch round", rows=_ROWS)
def _forward(slots):
    dtype = slots.dtype
    item = itemsize(dtype)
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    width = slots.width
    w, u = slots.decay, slots.bonus
    s, c = np.zeros(3 * WIDTH, np.float64), np.zeros(4 * WIDTH, dtype)
    for unit in units(slots):
        n, b, begin, end, channel, size = piece(ranges, unit, slots.count, slots.size, width)
        carry = array(slots.state + item * (3 * n * width + channel), 2 * width + size, dtype)
        us = array(u + item * channel, size, dtype)
        _start(carry, width, size, s)
        for i in range(end - begin):
            t = end - 1 - i if slots.reverse else begin + i
            ks = channels(slots.k, b, t, channel, size, dtype)
            vs = channels(slots.v, b, t, channel, size, dtype)
            ws = channels(w, b, t, channel, size, dtype)
            os = array(slots.o + item * (b * slots.o_batch + t * width + channel), size, dtype)
            if u != 0:
                _weigh_bonus(ks, us, s, c)
                _output_bonus(vs, s, c, os)
            _weigh(ks, ws, s, c)
            _write(vs, s, c)
            if u == 0:
                _output(s, os)
            if slots.round != 0:  # what a state between two calls would be
                _finish(s, size, carry, width)
                _start(carry, width, size, s)
        if end > begin:
            _finish(s, size, carry, width)


@kernel(_HEAD + " out_batch dk dv dw du dw_time carries", rows=_ROWS + " do")
def _backward(slots):
    dtype = slots.dtype
    item = itemsize(dtype)
    total = slots.sequences
    ranges = array(slots.ranges, 3 * total, np.int64)
    width = slots.width
    w, u = slots.decay, slots.bonus
    limit = longest(ranges, 0, total)
    s, xs = np.zeros(8 * WIDTH, np.float64), np.zeros(CHUNK * 2 * WIDTH, np.float64)
    saved, cs = np.empty((limit // CHUNK + 1) * 3 * WIDTH, np.float64), np.zeros(CHUNK * 4 * WIDTH, dtype)
    c = _of_step(cs, 4, 0)
    for unit in units(slots):
        n, b, begin, end, channel, size = piece(ranges, unit, slots.count, slots.size, width)
        steps = end - begin
        carry = array(slots.carries + item * (3 * n * width + channel), 2 * width + size, dtype)
        us = array(u + item * channel, size, dtype)
        _start(array(slots.state + item * (3 * n * width + channel), 2 * width + size, dtype), width, size, s)
        for i in range(steps):
            if i % CHUNK == 0:
                move(s, 0, 3 * WIDTH, saved, i // CHUNK * 3 * WIDTH)
            t = end - 1 - i if slots.reverse else begin + i
            ks = channels(slots.k, b, t, channel, size, dtype)
            vs = channels(slots.v, b, t, channel, size, dtype)
            ws = channels(w, b, t, channel, size, dtype)
            _weigh(ks, ws, s, c)
            _write(vs, s, c)
        for i in range(size):
            s[DP + i], s[DZ + i] = carry[i], carry[width + i]
            s[DM + i] = carry[2 * width + i] - s[DP + i] * s[P + i] - s[DZ + i] * s[Z + i]
            s[DW + i] = s[DU + i] = 0
        for chunk in range((steps - 1) // CHUNK, -1, -1):
            first = chunk * CHUNK
            move(saved, chunk * 3 * WIDTH, 3 * WIDTH, s, 0)
            for i in range(first, min(first + CHUNK, steps)):
                t = end - 1 - i if slots.reverse else begin + i
                ks = channels(slots.k, b, t, channel, size, dtype)
                vs = channels(slots.v, b, t, channel, size, dtype)
                ws = channels(w, b, t, channel, size, dtype)
                x, c = _of_step(xs, 2, i - first), _of_step(cs, 4, i - first)
                move(s, 0, 2 * WIDTH, x, 0)
                if u != 0:
                    _weigh_bonus(ks, us, s, c)
                _weigh(ks, ws, s, c)
                _write(vs, s, c)
            for i in range(min(first + CHUNK, steps) - 1, first - 1, -1):
                t = end - 1 - i if slots.reverse else begin + i
                dos = channels(slots.do, b, t, channel, size, dtype)
                vs = channels(slots.v, b, t, channel, size, dtype)
                x, c = _of_step(xs, 2, i - first), _of_step(cs, 4, i - first)
                if u != 0:
                    _backward_row_bonus(dos, vs, s, x, c)
                else:
                    _backward_row(dos, vs, s, x, c)
                to = item * (b * slots.out_batch + t * width + channel)
                _put(c, TO_K, array(slots.dk + to, size, dtype))
                _put(c, TO_V, array(slots.dv + to, size, dtype))
                if slots.dw_time:
                    _put(c, TO_W, array(slots.dw + to, size, dtype))
        _start(array(slots.state + item * (3 * n * width + channel), 2 * width + size, dtype), width, size, s)
        for i in range(size):
            carry[2 * width + i] = s[DM + i] + s[DP + i] * s[P + i] + s[DZ + i] * s[Z + i]
            carry[i], carry[width + i] = s[DP + i], s[DZ + i]
        if slots.dw_time == 0:
            _put(s, DW, array(slots.dw + item * (n * width + channel), size, dtype))
        _put(s, DU, array(slots.du + item * (n * width + channel), size, dtype))


def _inputs(k, v, decay, bonus, state, reverse, cu_seqlens):
    """Return the arguments of both kernels, by slot, and the number of units."""
    ranges = sequences(k, cu_seqlens, "weighted_average")
    width = k.shape[2]
    decay = k.new_zeros(width) if decay is None else decay
    count, size = blocks(len(ranges), width)
    if size > WIDTH:
        count, size = -(-width // WIDTH), WIDTH
    head = {"ranges": ranges, "sequences": len(ranges), "width": width, "count": count, "size": size}
    head |= {"reverse": reverse, "state": state, "bonus": None if bonus is None else bonus.contiguous()}
    return {**head, "k": rows(k), "v": rows(v), "decay": rows(decay.expand(k.shape))}, len(ranges) * count


def forward(k, v, decay, bonus, state, reverse, cu_seqlens):
    last, o = state.clone(memory_format=torch.contiguous_format), empty(k.shape, k.dtype)
    head, units = _inputs(k, v, decay, bonus, last, reverse, cu_seqlens)
    _forward.run(k.dtype, _forward.pack(**head, o=o, o_batch=o.stride(0), round=exactly()), units, k.numel() * 4)
    return o, last


def backward(do, dlast, k, v, decay, bonus, state, reverse, cu_seqlens):
    do, state = rows(do), state.contiguous()
    head, units = _inputs(k, v, decay, bonus, state, reverse, cu_seqlens)
    dk, dv = empty(k.shape, k.dtype), empty(k.shape, k.dtype)
    timed = decay is not None and decay.ndim == 3
    dw = empty(k.shape, k.dtype) if timed else k.new_empty(len(state), k.shape[2])
    du = k.new_empty(len(state), k.shape[2])
    carry = dlast.clone(memory_format=torch.contiguous_format)
    slots = _backward.pack(
        **head, do=do, out_batch=dk.stride(0), dk=dk, dv=dv, dw=dw, du=du, dw_time=timed, carries=carry
    )
    _backward.run(k.dtype, slots, units, k.numel() * 8)
    gradients = [dk, dv]
    if decay is not None:
        gradients.append(dw if timed else dw.sum(0))
    if bonus is not None:
        gradients.append(du.sum(0))
    return [*gradients, carry]
