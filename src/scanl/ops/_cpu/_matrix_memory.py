"""One recurrence for every matrix memory: decay the state, add a low-rank term, and write a value.

With P = S_{t-1}, d = e^g along rows, e = e^gv along columns and y = Pᵀ b, a step is S = d P e + a yᵀ + k vᵀ. It needs
two sums over the rows of P: y and Pᵀ (d q). They are summed while the step before writes P. So each step takes one pass
over a block of columns of S, which is in the first-level cache. The delta rule has a = -β k, b = d k, and β v for v;
linear attention has neither a nor b. With a bonus u, the output reads P itself, and its own step's value with weight u.
Backwards, with dS the gradient of S_t:

    dS += q doᵀ,  dv = dSᵀ k,  dy = dSᵀ a,  dk = dS v,  da = dS y,  db = P dy,  dg = d rowsum(dS ⊙ P e),  dq = S do,
    dS <- d dS e + b dyᵀ.

The backward pass recomputes the states P, CHUNK steps at a time, from the state stored at the start of each chunk. The
gradient of the decay is the sum of the terms that contain the decay. A running sum of q ⊙ dq - k ⊙ dk equals it and
needs no states, but its rounding error exceeds the gradients of strong decays.

Where one decay a head, or none, and the sizes allow it, `_matrix_chunks` has the faster form.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from scanl.ops._cpu import _matrix_chunks
from scanl.ops._cpu._columns import CHUNK, divide, load, store, summed, unit_of
from scanl.ops._cpu._columns import WIDTH as W
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill, move
from scanl.ops._cpu._slots import units
from scanl.ops._cpu._team import scratch
from scanl.ops._cpu._vectors import STRIP, emitted
from scanl.ops._frame.context import exactly

_HEAD = (
    "ranges sequences shared heads keys values head_parts column_parts rows longest reverse d_step d_head d_key kind "
    "columns q k v av a b g beta u scale state "
)

# Rows of x, W lanes each: values, y, output read from P, do, dv, dy; column decays and their gradient; do as it enters
# dS before the step, as it enters dS after the step, and as it multiplies P
V, Y, O, DO, DV, DY, E, DE, FIRST, LAST, SEEN, LANES = (n * W for n in range(12))
# Vectors of a step, at a constant stride, so that the compiler knows that they do not overlap
MAX_WIDTH = 512
STRIDE = MAX_WIDTH + 16
D, A, K, B, Q, DQ, U, STEP = (n * STRIDE for n in range(8))  # for two steps; then the sums of the backward pass
TO_K, TO_A, TO_B, TO_D, TO_Q, TO_U, VECTORS = (2 * STEP + n * STRIDE for n in range(7))
MIN_CHUNKED_KEYS = 192  # keys from which on the forward pass takes products over chunks
PREFETCHED_STEPS = 4  # steps between prefetching q, k, v and using them
PLAIN, BONUS, DELTA, GENERAL = range(4)  # kinds; the last two have a low-rank term
# Numbers after a step's first vector: q·a, q·k (weighted, with a bonus), y·do, v·do, the sum of dlog d, k·da, v·dv
QA, QK, Y_DO, V_DO, SUM_D, K_DA, V_DV = range(MAX_WIDTH, MAX_WIDTH + 7)


def _strip_of_pass(low_rank, columns):
    """Build the strip loop of `_pass`: for a low-rank term, for column decays, or for neither."""

    @emitted
    def strip(e, S, source, target, rows, c, previous, now, x, lane):
        v, y, decays = (e.read(e.at(x, n, lane)) for n in (V, Y, E))
        read_y, read_o = e.sums(2)
        with e.rows(rows) as i:
            row = e.builder.mul(i, i.type(W))
            d, a, k = (e.number_at(e.at(c, n, previous, i)) for n in (D, A, K))
            b, q = (e.number_at(e.at(c, n, now, i)) for n in (B, DQ))
            p = e.times(d, e.read(e.at(S, source, row, lane)))
            p = e.times(p, decays) if columns else e.add(p, a, y) if low_rank else p
            p = e.add(p, k, v)
            e.write(p, e.at(S, target, row, lane))
            if low_rank:
                e.add_to(read_y, b, p)
            e.add_to(read_o, q, p)
        e.keep(read_y, e.at(x, Y, lane))
        e.keep(read_o, e.at(x, O, lane))

    return strip


_pass_low_rank, _pass_columns, _pass_rows = (
    _strip_of_pass(True, False),
    _strip_of_pass(False, True),
    _strip_of_pass(False, False),
)


@helper(forceinline=True)
def _pass(S, source, target, keys, c, previous, now, size, x, kind, columns):
    """Finish the step whose vectors begin at `previous` in c, and read the state for the step at `now`.

    Read the state at `source` in S, apply the first step and write the result at `target`. x holds y and v of the first
    step; it receives y of the second step, and the part of its output that is read from the state.
    """
    for lane in range(0, size, STRIP // S.itemsize):
        if kind >= DELTA:
            _pass_low_rank(S, source, target, keys, c, previous, now, x, lane)
        elif columns:
            _pass_columns(S, source, target, keys, c, previous, now, x, lane)
        else:
            _pass_rows(S, source, target, keys, c, previous, now, x, lane)


@emitted
def _gather_strip(e, dS, rows, c, x, lane):
    do = e.read(e.at(x, DO, lane))
    dv, dy = e.sums(2)
    with e.rows(rows) as i:
        place = e.at(dS, e.builder.mul(i, i.type(W)), lane)
        q, k, a = (e.number_at(e.at(c, n, i)) for n in (Q, K, A))
        d = e.add(e.read(place), q, do)
        e.write(d, place)
        e.add_to(dv, k, d)
        e.add_to(dy, a, d)
    e.keep(dv, e.at(x, DV, lane))
    e.keep(dy, e.at(x, DY, lane))


@emitted
def _scatter_strip(e, P, at, dS, rows, c, x, lane):
    v, y, dy, do = (e.read(e.at(x, n, lane)) for n in (V, Y, DY, DO))
    with e.rows(rows, 4) as i:
        sums = {n: [] for n in (TO_K, TO_A, TO_B, TO_D, TO_Q)}
        for more in range(4):
            row = e.builder.mul(e.builder.add(i, i.type(more)), i.type(W))
            place = e.at(dS, row, lane)
            p, d = e.read(e.at(P, at, row, lane)), e.read(place)
            decay, b = (e.number_at(e.at(c, n + more, i)) for n in (D, B))
            decayed = e.times(decay, d)
            for n, pair in zip(sums, ((d, v), (d, y), (p, dy), (decayed, p), (p, do)), strict=True):
                sums[n].append(e.dot(*pair))
            e.write(e.add(decayed, b, dy), place)
        for n, four in sums.items():
            e.add_four(e.at(c, n, i), e.totals(four))


def _strip_of_back(bonus, columns):
    """Build the strip loop of `_step_back` without a low-rank term: no sum depends on another, so one pass suffices."""

    @emitted
    def strip(e, P, at, dS, rows, c, x, lane):
        v, do, decays, first, last, decayed_do = (e.read(e.at(x, n, lane)) for n in (V, DO, E, FIRST, LAST, SEEN))
        dv, of_decays = e.sums(2)
        with e.rows(rows, 4) as i:
            sums = {n: [] for n in (TO_K, TO_D, TO_Q)}
            for more in range(4):
                row = e.builder.mul(e.builder.add(i, i.type(more)), i.type(W))
                place = e.at(dS, row, lane)
                p, d = e.read(e.at(P, at, row, lane)), e.read(place)
                q, k, decay = (e.number_at(e.at(c, n + more, i)) for n in (Q, K, D))
                if not bonus:
                    d = e.add(d, q, first if columns else do)
                e.add_to(dv, k, d)
                gradient = e.times(decay, d)
                if columns:
                    e.add_to(of_decays, gradient, p)
                    gradient = e.times(gradient, decays)
                for n, pair in ((TO_K, (d, v)), (TO_Q, (p, decayed_do if columns else do))):
                    sums[n].append(e.dot(*pair))
                sums[TO_D].append(e.dot(gradient, p))
                if bonus or columns:
                    gradient = e.add(gradient, q, last if columns else do)
                e.write(gradient, place)
            for n, four in sums.items():
                e.add_four(e.at(c, n, i), e.totals(four))
        e.keep(dv, e.at(x, DV, lane))
        e.keep(of_decays, e.at(x, DE, lane))

    return strip


_back_rows, _back_bonus, _back_columns = (
    _strip_of_back(False, False),
    _strip_of_back(True, False),
    _strip_of_back(False, True),
)


@helper(forceinline=True)
def _step_back(P, at, dS, keys, c, size, x, kind, columns):
    """Write dv and the gradient of the column decays to x, and sums over columns to c; move dS to before the step."""
    fours = -(-keys // 4) * 4
    for i in range(fours):  # the last rows belong to no key but are summed too: clear them, as 0 times NaN is NaN
        c[TO_K + i] = c[TO_A + i] = c[TO_B + i] = c[TO_D + i] = c[TO_Q + i] = 0
    for lane in range(0, size, STRIP // dS.itemsize):
        if kind >= DELTA:
            _gather_strip(dS, keys, c, x, lane)
            _scatter_strip(P, at, dS, fours, c, x, lane)
        elif columns:
            _back_columns(P, at, dS, fours, c, x, lane)
        elif kind == BONUS:
            _back_bonus(P, at, dS, fours, c, x, lane)
        else:
            _back_rows(P, at, dS, fours, c, x, lane)


@emitted
def _settle_strip(e, c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane):
    is_delta, is_bonus, is_general = (e.builder.icmp_signed("==", kind, kind.type(n)) for n in (DELTA, BONUS, GENERAL))
    decay, a, q, k, u, to_k, to_a, to_b, to_d, to_q = (
        e.read(e.at(c, n, lane)) for n in (D, A, Q, K, U, TO_K, TO_A, TO_B, TO_D, TO_Q)
    )
    y_do, v_do = (e.number_at(e.at(c, n)) for n in (Y_DO, V_DO))
    grad_q = e.add(e.choose(is_bonus, to_q, e.times(decay, to_q)), a, y_do)
    grad_q = e.times(e.spread(scale), e.add(grad_q, e.times(u, k), v_do))
    decayed = e.times(decay, to_b)
    to_d = e.choose(is_delta, e.add(to_d, k, decayed), to_d)
    of_keys = e.add(e.add(to_k, decayed), e.spread(e.builder.fneg(weight)), to_a)
    of_keys = e.choose(is_delta, of_keys, e.choose(is_bonus, e.add(to_k, e.times(u, q), v_do), to_k))
    e.write(e.times(e.times(q, k), v_do), e.at(c, TO_U, lane))
    e.add_number(e.at(c, SUM_D), e.total(to_d))
    e.add_number(e.at(c, K_DA), e.total(e.times(k, to_a)))
    always, by_key = is_delta.type(1), e.is_set(d_key)
    for value, target, start, add, flag in (
        (grad_q, dq, t, add_t, always),
        (of_keys, dk, t, add_t, always),
        (to_a, da, row, add_row, is_general),
        (to_b, db, row, add_row, is_general),
        (to_d, dg, row, add_row, by_key),
    ):
        place = e.place_if(flag, target, start, lane, c)
        total = e.read_some(place, e.some(lane, keys, flag, e.is_set(add)))
        e.write_some(e.add(total, value), place, e.some(lane, keys, flag))


@helper(forceinline=True)
def _settle(c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row):
    """Write the gradients of q, k, a, b and the decay, from sums over columns; the delta rule adds a, b to k."""
    c[SUM_D] = c[K_DA] = 0
    for lane in range(0, keys, STRIP // c.itemsize):
        _settle_strip(c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane)


@emitted
def _step_strip(e, q, t, ahead, k, a, b, h, g, d, d_key, u, w, kind, scale, weight, keys, c, at, lane):
    is_delta, is_bonus, is_general = (e.builder.icmp_signed("==", kind, kind.type(n)) for n in (DELTA, BONUS, GENERAL))
    mask = e.some(lane, keys)
    query, key = (e.read_some(e.at(source, t, lane), mask) for source in (q, k))
    query = e.times(e.spread(scale), query)
    for source in (q, k):
        e.prefetch(e.at(source, ahead, lane))
    by_key, mask_of_each = e.is_set(d_key), e.some(lane, keys, e.is_set(d_key))
    decay = e.read_some(e.place_if(by_key, g, d, lane, c), mask_of_each, e.number_at(e.at(g, d)))
    decay = e.exp(decay) if e.item == 4 else e.read(e.at(c, D, at, lane))
    zero, general = e.times(query, e.spread(scale.type(0))), e.some(lane, keys, is_general)
    erase = e.choose(is_delta, e.times(e.spread(e.builder.fneg(weight)), key), zero)
    erase = e.read_some(e.place_if(is_general, a, h, lane, c), general, erase)
    find = e.read_some(e.place_if(is_general, b, h, lane, c), general, e.choose(is_delta, e.times(decay, key), zero))
    bonus = e.read_some(e.place_if(is_bonus, u, w, lane, c), e.some(lane, keys, is_bonus), e.spread(scale.type(1)))
    decayed_query = e.choose(is_bonus, query, e.times(decay, query))
    vectors = {D: decay, A: erase, K: key, B: find, Q: query, DQ: decayed_query, U: bonus}
    for n, value in vectors.items():
        e.write(value, e.at(c, n, at, lane))
    e.add_number(e.at(c, QA, at), e.total(e.times(query, erase)))
    e.add_number(e.at(c, QK, at), e.total(e.times(e.times(query, bonus), key)))


class _Sizes(NamedTuple):
    """The sizes that all loops of a kernel use, read from the slots once."""

    sequences: int
    shared: int  # heads of q and k
    heads: int
    keys: int
    values: int
    rows: int
    column_parts: int
    d_step: int  # strides of the decays
    d_head: int
    d_key: int
    kind: int
    columns: int  # whether there are column decays


class _FlatOperands(NamedTuple):
    """The operands as flat arrays; an absent operand has one element."""

    q: Any
    k: Any
    v: Any
    av: Any  # e^gv
    a: Any
    b: Any
    g: Any
    beta: Any
    u: Any
    scale: Any
    state: Any


class _Place(NamedTuple):
    """Indices at which the operands of a step begin, and its write strength."""

    r: int  # the step's row
    t: int  # q, k
    at: int  # v
    row: int  # a, b
    d: int  # decays
    w: int  # bonus
    weight: Any


@helper(forceinline=True)
def _sizes(slots):
    return _Sizes(
        slots.sequences, slots.shared, slots.heads, slots.keys, slots.values, slots.rows, slots.column_parts,
        slots.d_step, slots.d_head, slots.d_key, slots.kind, slots.columns,
    )  # fmt: skip


@helper(forceinline=True)
def _given(slots, dtype):
    rows, shared, heads, keys, values = slots.rows, slots.shared, slots.heads, slots.keys, slots.values
    return _FlatOperands(
        array(slots.q, rows * shared * keys, dtype),
        array(slots.k, rows * shared * keys, dtype),
        array(slots.v, rows * heads * values, dtype),
        array(slots.av, rows * heads * values, dtype),
        array(slots.a, rows * heads * keys, dtype),
        array(slots.b, rows * heads * keys, dtype),
        array(slots.g, rows * heads * keys, dtype),
        array(slots.beta, rows * heads, dtype),
        array(slots.u, heads * keys, dtype),
        array(slots.scale, 1, dtype)[0],
        array(slots.state, slots.sequences * heads * keys * values, dtype),
    )


@helper(forceinline=True)
def _place(sizes, operands, unit, h, first, i):
    """Return the indices of a unit's i-th step, for head h and its columns from `first` on."""
    r = unit.start + unit.direction * i
    weight = operands.beta[r * sizes.heads + h] if sizes.kind == DELTA else operands.beta[0]
    t, d = (r * sizes.shared + unit.shared_head) * sizes.keys, r * sizes.d_step + h * sizes.d_head
    at, row = (r * sizes.heads + h) * sizes.values + first, (r * sizes.heads + h) * sizes.keys
    return _Place(r, t, at, row, d, h * sizes.keys, weight)


