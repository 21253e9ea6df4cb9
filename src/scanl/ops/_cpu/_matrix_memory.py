"""The recurrence of every matrix memory as itself: decay, a term of low rank, and what is written.

With P = S_{t-1}, d = e^g along rows, e = e^gv along columns and y = Pᵀ b, a step is S = d P e + a yᵀ + k vᵀ. What is
read of P, y and Pᵀ (d q), is summed while the step before is written, so each step takes one pass over a block of
columns of S, in the first-level cache. The delta rule has a = -β k, b = d k and β v for v; linear attention has
neither a nor b. A bonus u reads P itself, and the present step with weight u. Backwards, dS being the gradient of S_t:

    dS += q doᵀ,  dv = dSᵀ k,  dy = dSᵀ a,  dk = dS v,  da = dS y,  db = P dy,  dg = d rowsum(dS ⊙ P e),  dq = S do,
    dS <- d dS e + b dyᵀ.

The states P are recomputed, CHUNK steps at a time, from one kept at the start of every chunk. The gradient of the
decay is the sum of the terms in which it stands: the sum of q ⊙ dq - k ⊙ dk, which needs no states, loses the
gradients of strong decays in its rounding.
"""

# pyright: reportCallIssue=false
# Of an intrinsic's arguments numba fills in the first.

import functools

import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic

from scanl.ops._cpu._columns import CHUNK, divide, load, share, store, summed
from scanl.ops._cpu._columns import WIDTH as W
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import Slots, view
from scanl.ops._cpu._team import Kernel, array, scratch, take
from scanl.ops._cpu._vectors import STRIP, Emitter

_HEAD = (
    "ranges sequences shared heads keys values head_parts column_parts rows longest reverse d_step d_head d_key kind "
    "columns q k v av a b g beta u scale state "
)
FORWARD = Slots(_HEAD + "out last")
BACKWARD = Slots(_HEAD + "do dlast dq dk dv dgv da db dg dbeta du dstate")

# Lanes: values, y, read of P, do, dv, dy; decays of columns and their gradient; do as it enters dS before and after the
# step, and as P sees it
V, Y, O, DO, DV, DY, E, DE, FIRST, LAST, SEEN, LANES = (n * W for n in range(12))
# Vectors of a step, a constant number of elements apart so that they are known not to overlap
MOST = 512
STRIDE = MOST + 16
D, A, K, B, Q, DQ, U, STEP = (n * STRIDE for n in range(8))  # two such steps, then the sums of the backward pass
TO_K, TO_A, TO_B, TO_D, TO_Q, TO_U, VECTORS = (2 * STEP + n * STRIDE for n in range(7))
AHEAD = 4  # steps
PLAIN, BONUS, DELTA, GENERAL = range(4)  # kinds; the last two have a term of low rank
# Numbers behind a step's first vector: q·a, q·k (with a bonus, weighed), y·do, v·do, the sum of dlog d, k·da, v·dv
QA, QK, Y_DO, V_DO, SUM_D, K_DA, V_DV = range(MOST, MOST + 7)


def _strip_of_pass(low_rank, columns):
    """Write the step before, and read the next; with a term of low rank, with decays of columns, or with neither."""

    @intrinsic
    def strip(typingctx, S, source, target, rows, c, before, now, x, lane):
        def codegen(context, builder, signature, arguments):
            e = Emitter(context, builder, signature, arguments)
            S, source, target, rows, c, before, now, x, lane = e.values
            v, y, decays = (e.read(e.at(x, n, lane)) for n in (V, Y, E))
            read_y, read_o = e.sums(2)
            with e.rows(rows) as i:
                row = builder.mul(i, i.type(W))
                d, a, k = (e.number_at(e.at(c, n, before, i)) for n in (D, A, K))
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
            return context.get_dummy_value()

        n = types.int64
        return types.void(S, n, n, n, c, n, n, x, n), codegen

    return strip


_pass_low_rank, _pass_columns, _pass_rows = (
    _strip_of_pass(True, False),
    _strip_of_pass(False, True),
    _strip_of_pass(False, False),
)