@helper(forceinline=True)
def _step(sizes, operands, place, ahead, c, at):
    """Write the vectors of one step to c, from `at` on; prefetch q and k at distance `ahead`."""
    if c.itemsize == 8:  # there is no vector exp for float64
        for i in range(sizes.keys):
            c[at + D + i] = np.exp(operands.g[place.d + i] if sizes.d_key else operands.g[place.d])
    c[at + QA] = c[at + QK] = 0
    for lane in range(0, sizes.keys, STRIP // c.itemsize):
        _step_strip(
            operands.q, place.t, place.t + ahead, operands.k, operands.a, operands.b, place.row, operands.g, place.d,
            sizes.d_key, operands.u, place.w, sizes.kind, operands.scale, place.weight, sizes.keys, c, at, lane,
        )  # fmt: skip


def _decays_of_columns(e, av, columns, place, size, x, lane):
    """Load the column decays (1 if there are none) into x, for the `_pass` that writes this step."""
    one = e.spread(e.number(1))
    is_set = e.is_set(columns)
    decays = e.read_some(e.place_if(is_set, av, place, lane, x), e.some(lane, size, is_set), one)
    e.write(decays, e.at(x, E, lane))
    return decays


@emitted
def _output_strip(e, v, av, place, ahead, weight, size, x, c, at, kind, columns, out, lane):
    e.prefetch(e.at(v, ahead, lane))
    mask = e.some(lane, size)
    value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), mask))
    e.write(value, e.at(x, V, lane))
    decays = _decays_of_columns(e, av, columns, place, size, x, lane)
    output = e.read(e.at(x, O, lane))
    output = e.choose(e.builder.icmp_signed("==", kind, kind.type(BONUS)), output, e.times(output, decays))
    o = e.add(output, e.number_at(e.at(c, QA, at)), e.read(e.at(x, Y, lane)))
    e.write_some(e.add(o, e.number_at(e.at(c, QK, at)), value), e.at(out, place, lane), mask)


@helper(forceinline=True)
def _output(v, av, place, ahead, weight, size, x, c, at, kind, columns, out):
    """Load the values of the step for which `_pass` just read the state; write its output."""
    for lane in range(0, size, STRIP // x.itemsize):
        _output_strip(v, av, place, ahead, weight, size, x, c, at, kind, columns, out, lane)


@emitted
def _values_strip(e, v, av, place, ahead, weight, size, x, columns, ys, start, d_out, lane):
    _decays_of_columns(e, av, columns, place, size, x, lane)
    e.prefetch(e.at(v, ahead, lane))
    e.prefetch(e.at(d_out, place, lane))
    value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), e.some(lane, size)))
    e.write(value, e.at(x, V, lane))
    e.write(e.read(e.at(x, Y, lane)), e.at(ys, start, lane))


@helper(forceinline=True)
def _values(v, av, place, ahead, weight, size, x, columns, ys, start, d_out):
    """Load the values of the step for which `_pass` just read the state; store its y."""
    for lane in range(0, size, STRIP // x.itemsize):
        _values_strip(v, av, place, ahead, weight, size, x, columns, ys, start, d_out, lane)


@emitted
def _enter_strip(e, v, av, place, weight, size, x, c, kind, columns, ys, start, d_out, lane):
    mask = e.some(lane, size)
    value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), mask))
    y, do = e.read(e.at(ys, start, lane)), e.read_some(e.at(d_out, place, lane), mask)
    decays = _decays_of_columns(e, av, columns, place, size, x, lane)
    is_bonus, zero = e.builder.icmp_signed("==", kind, kind.type(BONUS)), e.times(do, e.spread(e.number(0)))
    first, last = e.choose(is_bonus, zero, do), e.choose(is_bonus, do, zero)
    decayed_do = e.choose(is_bonus, do, e.times(do, decays))
    for n, strip in ((V, value), (Y, y), (DO, do), (FIRST, first), (LAST, last), (SEEN, decayed_do)):
        e.write(strip, e.at(x, n, lane))
    e.add_number(e.at(c, Y_DO), e.total(e.times(y, do)))
    e.add_number(e.at(c, V_DO), e.total(e.times(value, do)))