@njit(forceinline=True)
def _pass(S, source, target, keys, c, before, now, size, x, kind, columns):
    """Write the step before, and read the next, whose vectors begin there in c: its y takes the place of the last."""
    for lane in range(0, size, STRIP // S.itemsize):
        if kind >= DELTA:
            _pass_low_rank(S, source, target, keys, c, before, now, x, lane)
        elif columns:
            _pass_columns(S, source, target, keys, c, before, now, x, lane)
        else:
            _pass_rows(S, source, target, keys, c, before, now, x, lane)


@intrinsic
def _gather_strip(typingctx, dS, rows, c, x, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        dS, rows, c, x, lane = e.values
        do = e.read(e.at(x, DO, lane))
        dv, dy = e.sums(2)
        with e.rows(rows) as i:
            place = e.at(dS, builder.mul(i, i.type(W)), lane)
            q, k, a = (e.number_at(e.at(c, n, i)) for n in (Q, K, A))
            d = e.add(e.read(place), q, do)
            e.write(d, place)
            e.add_to(dv, k, d)
            e.add_to(dy, a, d)
        e.keep(dv, e.at(x, DV, lane))
        e.keep(dy, e.at(x, DY, lane))
        return context.get_dummy_value()

    return types.void(dS, types.int64, c, x, types.int64), codegen


@intrinsic
def _scatter_strip(typingctx, P, at, dS, rows, c, x, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        P, at, dS, rows, c, x, lane = e.values
        v, y, dy, do = (e.read(e.at(x, n, lane)) for n in (V, Y, DY, DO))
        with e.rows(rows, 4) as i:
            sums = {n: [] for n in (TO_K, TO_A, TO_B, TO_D, TO_Q)}
            for more in range(4):
                row = builder.mul(builder.add(i, i.type(more)), i.type(W))
                place = e.at(dS, row, lane)
                p, d = e.read(e.at(P, at, row, lane)), e.read(place)
                decay, b = (e.number_at(e.at(c, n + more, i)) for n in (D, B))
                before = e.times(decay, d)
                for n, pair in zip(sums, ((d, v), (d, y), (p, dy), (before, p), (p, do)), strict=True):
                    sums[n].append(e.dot(*pair))
                e.write(e.add(before, b, dy), place)
            for n, four in sums.items():
                e.add_four(e.at(c, n, i), e.totals(four))
        return context.get_dummy_value()

    n = types.int64
    return types.void(P, n, dS, n, c, x, n), codegen


def _strip_of_back(bonus, columns):
    """A step back where there is no term of low rank: nothing has to be known before the rest, so in one pass."""

    @intrinsic
    def strip(typingctx, P, at, dS, rows, c, x, lane):
        def codegen(context, builder, signature, arguments):
            e = Emitter(context, builder, signature, arguments)
            P, at, dS, rows, c, x, lane = e.values
            v, do, decays, first, last, seen = (e.read(e.at(x, n, lane)) for n in (V, DO, E, FIRST, LAST, SEEN))
            dv, of_decays = e.sums(2)
            with e.rows(rows, 4) as i:
                sums = {n: [] for n in (TO_K, TO_D, TO_Q)}
                for more in range(4):
                    row = builder.mul(builder.add(i, i.type(more)), i.type(W))
                    place = e.at(dS, row, lane)
                    p, d = e.read(e.at(P, at, row, lane)), e.read(place)
                    q, k, decay = (e.number_at(e.at(c, n + more, i)) for n in (Q, K, D))
                    if not bonus:
                        d = e.add(d, q, first if columns else do)
                    e.add_to(dv, k, d)
                    before = e.times(decay, d)
                    if columns:
                        e.add_to(of_decays, before, p)
                        before = e.times(before, decays)
                    for n, pair in ((TO_K, (d, v)), (TO_Q, (p, seen if columns else do))):
                        sums[n].append(e.dot(*pair))
                    sums[TO_D].append(e.dot(before, p))
                    if bonus or columns:
                        before = e.add(before, q, last if columns else do)
                    e.write(before, place)
                for n, four in sums.items():
                    e.add_four(e.at(c, n, i), e.totals(four))
            e.keep(dv, e.at(x, DV, lane))
            e.keep(of_decays, e.at(x, DE, lane))
            return context.get_dummy_value()

        n = types.int64
        return types.void(P, n, dS, n, c, x, n), codegen

    return strip


_back_rows, _back_bonus, _back_columns = (
    _strip_of_back(False, False),
    _strip_of_back(True, False),
    _strip_of_back(False, True),
)


@njit(forceinline=True)
def _step_back(P, at, dS, keys, c, size, x, kind, columns):
    """dv, the gradient of the columns' decays, and the sums over columns; then the gradient before the step."""
    fours = -(-keys // 4) * 4
    for i in range(fours):  # the last are of no key, and yet are summed: zero times NaN would outlive its sequence
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


@intrinsic
def _settle_strip(typingctx, c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane = e.values
        is_delta, is_bonus, is_general = (
            builder.icmp_signed("==", kind, kind.type(n)) for n in (DELTA, BONUS, GENERAL)
        )
        decay, a, q, k, u, to_k, to_a, to_b, to_d, to_q = (
            e.read(e.at(c, n, lane)) for n in (D, A, Q, K, U, TO_K, TO_A, TO_B, TO_D, TO_Q)
        )
        y_do, v_do = (e.number_at(e.at(c, n)) for n in (Y_DO, V_DO))
        grad_q = e.add(e.choose(is_bonus, to_q, e.times(decay, to_q)), a, y_do)
        grad_q = e.times(e.spread(scale), e.add(grad_q, e.times(u, k), v_do))
        decayed = e.times(decay, to_b)
        to_d = e.choose(is_delta, e.add(to_d, k, decayed), to_d)
        of_keys = e.add(e.add(to_k, decayed), e.spread(builder.fneg(weight)), to_a)
        of_keys = e.choose(is_delta, of_keys, e.choose(is_bonus, e.add(to_k, e.times(u, q), v_do), to_k))
        e.write(e.times(e.times(q, k), v_do), e.at(c, TO_U, lane))
        e.add_number(e.at(c, SUM_D), e.total(to_d))
        e.add_number(e.at(c, K_DA), e.total(e.times(k, to_a)))
        always, each = is_delta.type(1), e.is_set(d_key)
        for value, target, start, add, flag in (
            (grad_q, dq, t, add_t, always),
            (of_keys, dk, t, add_t, always),
            (to_a, da, row, add_row, is_general),
            (to_b, db, row, add_row, is_general),
            (to_d, dg, row, add_row, each),
        ):
            place = e.place_if(flag, target, start, lane, c)
            before = e.read_some(place, e.some(lane, keys, flag, e.is_set(add)))
            e.write_some(e.add(before, value), place, e.some(lane, keys, flag))
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, scale, weight, n, n, dq, dk, n, n, da, db, dg, n, n, n), codegen


@njit(forceinline=True)
def _settle(c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row):
    """The gradients of a step's keys from the sums over columns; the delta rule's own a and b are of k."""
    c[SUM_D] = c[K_DA] = 0
    for lane in range(0, keys, STRIP // c.itemsize):
        _settle_strip(c, keys, scale, weight, kind, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane)


@intrinsic
def _step_strip(typingctx, q, t, ahead, k, a, b, h, g, d, d_key, u, w, kind, scale, weight, keys, c, at, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        q, t, ahead, k, a, b, h, g, d, d_key, u, w, kind, scale, weight, keys, c, at, lane = e.values
        is_delta, is_bonus, is_general = (
            builder.icmp_signed("==", kind, kind.type(n)) for n in (DELTA, BONUS, GENERAL)
        )
        mask = e.some(lane, keys)
        query, key = (e.read_some(e.at(source, t, lane), mask) for source in (q, k))
        query = e.times(e.spread(scale), query)
        for source in (q, k):
            e.prefetch(e.at(source, ahead, lane))
        each, mask_of_each = e.is_set(d_key), e.some(lane, keys, e.is_set(d_key))
        decay = e.read_some(e.place_if(each, g, d, lane, c), mask_of_each, e.number_at(e.at(g, d)))
        decay = e.exp(decay) if e.item == 4 else e.read(e.at(c, D, at, lane))
        zero, general = e.times(query, e.spread(scale.type(0))), e.some(lane, keys, is_general)
        erase = e.choose(is_delta, e.times(e.spread(builder.fneg(weight)), key), zero)
        erase = e.read_some(e.place_if(is_general, a, h, lane, c), general, erase)
        find = e.read_some(
            e.place_if(is_general, b, h, lane, c), general, e.choose(is_delta, e.times(decay, key), zero)
        )
        bonus = e.read_some(e.place_if(is_bonus, u, w, lane, c), e.some(lane, keys, is_bonus), e.spread(scale.type(1)))
        read = e.choose(is_bonus, query, e.times(decay, query))
        vectors = {D: decay, A: erase, K: key, B: find, Q: query, DQ: read, U: bonus}
        for n, value in vectors.items():
            e.write(value, e.at(c, n, at, lane))
        e.add_number(e.at(c, QA, at), e.total(e.times(query, erase)))
        e.add_number(e.at(c, QK, at), e.total(e.times(e.times(query, bonus), key)))
        return context.get_dummy_value()

    n = types.int64
    return types.void(q, n, n, k, a, b, n, g, n, n, u, n, n, scale, weight, n, c, n, n), codegen


@njit(forceinline=True)
def _step(keys, q, k, a, b, g, u, scale, weight, t, ahead, h, d, d_key, w, kind, c, at):
    """The vectors of one step into c; t, h, d and w say where they lie, and `ahead` where those of a step to come."""
    if c.itemsize == 8:  # no vector form
        for i in range(keys):
            c[at + D + i] = np.exp(g[d + i] if d_key else g[d])
    c[at + QA] = c[at + QK] = 0
    for lane in range(0, keys, STRIP // c.itemsize):
        _step_strip(q, t, ahead, k, a, b, h, g, d, d_key, u, w, kind, scale, weight, keys, c, at, lane)


def _decays_of_columns(e, av, columns, place, size, x, lane):
    """Those of the step just read, which its writing will need; one where there are none."""
    one = e.spread(e.number(1))
    is_set = e.is_set(columns)
    decays = e.read_some(e.place_if(is_set, av, place, lane, x), e.some(lane, size, is_set), one)
    e.write(decays, e.at(x, E, lane))
    return decays


@intrinsic
def _output_strip(typingctx, v, av, place, ahead, weight, size, x, c, at, kind, columns, out, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, av, place, ahead, weight, size, x, c, at, kind, columns, out, lane = e.values
        e.prefetch(e.at(v, ahead, lane))
        mask = e.some(lane, size)
        value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), mask))
        e.write(value, e.at(x, V, lane))
        decays = _decays_of_columns(e, av, columns, place, size, x, lane)
        read = e.read(e.at(x, O, lane))
        read = e.choose(builder.icmp_signed("==", kind, kind.type(BONUS)), read, e.times(read, decays))
        o = e.add(read, e.number_at(e.at(c, QA, at)), e.read(e.at(x, Y, lane)))
        e.write_some(e.add(o, e.number_at(e.at(c, QK, at)), value), e.at(out, place, lane), mask)
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, av, n, n, weight, n, x, c, n, n, n, out, n), codegen


@njit(forceinline=True)
def _output(v, av, place, ahead, weight, size, x, c, at, kind, columns, out):
    """The values of the step just read, and its output."""
    for lane in range(0, size, STRIP // x.itemsize):
        _output_strip(v, av, place, ahead, weight, size, x, c, at, kind, columns, out, lane)


@intrinsic
def _values_strip(typingctx, v, av, place, ahead, weight, size, x, columns, ys, start, d_out, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, av, place, ahead, weight, size, x, columns, ys, start, d_out, lane = e.values
        _decays_of_columns(e, av, columns, place, size, x, lane)
        e.prefetch(e.at(v, ahead, lane))
        e.prefetch(e.at(d_out, place, lane))
        value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), e.some(lane, size)))
        e.write(value, e.at(x, V, lane))
        e.write(e.read(e.at(x, Y, lane)), e.at(ys, start, lane))
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, av, n, n, weight, n, x, n, ys, n, d_out, n), codegen


@njit(forceinline=True)
def _values(v, av, place, ahead, weight, size, x, columns, ys, start, d_out):
    """The values of the step just read; its y is kept."""
    for lane in range(0, size, STRIP // x.itemsize):
        _values_strip(v, av, place, ahead, weight, size, x, columns, ys, start, d_out, lane)


@intrinsic
def _enter_strip(typingctx, v, av, place, weight, size, x, c, kind, columns, ys, start, d_out, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, av, place, weight, size, x, c, kind, columns, ys, start, d_out, lane = e.values
        mask = e.some(lane, size)
        value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), mask))
        y, do = e.read(e.at(ys, start, lane)), e.read_some(e.at(d_out, place, lane), mask)
        decays = _decays_of_columns(e, av, columns, place, size, x, lane)
        is_bonus, zero = builder.icmp_signed("==", kind, kind.type(BONUS)), e.times(do, e.spread(e.number(0)))
        first, last = e.choose(is_bonus, zero, do), e.choose(is_bonus, do, zero)
        seen = e.choose(is_bonus, do, e.times(do, decays))
        for n, strip in ((V, value), (Y, y), (DO, do), (FIRST, first), (LAST, last), (SEEN, seen)):
            e.write(strip, e.at(x, n, lane))
        e.add_number(e.at(c, Y_DO), e.total(e.times(y, do)))
        e.add_number(e.at(c, V_DO), e.total(e.times(value, do)))
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, av, n, weight, n, x, c, n, n, ys, n, d_out, n), codegen