@helper(forceinline=True)
def _enter(v, av, place, weight, size, x, c, kind, columns, ys, start, d_out):
    """Load v, y and the output gradient of a step, before its backward step."""
    c[Y_DO] = c[V_DO] = 0
    for lane in range(0, size, STRIP // x.itemsize):
        _enter_strip(v, av, place, weight, size, x, c, kind, columns, ys, start, d_out, lane)


@emitted
def _leave_strip(e, v, dv, dav, place, weight, size, x, c, kind, columns, lane):
    mask, total, do, decays, of_decays = e.some(lane, size), *(e.read(e.at(x, n, lane)) for n in (DV, DO, E, DE))
    with_bonus = e.add(total, e.number_at(e.at(c, QK)), do)
    total = e.choose(e.builder.icmp_signed("==", kind, kind.type(BONUS)), with_bonus, total)
    e.add_number(e.at(c, V_DV), e.total(e.times(e.read_some(e.at(v, place, lane), mask), total)))
    e.write_some(e.times(e.spread(weight), total), e.at(dv, place, lane), mask)
    is_set = e.is_set(columns)
    of_decays = e.times(decays, of_decays)
    e.write_some(of_decays, e.place_if(is_set, dav, place, lane, x), e.some(lane, size, is_set))


@helper(forceinline=True)
def _leave(v, dv, dav, place, weight, size, x, c, kind, columns):
    """Write the gradients of the values and of the column decays."""
    c[V_DV] = 0
    for lane in range(0, size, STRIP // x.itemsize):
        _leave_strip(v, dv, dav, place, weight, size, x, c, kind, columns, lane)


@helper(forceinline=True)
def _idle(keys, c, at):
    """Set the vectors at `at` for a step that neither changes nor reads the state."""
    for i in range(keys):
        c[at + D + i] = 1
        c[at + A + i] = c[at + K + i] = c[at + B + i] = c[at + DQ + i] = 0


@kernel(_HEAD + "out last")
def _forward(slots):
    dtype = slots.dtype
    ranges = array(slots.ranges, 2 * slots.sequences, np.int64)
    sizes, operands = _sizes(slots), _given(slots, dtype)
    heads, keys, values, kind, columns = sizes.heads, sizes.keys, sizes.values, sizes.kind, sizes.columns
    out, last = array(slots.out, operands.v.size, dtype), array(slots.last, operands.state.size, dtype)
    S, x, c = scratch(keys * W, dtype), scratch(LANES, dtype), scratch(2 * STEP, dtype)
    for number in units(slots):
        unit = unit_of(number, slots, ranges)
        next_t = PREFETCHED_STEPS * unit.direction * sizes.shared * keys
        next_at = PREFETCHED_STEPS * unit.direction * heads * values
        for pair in range(unit.heads * unit.columns):
            h, first = unit.head + pair // unit.columns, (unit.column + pair % unit.columns) * W
            size = min(W, values - first)
            corner = (unit.n * heads + h) * keys * values + first
            fill(S, 0, S.size, 0)
            fill(x, 0, x.size, 0)  # also the lanes without a column
            load(operands.state, corner, keys, values, size, S)
            previous, now = 0, STEP
            _idle(keys, c, previous)
            fill(x, E, W, 1)
            for i in range(unit.steps):
                place = _place(sizes, operands, unit, h, first, i)
                _step(sizes, operands, place, next_t, c, now)
                _pass(S, 0, 0, keys, c, previous, now, size, x, kind, columns)
                at = place.at
                _output(operands.v, operands.av, at, at + next_at, place.weight, size, x, c, now, kind, columns, out)
                previous, now = now, previous
            _idle(keys, c, now)
            _pass(S, 0, 0, keys, c, previous, now, size, x, kind, columns)
            store(S, keys, values, size, last, corner)


class _FlatGradients(NamedTuple):
    """The gradients as flat arrays. Where several parts of a head contribute to a gradient, each part has an array."""

    q: Any
    k: Any
    v: Any
    gv: Any
    a: Any
    b: Any
    g: Any
    beta: Any
    u: Any
    state: Any


class _Scratch(NamedTuple):
    """The scratch memory of a worker."""

    dS: Any  # the gradient of the state
    states: Any  # the states before each step of a chunk
    x: Any  # rows of lanes
    c: Any  # vectors of a step
    ys: Any  # y of each step of a chunk
    u_sums: Any  # the gradient of the bonus, summed over time


@helper(forceinline=True)
def _made(slots, operands, dtype):
    parts, column_parts = slots.head_parts * slots.column_parts, slots.column_parts
    return _FlatGradients(
        array(slots.dq, parts * operands.q.size, dtype),
        array(slots.dk, parts * operands.q.size, dtype),
        array(slots.dv, operands.v.size, dtype),
        array(slots.dgv, operands.v.size, dtype),
        array(slots.da, column_parts * operands.a.size, dtype),
        array(slots.db, column_parts * operands.a.size, dtype),
        array(slots.dg, column_parts * operands.a.size, dtype),
        array(slots.dbeta, column_parts * operands.beta.size, dtype),
        array(slots.du, column_parts * slots.sequences * operands.u.size, dtype),
        array(slots.dstate, operands.state.size, dtype),
    )


@helper(forceinline=True)
def _replay(sizes, operands, unit, h, first, size, begin, steps, back, block, do, memory):
    """Run `steps` steps forwards, from the first state in `memory`.

    If `back`, store the state before each step in `memory`. Otherwise overwrite it with the state after the last.
    """
    keys, kind, columns, c, x = sizes.keys, sizes.kind, sizes.columns, memory.c, memory.x
    next_t = PREFETCHED_STEPS * unit.direction * sizes.shared * keys
    next_at = PREFETCHED_STEPS * unit.direction * sizes.heads * sizes.values
    previous, now = 0, STEP
    _idle(keys, c, previous)
    fill(x, 0, Y + W, 0)
    fill(x, E, W, 1)
    for i in range(steps):
        place = _place(sizes, operands, unit, h, first, begin + i)
        _step(sizes, operands, place, next_t, c, now)
        _pass(
            memory.states,
            max(0, i - 1) * back * block,
            i * back * block,
            keys,
            c,
            previous,
            now,
            size,
            x,
            kind,
            columns,
        )
        at = place.at
        _values(operands.v, operands.av, at, at + next_at, place.weight, size, x, columns, memory.ys, i * W, do)
        previous, now = now, previous
    if not back:
        _idle(keys, c, now)
        _pass(memory.states, 0, 0, keys, c, previous, now, size, x, kind, columns)


@helper(forceinline=True)
def _step_gradients(sizes, operands, gradients, unit, h, first, size, i, index, pair, again, do, memory):
    """Go back through step i and write its gradients. index: the index of its state in the chunk."""
    keys, kind, columns, c, x = sizes.keys, sizes.kind, sizes.columns, memory.c, memory.x
    place = _place(sizes, operands, unit, h, first, i)
    _step(sizes, operands, place, 0, c, 0)
    _enter(operands.v, operands.av, place.at, place.weight, size, x, c, kind, columns, memory.ys, index * W, do)
    _step_back(memory.states, index * (-(-keys // 4) * 4 * W), memory.dS, keys, c, size, x, kind, columns)
    spot = (unit.share % sizes.column_parts * sizes.rows + place.r) * sizes.heads + h
    _settle(
        c, keys, operands.scale, place.weight, kind, sizes.d_key, gradients.q, gradients.k,
        unit.share * operands.q.size + place.t, pair > 0, gradients.a, gradients.b, gradients.g, spot * keys, again,
    )  # fmt: skip
    _leave(operands.v, gradients.v, gradients.gv, place.at, place.weight, size, x, c, kind, columns)
    if sizes.d_step and sizes.d_key == 0:
        gradients.g[spot] = c[SUM_D] + (gradients.g[spot] if again else 0)
    if kind == DELTA:
        gradients.beta[spot] = c[V_DV] - c[K_DA] + (gradients.beta[spot] if again else 0)
    if kind == BONUS:
        for m in range(keys):
            memory.u_sums[m] += c[TO_U + m]


@helper(forceinline=True)
def _sums_over_time(sizes, gradients, unit, h, again, constant, u_sums):
    """Write the gradients of a decay and a bonus that are constant over time."""
    keys = sizes.keys
    spot = (unit.share % sizes.column_parts * sizes.sequences + unit.n) * sizes.heads + h
    if sizes.d_step == 0:
        gradients.g[spot] = constant + (gradients.g[spot] if again else 0)
    if sizes.kind == BONUS:
        for m in range(keys):
            gradients.u[spot * keys + m] = u_sums[m] + (gradients.u[spot * keys + m] if again else 0)


@kernel(_HEAD + "do dlast dq dk dv dgv da db dg dbeta du dstate")
def _backward(slots):
    dtype = slots.dtype
    ranges = array(slots.ranges, 2 * slots.sequences, np.int64)
    sizes, operands = _sizes(slots), _given(slots, dtype)
    gradients, heads, keys, values = _made(slots, operands, dtype), sizes.heads, sizes.keys, sizes.values
    do, dlast = array(slots.do, operands.v.size, dtype), array(slots.dlast, operands.state.size, dtype)
    block = -(-keys // 4) * 4 * W  # rows are summed in groups of four
    S, starts = scratch(block, dtype), np.empty((slots.longest // CHUNK + 1) * block, dtype)
    dS, states, x, c = (
        scratch(block, dtype),
        scratch(CHUNK * block, dtype),
        scratch(LANES, dtype),
        scratch(VECTORS, dtype),
    )
    memory = _Scratch(dS, states, x, c, np.empty(CHUNK * W, dtype), np.empty(keys, np.float64))
    for number in units(slots):
        unit = unit_of(number, slots, ranges)
        chunks = (unit.steps + CHUNK - 1) // CHUNK
        for pair in range(unit.heads * unit.columns):
            h, first = unit.head + pair // unit.columns, (unit.column + pair % unit.columns) * W
            again = pair % unit.columns > 0  # an earlier block of columns of this head has written
            size = min(W, values - first)
            corner = (unit.n * heads + h) * keys * values + first
            constant = 0.0  # the gradient of a decay that is constant over time
            fill(S, 0, S.size, 0)
            fill(dS, 0, dS.size, 0)
            fill(x, 0, x.size, 0)
            fill(memory.u_sums, 0, memory.u_sums.size, 0)
            load(operands.state, corner, keys, values, size, S)
            load(dlast, corner, keys, values, size, dS)
            move(S, 0, block, starts, 0)
            for turn in range(2 * chunks - 1):
                # run forwards over all chunks but the last, storing each one's last state; then backwards over all
                back = turn >= chunks - 1
                chunk = 2 * chunks - 2 - turn if back else turn
                steps = min(CHUNK, unit.steps - chunk * CHUNK)
                move(starts, chunk * block, block, states, 0)
                _replay(sizes, operands, unit, h, first, size, chunk * CHUNK, steps, back, block, do, memory)
                if not back:
                    move(states, 0, block, starts, (chunk + 1) * block)
                    continue
                for i in range(steps - 1, -1, -1):
                    step = chunk * CHUNK + i
                    _step_gradients(sizes, operands, gradients, unit, h, first, size, step, i, pair, again, do, memory)
                    constant += c[SUM_D]
            store(dS, keys, values, size, gradients.state, corner)
            _sums_over_time(sizes, gradients, unit, h, again, constant, memory.u_sums)


@functools.lru_cache(512)
def _constant(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype)


def _operands(q, k, v, a, b, g, gv, u, beta, state, reverse, cu_seqlens, scale):
    """Return the division of the work, and the arguments of both kernels, by slot."""
    work = divide(v, q.shape[2], state, reverse, cu_seqlens)
    heads, keys = state.shape[1:3]
    # strides of g over steps, heads and keys; the first is 0 for a decay constant over time, and not 0 even if K is 0
    strides = [(0, 0, 0), (0, 1, 0), (), (heads, 1, 0), (heads * keys or 1, keys, 1)]
    d_step, d_head, d_key = strides[0 if g is None else g.ndim]
    kind = GENERAL if a is not None else DELTA if beta is not None else BONUS if u is not None else PLAIN
    one = _constant(1, v.dtype)
    operands = {"q": q, "k": k, "v": v, "av": None if gv is None else gv.exp(), "a": a, "b": b, "beta": beta, "u": u}
    return work, {
        **work.slots,
        **{name: one if value is None else value.contiguous() for name, value in operands.items()},
        "g": _constant(0, v.dtype) if g is None else g.contiguous(),
        "scale": _constant(1 / max(1, keys) ** 0.5 if scale is None else scale, v.dtype),
        "state": state.contiguous(),
        "d_step": d_step,
        "d_head": d_head,
        "d_key": d_key,
        "kind": kind,
        "columns": gv is not None,
    }


def _in_chunks(slots, g, gv, work, *, back):
    """Return whether products over chunks of steps are faster than the recurrence (docs/matrix_memory.md).

    They need one decay a head at most, and no bonus. A short sequence is not worth them. Forwards the recurrence is as
    fast while a block of columns of the state fits the first-level cache, unless much of its last block is empty.
    """
    if slots["kind"] not in (PLAIN, DELTA) or gv is not None or (g is not None and g.ndim == 4):
        return False
    keys, values = work.slots["keys"], work.slots["values"]
    empty_columns = -values % W - -values % (W // 4)  # products have whole vectors instead of whole blocks
    wasteful = keys >= W < values and 4 * empty_columns >= values + -values % W
    return work.slots["longest"] > CHUNK and (back or keys >= MIN_CHUNKED_KEYS or wasteful)


def run_forward(q, k, v, state, reverse, cu_seqlens, scale, *, a=None, b=None, g=None, gv=None, u=None, beta=None):
    """Return y and the last state: `dplr_scan` with a and b, the delta rule with beta, else linear attention."""
    work, slots = _operands(q, k, v, a, b, g, gv, u, beta, state, reverse, cu_seqlens, scale)
    y, last = empty(v.shape, v.dtype), empty(state.shape, state.dtype)
    results, elements = {"out": y, "last": last}, v.numel() * state.shape[2]
    if not exactly() and _in_chunks(slots, g, gv, work, back=False):
        delta = {"delta": int(slots["kind"] == DELTA)}
        _matrix_chunks.run_forward(work, {**slots, **results, **delta}, elements)
    else:
        _forward.run(v.dtype, _forward.pack(**slots, **results), work.units, elements)
    return y, last


def run_backward(
    dy, dlast, q, k, v, state, reverse, cu_seqlens, scale, *, a=None, b=None, g=None, gv=None, u=None, beta=None
):
    """Return the gradient of every operand that is not None, by name."""
    work, slots = _operands(q, k, v, a, b, g, gv, u, beta, state, reverse, cu_seqlens, scale)
    parts, columns, sequences = work.head_parts * work.column_parts, work.column_parts, len(work.ranges)
    heads, keys = state.shape[1:3]
    constant = g is None or g.ndim == 1
    of_decays = (sequences, heads) if g is None or g.ndim == 1 else tuple(g.shape)

    def some(operand, *shape):
        return empty(shape if operand is not None else (0,), v.dtype)

    grads = {
        "q": empty((parts, *q.shape), q.dtype),
        "k": empty((parts, *k.shape), k.dtype),
        "v": empty(v.shape, v.dtype),
        "gv": some(gv, *v.shape),
        "a": some(a, columns, *v.shape[:3], keys),
        "b": some(b, columns, *v.shape[:3], keys),
        "g": empty((columns, *of_decays), v.dtype),
        "beta": some(beta, columns, *v.shape[:3]),
        "u": some(u, columns * sequences, heads, keys),
        "state": empty(state.shape, state.dtype),
    }
    gradients = {f"d{name}": grad for name, grad in grads.items()}
    gradients |= {"do": dy.contiguous(), "dlast": dlast.contiguous()}
    elements = 4 * v.numel() * keys
    if _in_chunks(slots, g, gv, work, back=True):
        delta = {"delta": int(slots["kind"] == DELTA)}
        _matrix_chunks.run_backward(work, {**slots, **gradients, **delta}, elements)
    else:
        _backward.run(v.dtype, _backward.pack(**slots, **gradients), work.units, elements)
    for name in ("q", "k", "a", "b", "beta", "u"):
        grads[name] = summed(grads[name])
    grads["g"] = grads["g"].sum((0, 1)) if constant else summed(grads["g"])
    return grads