@njit(forceinline=True)
def _enter(v, av, place, weight, size, x, c, kind, columns, ys, start, d_out):
    """The values, the y and the gradient of the output of a step that is gone back through."""
    c[Y_DO] = c[V_DO] = 0
    for lane in range(0, size, STRIP // x.itemsize):
        _enter_strip(v, av, place, weight, size, x, c, kind, columns, ys, start, d_out, lane)


@intrinsic
def _leave_strip(typingctx, v, dv, dav, place, weight, size, x, c, kind, columns, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, dv, dav, place, weight, size, x, c, kind, columns, lane = e.values
        mask, found, do, decays, of_decays = e.some(lane, size), *(e.read(e.at(x, n, lane)) for n in (DV, DO, E, DE))
        with_bonus = e.add(found, e.number_at(e.at(c, QK)), do)
        found = e.choose(builder.icmp_signed("==", kind, kind.type(BONUS)), with_bonus, found)
        e.add_number(e.at(c, V_DV), e.total(e.times(e.read_some(e.at(v, place, lane), mask), found)))
        e.write_some(e.times(e.spread(weight), found), e.at(dv, place, lane), mask)
        is_set = e.is_set(columns)
        of_decays = e.times(decays, of_decays)
        e.write_some(of_decays, e.place_if(is_set, dav, place, lane, x), e.some(lane, size, is_set))
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, dv, dav, n, weight, n, x, c, n, n, n), codegen


@njit(forceinline=True)
def _leave(v, dv, dav, place, weight, size, x, c, kind, columns):
    """The gradients of the values and of the columns' decays."""
    c[V_DV] = 0
    for lane in range(0, size, STRIP // x.itemsize):
        _leave_strip(v, dv, dav, place, weight, size, x, c, kind, columns, lane)


@njit(forceinline=True)
def _copy(source, start, n, target, at):
    for i in range(n):
        target[at + i] = source[start + i]


@njit(forceinline=True)
def _idle(keys, c, at):
    """A step that writes nothing and reads nothing."""
    for i in range(keys):
        c[at + D + i] = 1
        c[at + A + i] = c[at + K + i] = c[at + B + i] = c[at + DQ + i] = 0


def _build_forward(dtype):
    def forward(pointer):
        slots = view(pointer, FORWARD)
        counter, units = slots.counter, slots.units
        sequences, shared, heads, keys, values = slots.sequences, slots.shared, slots.heads, slots.keys, slots.values
        head_parts, column_parts, rows, reverse = slots.head_parts, slots.column_parts, slots.rows, slots.reverse
        d_step, d_head, d_key, kind, columns = slots.d_step, slots.d_head, slots.d_key, slots.kind, slots.columns
        ranges = array(slots.ranges, 2 * sequences, np.int64)
        q, k = array(slots.q, rows * shared * keys, dtype), array(slots.k, rows * shared * keys, dtype)
        v, av = array(slots.v, rows * heads * values, dtype), array(slots.av, rows * heads * values, dtype)
        a, b = array(slots.a, rows * heads * keys, dtype), array(slots.b, rows * heads * keys, dtype)
        g, beta = array(slots.g, rows * heads * keys, dtype), array(slots.beta, rows * heads, dtype)
        u, scale = array(slots.u, heads * keys, dtype), array(slots.scale, 1, dtype)[0]
        state = array(slots.state, sequences * heads * keys * values, dtype)
        out, last = array(slots.out, v.size, dtype), array(slots.last, state.size, dtype)
        S, x = scratch(keys * W, dtype), scratch(LANES, dtype)
        c = scratch(2 * STEP, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % (head_parts * column_parts), unit // (head_parts * column_parts)
            n, shared_head = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
            next_t, next_at = AHEAD * top * shared * keys, AHEAD * top * heads * values
            each = heads // shared
            low, high = share(part // column_parts, head_parts, each)
            left, right = share(part % column_parts, column_parts, -(-values // W))
            for pair in range((high - low) * (right - left)):
                h = shared_head * each + low + pair // (right - left)
                first = (left + pair % (right - left)) * W
                size = min(W, values - first)
                corner = (n * heads + h) * keys * values + first
                S[:] = 0
                x[:] = 0  # lanes without a column too
                load(state, corner, keys, values, size, S)
                before, now = 0, STEP
                _idle(keys, c, before)
                x[E : E + W] = 1
                for i in range(end - begin):
                    r = one + top * i
                    t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                    at, row = (r * heads + h) * values + first, (r * heads + h) * keys
                    weight = beta[r * heads + h] if kind == DELTA else beta[0]
                    _step(keys, q, k, a, b, g, u, scale, weight, t, t + next_t, row, d, d_key, h * keys, kind, c, now)
                    _pass(S, 0, 0, keys, c, before, now, size, x, kind, columns)
                    _output(v, av, at, at + next_at, weight, size, x, c, now, kind, columns, out)
                    before, now = now, before
                _idle(keys, c, now)
                _pass(S, 0, 0, keys, c, before, now, size, x, kind, columns)
                store(S, keys, values, size, last, corner)

    return forward


def _build_backward(dtype):
    def backward(pointer):
        slots = view(pointer, BACKWARD)
        counter, units = slots.counter, slots.units
        sequences, shared, heads, keys, values = slots.sequences, slots.shared, slots.heads, slots.keys, slots.values
        head_parts, column_parts, rows, reverse = slots.head_parts, slots.column_parts, slots.rows, slots.reverse
        d_step, d_head, d_key, kind, columns = slots.d_step, slots.d_head, slots.d_key, slots.kind, slots.columns
        ranges = array(slots.ranges, 2 * sequences, np.int64)
        q, k = array(slots.q, rows * shared * keys, dtype), array(slots.k, rows * shared * keys, dtype)
        v, av = array(slots.v, rows * heads * values, dtype), array(slots.av, rows * heads * values, dtype)
        a, b = array(slots.a, rows * heads * keys, dtype), array(slots.b, rows * heads * keys, dtype)
        g, beta = array(slots.g, rows * heads * keys, dtype), array(slots.beta, rows * heads, dtype)
        u, scale = array(slots.u, heads * keys, dtype), array(slots.scale, 1, dtype)[0]
        state = array(slots.state, sequences * heads * keys * values, dtype)
        d_out, d_last = array(slots.do, v.size, dtype), array(slots.dlast, state.size, dtype)
        parts = head_parts * column_parts
        dq, dk = array(slots.dq, parts * q.size, dtype), array(slots.dk, parts * q.size, dtype)
        dv, dav = array(slots.dv, v.size, dtype), array(slots.dgv, v.size, dtype)
        da, db = array(slots.da, column_parts * a.size, dtype), array(slots.db, column_parts * a.size, dtype)
        dg, d_beta = (
            array(slots.dg, column_parts * a.size, dtype),
            array(slots.dbeta, column_parts * beta.size, dtype),
        )
        du = array(slots.du, column_parts * sequences * u.size, dtype)
        d_state = array(slots.dstate, state.size, dtype)
        fours = -(-keys // 4) * 4  # rows whose sums are taken together
        block = fours * W
        S, dS, x = scratch(block, dtype), scratch(block, dtype), scratch(LANES, dtype)
        starts, held = np.empty((slots.longest // CHUNK + 1) * block, dtype), scratch(CHUNK * block, dtype)
        c, ys, u_sums = scratch(VECTORS, dtype), np.empty(CHUNK * W, dtype), np.empty(keys, np.float64)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % parts, unit // parts
            n, shared_head = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
            next_t, next_at = AHEAD * top * shared * keys, AHEAD * top * heads * values
            each, chunks = heads // shared, (end - begin + CHUNK - 1) // CHUNK
            column = part % column_parts
            low, high = share(part // column_parts, head_parts, each)
            left, right = share(column, column_parts, -(-values // W))
            for pair in range((high - low) * (right - left)):
                h = shared_head * each + low + pair // (right - left)
                again = pair % (right - left) > 0  # another block of columns of this head has been here
                first = (left + pair % (right - left)) * W
                size = min(W, values - first)
                corner = (n * heads + h) * keys * values + first
                constant = 0.0
                S[:] = 0
                dS[:] = 0
                x[:] = 0
                u_sums[:] = 0
                load(state, corner, keys, values, size, S)
                load(d_last, corner, keys, values, size, dS)
                starts[:block] = S
                for turn in range(2 * chunks - 1):
                    # forwards over all chunks but the last, keeping what each ends with; then backwards over all
                    back = turn >= chunks - 1
                    chunk = 2 * chunks - 2 - turn if back else turn
                    steps = min(CHUNK, end - begin - chunk * CHUNK)
                    _copy(starts, chunk * block, block, held, 0)
                    before, now = 0, STEP
                    _idle(keys, c, before)
                    x[: Y + W] = 0
                    x[E : E + W] = 1
                    for i in range(steps):
                        r = one + top * (chunk * CHUNK + i)
                        t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                        at, row = (r * heads + h) * values + first, (r * heads + h) * keys
                        weight = beta[r * heads + h] if kind == DELTA else beta[0]
                        _step(
                            keys, q, k, a, b, g, u, scale, weight, t, t + next_t, row, d, d_key, h * keys, kind, c, now
                        )  # fmt: skip
                        source, target = max(0, i - 1) * back * block, i * back * block
                        _pass(held, source, target, keys, c, before, now, size, x, kind, columns)
                        _values(v, av, at, at + next_at, weight, size, x, columns, ys, i * W, d_out)
                        before, now = now, before
                    if not back:
                        _idle(keys, c, now)
                        _pass(held, 0, 0, keys, c, before, now, size, x, kind, columns)
                        _copy(held, 0, block, starts, (chunk + 1) * block)
                        continue
                    for i in range(steps - 1, -1, -1):
                        r = one + top * (chunk * CHUNK + i)
                        t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                        at, row = (r * heads + h) * values + first, (r * heads + h) * keys
                        weight = beta[r * heads + h] if kind == DELTA else beta[0]
                        _step(keys, q, k, a, b, g, u, scale, weight, t, t, row, d, d_key, h * keys, kind, c, 0)
                        _enter(v, av, at, weight, size, x, c, kind, columns, ys, i * W, d_out)
                        _step_back(held, i * block, dS, keys, c, size, x, kind, columns)
                        spot = (column * rows + r) * heads + h
                        _settle(
                            c, keys, scale, weight, kind, d_key, dq, dk, part * q.size + t, pair > 0, da, db, dg,
                            spot * keys, again,
                        )  # fmt: skip
                        _leave(v, dv, dav, at, weight, size, x, c, kind, columns)
                        constant += c[SUM_D]
                        if d_step and d_key == 0:
                            dg[spot] = c[SUM_D] + (dg[spot] if again else 0)
                        if kind == DELTA:
                            d_beta[spot] = c[V_DV] - c[K_DA] + (d_beta[spot] if again else 0)
                        if kind == BONUS:
                            for m in range(keys):
                                u_sums[m] += c[TO_U + m]
                store(dS, keys, values, size, d_state, corner)
                spot = (column * sequences + n) * heads + h
                if d_step == 0:
                    dg[spot] = constant + (dg[spot] if again else 0)
                if kind == BONUS:
                    for m in range(keys):
                        du[spot * keys + m] = u_sums[m] + (du[spot * keys + m] if again else 0)

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


@functools.lru_cache(512)
def _constant(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype)


def _operands(q, k, v, a, b, g, gv, u, beta, state, reverse, cu_seqlens, scale):
    """How the work is divided, and what both kernels are told, by slot."""
    work = divide(v, q.shape[2], state, reverse, cu_seqlens)
    heads, keys = state.shape[1:3]
    strides = [(0, 0, 0), (0, 1, 0), (), (heads, 1, 0), (heads * keys, keys, 1)][0 if g is None else g.ndim]
    kind = GENERAL if a is not None else DELTA if beta is not None else BONUS if u is not None else PLAIN
    one = _constant(1, v.dtype)
    given = {"q": q, "k": k, "v": v, "av": None if gv is None else gv.exp(), "a": a, "b": b, "beta": beta, "u": u}
    told = {**work.slots, **dict(zip(("d_step", "d_head", "d_key"), strides, strict=True))}
    told |= {name: one if value is None else value.contiguous() for name, value in given.items()}
    told["g"] = _constant(0, v.dtype) if g is None else g.contiguous()
    told["scale"] = _constant(1 / max(1, keys) ** 0.5 if scale is None else scale, v.dtype)
    return work, {**told, "kind": kind, "columns": gv is not None, "state": state.contiguous()}


def run_forward(q, k, v, state, reverse, cu_seqlens, scale, *, a=None, b=None, g=None, gv=None, u=None, beta=None):
    """y and the last state. With a and b the general form; with beta the delta rule; with neither linear attention."""
    work, told = _operands(q, k, v, a, b, g, gv, u, beta, state, reverse, cu_seqlens, scale)
    y, last = empty(v.shape, v.dtype), empty(state.shape, state.dtype)
    _forward.run(v.dtype, FORWARD.pack(**told, out=y, last=last), work.units, v.numel() * state.shape[2])
    return y, last


def run_backward(
    dy, dlast, q, k, v, state, reverse, cu_seqlens, scale, *, a=None, b=None, g=None, gv=None, u=None, beta=None
):
    """The gradient of every operand that is given, by name."""
    work, told = _operands(q, k, v, a, b, g, gv, u, beta, state, reverse, cu_seqlens, scale)
    parts, columns, sequences = work.head_parts * work.column_parts, work.column_parts, len(work.ranges)
    heads, keys = state.shape[1:3]
    constant = g is None or g.ndim == 1
    of_decays = (sequences, heads) if g is None or g.ndim == 1 else tuple(g.shape)

    def some(given, *shape):
        return empty(shape if given is not None else (0,), v.dtype)

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
    made = {f"d{name}": grad for name, grad in grads.items()}
    slots = BACKWARD.pack(**told, **made, do=dy.contiguous(), dlast=dlast.contiguous())
    _backward.run(v.dtype, slots, work.units, 4 * v.numel() * state.shape[2])
    for name in ("q", "k", "a", "b", "beta", "u"):
        grads[name] = summed(grads[name])
    grads["g"] = grads["g"].sum((0, 1)) if constant else summed(grads["g"])
    return grads
