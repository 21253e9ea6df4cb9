"""The scan with diagonal-plus-low-rank transitions as the recurrence itself, and the delta rule as a case of it.

With P = S_{t-1}, d = e^g and y = Pᵀ b, a step is S = d P + a yᵀ + k vᵀ. What is read of P, y and Pᵀ (d q), is summed
while the step before is written, so each step takes one pass over a block of columns of S, in the first-level cache.
The delta rule has a = -β k, b = d k and β v for v. Backwards, dS being the gradient of S_t:

    dS += q doᵀ,  dv = dSᵀ k,  dy = dSᵀ a,  dk = dS v,  da = dS y,  db = P dy,  dg = d rowsum(dS ⊙ P),  dq = S do,
    dS <- d dS + b dyᵀ.

The states P are recomputed, CHUNK steps at a time, from one kept at the start of every chunk.
"""

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from scanl.ops._cpu._columns import CHUNK, divide, load, share, store, summed
from scanl.ops._cpu._columns import WIDTH as W
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._team import Kernel, array, scratch, take
from scanl.ops._cpu._vectors import STRIP, Emitter

# Lanes: values, y, read of P, gradient of what is read, dv, dy
V, Y, O, DO, DV, DY, LANES = (n * W for n in range(7))
# Vectors of a step, a constant number of elements apart so that they are known not to overlap
MOST = 512
STRIDE = MOST + 16
D, A, K, B, Q, DQ, STEP = (n * STRIDE for n in range(7))  # two such steps, then the sums of the backward pass
TO_K, TO_A, TO_B, TO_D, TO_Q, VECTORS = (2 * STEP + n * STRIDE for n in range(6))
AHEAD = 4  # steps
# Numbers behind a step's first vector: q·a, q·k, y·do, v·do, the sum of dlog d, k·da, v·dv
QA, QK, Y_DO, V_DO, SUM_D, K_DA, V_DV = range(MOST, MOST + 7)


@intrinsic
def _pass_strip(typingctx, S, source, target, rows, c, before, now, x, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        S, source, target, rows, c, before, now, x, lane = e.values
        v, y = (e.read(e.at(x, n, lane)) for n in (V, Y))
        read_y, read_o = e.sums(2)
        with e.rows(rows) as i:
            row = builder.mul(i, i.type(W))
            d, a, k = (e.number_at(e.at(c, n, before, i)) for n in (D, A, K))
            b, q = (e.number_at(e.at(c, n, now, i)) for n in (B, DQ))
            p = e.add(e.add(e.times(d, e.read(e.at(S, source, row, lane))), a, y), k, v)
            e.write(p, e.at(S, target, row, lane))
            e.add_to(read_y, b, p)
            e.add_to(read_o, q, p)
        e.keep(read_y, e.at(x, Y, lane))
        e.keep(read_o, e.at(x, O, lane))
        return context.get_dummy_value()

    n = types.int64
    return types.void(S, n, n, n, c, n, n, x, n), codegen


@njit(forceinline=True)
def _pass(S, source, target, keys, c, before, now, size, x):
    """Write the step before, and read the next, whose vectors begin there in c: its y takes the place of the last."""
    for lane in range(0, size, STRIP // S.itemsize):
        _pass_strip(S, source, target, keys, c, before, now, x, lane)  # pyright: ignore[reportCallIssue]


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


@njit(forceinline=True)
def _gather_back(dS, keys, c, size, x):
    """dS += q doᵀ, then dv and dy."""
    for lane in range(0, size, STRIP // dS.itemsize):
        _gather_strip(dS, keys, c, x, lane)  # pyright: ignore[reportCallIssue]


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
                for n, pair in zip(sums, ((d, v), (d, y), (p, dy), (d, p), (p, do)), strict=True):
                    sums[n].append(e.dot(*pair))
                decay, b = (e.number_at(e.at(c, n + more, i)) for n in (D, B))
                e.write(e.add(e.times(decay, d), b, dy), place)
            for n, four in sums.items():
                e.add_four(e.at(c, n, i), e.totals(four))
        return context.get_dummy_value()

    n = types.int64
    return types.void(P, n, dS, n, c, x, n), codegen


@njit(forceinline=True)
def _scatter_back(P, at, dS, keys, c, size, x):
    """The sums over columns, dS v, dS y, P dy, dS ⊙ P and P do, then the gradient before the step."""
    for i in range(keys):
        c[TO_K + i] = c[TO_A + i] = c[TO_B + i] = c[TO_D + i] = c[TO_Q + i] = 0
    for lane in range(0, size, STRIP // dS.itemsize):
        _scatter_strip(P, at, dS, keys, c, x, lane)  # pyright: ignore[reportCallIssue]


@intrinsic
def _settle_strip(typingctx, c, keys, scale, weight, delta, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        c, keys, scale, weight, delta, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane = e.values
        is_delta, mask = e.is_set(delta), e.some(lane, keys)
        decay, a, k, to_k, to_a, to_b, to_d, to_q = (
            e.read(e.at(c, n, lane)) for n in (D, A, K, TO_K, TO_A, TO_B, TO_D, TO_Q)
        )
        y_do, v_do = (e.number_at(e.at(c, n)) for n in (Y_DO, V_DO))
        grad_q = e.times(e.spread(scale), e.add(e.add(e.times(decay, to_q), a, y_do), k, v_do))
        to_d, decayed = e.times(decay, to_d), e.times(decay, to_b)
        to_d = e.choose(is_delta, e.add(to_d, k, decayed), to_d)
        of_keys = e.add(e.add(to_k, decayed), e.spread(builder.fneg(weight)), to_a)
        e.add_number(e.at(c, SUM_D), e.total(to_d))
        e.add_number(e.at(c, K_DA), e.total(e.times(k, to_a)))
        others = e.some(lane, keys, builder.not_(is_delta))
        for value, target, start, add, where in (
            (grad_q, dq, t, add_t, mask),
            (e.choose(is_delta, of_keys, to_k), dk, t, add_t, mask),
            (to_a, da, row, add_row, others),
            (to_b, db, row, add_row, others),
            (to_d, dg, row, add_row, e.some(lane, keys, e.is_set(d_key))),
        ):
            place = e.at(target, start, lane)
            before = e.read_some(place, builder.and_(where, e.spread(e.is_set(add))))
            e.write_some(e.add(before, value), place, where)
        return context.get_dummy_value()

    n = types.int64
    return types.void(c, n, scale, weight, n, n, dq, dk, n, n, da, db, dg, n, n, n), codegen


@njit(forceinline=True)
def _settle(c, keys, scale, weight, delta, d_key, dq, dk, t, add_t, da, db, dg, row, add_row):
    """The gradients of a step's keys from the sums over columns; the delta rule's own a and b are of k."""
    c[SUM_D] = c[K_DA] = 0
    for lane in range(0, keys, STRIP // c.itemsize):
        _settle_strip(c, keys, scale, weight, delta, d_key, dq, dk, t, add_t, da, db, dg, row, add_row, lane)  # pyright: ignore[reportCallIssue]


@intrinsic
def _step_strip(typingctx, q, t, ahead, k, a, b, h, g, d, d_key, delta, scale, weight, keys, c, at, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        q, t, ahead, k, a, b, h, g, d, d_key, delta, scale, weight, keys, c, at, lane = e.values
        mask = e.some(lane, keys)
        query, key = (e.read_some(e.at(source, t, lane), mask) for source in (q, k))
        query = e.times(e.spread(scale), query)
        for source in (q, k):
            e.prefetch(e.at(source, ahead, lane))
        each = e.some(lane, keys, e.is_set(d_key))
        decay = e.read_some(e.at(g, d, lane), each, e.number_at(e.at(g, d)))
        others = e.some(lane, keys, builder.not_(e.is_set(delta)))
        erase = e.read_some(e.at(a, h, lane), others, e.times(e.spread(builder.fneg(weight)), key))
        find = e.read_some(e.at(b, h, lane), others, e.times(decay, key))
        vectors = {D: decay, A: erase, K: key, B: find, Q: query, DQ: e.times(decay, query)}
        for n, value in vectors.items():
            e.write(value, e.at(c, n, at, lane))
        e.add_number(e.at(c, QA, at), e.total(e.times(query, erase)))
        e.add_number(e.at(c, QK, at), e.total(e.times(query, key)))
        return context.get_dummy_value()

    n = types.int64
    return types.void(q, n, n, k, a, b, n, g, n, n, n, scale, weight, n, c, n, n), codegen


@njit(forceinline=True)
def _step(keys, q, k, a, b, g, scale, weight, t, ahead, h, d, d_key, delta, c, at):
    """The vectors of one step into c; t, h and d say where they lie, and `ahead` where those of a step to come."""
    c[at + QA] = c[at + QK] = 0
    for lane in range(0, keys, STRIP // c.itemsize):
        _step_strip(q, t, ahead, k, a, b, h * keys, g, d, d_key, delta, scale, weight, keys, c, at, lane)  # pyright: ignore[reportCallIssue]


@intrinsic
def _output_strip(typingctx, v, place, ahead, weight, size, x, c, at, out, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, place, ahead, weight, size, x, c, at, out, lane = e.values
        e.prefetch(e.at(v, ahead, lane))
        mask = e.some(lane, size)
        value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), mask))
        e.write(value, e.at(x, V, lane))
        o = e.add(e.read(e.at(x, O, lane)), e.number_at(e.at(c, QA, at)), e.read(e.at(x, Y, lane)))
        e.write_some(e.add(o, e.number_at(e.at(c, QK, at)), value), e.at(out, place, lane), mask)
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, n, n, weight, n, x, c, n, out, n), codegen


@njit(forceinline=True)
def _output(v, place, ahead, weight, size, x, c, at, out):
    """The values of the step just read, and its output."""
    for lane in range(0, size, STRIP // x.itemsize):
        _output_strip(v, place, ahead, weight, size, x, c, at, out, lane)  # pyright: ignore[reportCallIssue]


@intrinsic
def _values_strip(typingctx, v, place, ahead, weight, size, x, ys, start, d_out, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, place, ahead, weight, size, x, ys, start, d_out, lane = e.values
        e.prefetch(e.at(v, ahead, lane))
        e.prefetch(e.at(d_out, place, lane))
        value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), e.some(lane, size)))
        e.write(value, e.at(x, V, lane))
        e.write(e.read(e.at(x, Y, lane)), e.at(ys, start, lane))
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, n, n, weight, n, x, ys, n, d_out, n), codegen


@njit(forceinline=True)
def _values(v, place, ahead, weight, size, x, ys, start, d_out):
    """The values of the step just read; its y is kept."""
    for lane in range(0, size, STRIP // x.itemsize):
        _values_strip(v, place, ahead, weight, size, x, ys, start, d_out, lane)  # pyright: ignore[reportCallIssue]


@intrinsic
def _enter_strip(typingctx, v, place, weight, size, x, ys, start, d_out, c, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, place, weight, size, x, ys, start, d_out, c, lane = e.values
        mask = e.some(lane, size)
        value = e.times(e.spread(weight), e.read_some(e.at(v, place, lane), mask))
        y, do = e.read(e.at(ys, start, lane)), e.read_some(e.at(d_out, place, lane), mask)
        for n, strip in ((V, value), (Y, y), (DO, do)):
            e.write(strip, e.at(x, n, lane))
        e.add_number(e.at(c, Y_DO), e.total(e.times(y, do)))
        e.add_number(e.at(c, V_DO), e.total(e.times(value, do)))
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, n, weight, n, x, ys, n, d_out, c, n), codegen


@njit(forceinline=True)
def _enter(v, place, weight, size, x, ys, start, d_out, c):
    """The values, the y and the gradient of the output of a step that is gone back through."""
    c[Y_DO] = c[V_DO] = 0
    for lane in range(0, size, STRIP // x.itemsize):
        _enter_strip(v, place, weight, size, x, ys, start, d_out, c, lane)  # pyright: ignore[reportCallIssue]


@intrinsic
def _leave_strip(typingctx, v, dv, place, weight, size, x, c, lane):
    def codegen(context, builder, signature, arguments):
        e = Emitter(context, builder, signature, arguments)
        v, dv, place, weight, size, x, c, lane = e.values
        mask, found = e.some(lane, size), e.read(e.at(x, DV, lane))
        e.add_number(e.at(c, V_DV), e.total(e.times(e.read_some(e.at(v, place, lane), mask), found)))
        e.write_some(e.times(e.spread(weight), found), e.at(dv, place, lane), mask)
        return context.get_dummy_value()

    n = types.int64
    return types.void(v, dv, n, weight, n, x, c, n), codegen


@njit(forceinline=True)
def _leave(v, dv, place, weight, size, x, c):
    """The gradient of the values."""
    c[V_DV] = 0
    for lane in range(0, size, STRIP // x.itemsize):
        _leave_strip(v, dv, place, weight, size, x, c, lane)  # pyright: ignore[reportCallIssue]


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
        counter, units = pointer[0], pointer[1]
        sequences, shared, heads, keys, values = pointer[3], pointer[4], pointer[5], pointer[6], pointer[7]
        head_parts, column_parts, rows, reverse = pointer[8], pointer[9], pointer[10], pointer[12]
        d_step, d_head, d_key, delta = pointer[13], pointer[14], pointer[15], pointer[16]
        ranges = array(pointer[2], 2 * sequences, np.int64)
        q, k = array(pointer[17], rows * shared * keys, dtype), array(pointer[18], rows * shared * keys, dtype)
        v = array(pointer[19], rows * heads * values, dtype)
        a, b = array(pointer[20], rows * heads * keys, dtype), array(pointer[21], rows * heads * keys, dtype)
        g, beta = array(pointer[22], rows * heads * keys, dtype), array(pointer[23], rows * heads, dtype)
        scale = array(pointer[24], 1, dtype)[0]
        state = array(pointer[25], sequences * heads * keys * values, dtype)
        out, last = array(pointer[26], v.size, dtype), array(pointer[27], state.size, dtype)
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
            to_come = AHEAD * top
            each = heads // shared
            low, high = share(part // column_parts, head_parts, each)
            left, right = share(part % column_parts, column_parts, -(-values // W))
            for pair in range((high - low) * (right - left)):
                h = shared_head * each + low + pair // (right - left)
                first = (left + pair % (right - left)) * W
                size = min(W, values - first)
                corner = (n * heads + h) * keys * values + first
                S[:] = 0
                x[:] = 0
                load(state, corner, keys, values, size, S)
                before, now = 0, STEP
                _idle(keys, c, before)
                for i in range(end - begin):
                    r = one + top * i
                    t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                    at = (r * heads + h) * values + first
                    weight = beta[r * heads + h] if delta else beta[0]
                    _step(
                        keys,
                        q,
                        k,
                        a,
                        b,
                        g,
                        scale,
                        weight,
                        t,
                        t + to_come * shared * keys,
                        r * heads + h,
                        d,
                        d_key,
                        delta,
                        c,
                        now,
                    )
                    _pass(S, 0, 0, keys, c, before, now, size, x)
                    _output(v, at, at + to_come * heads * values, weight, size, x, c, now, out)
                    before, now = now, before
                _idle(keys, c, now)
                _pass(S, 0, 0, keys, c, before, now, size, x)
                store(S, keys, values, size, last, corner)

    return forward


def _build_backward(dtype):
    def backward(pointer):
        counter, units = pointer[0], pointer[1]
        sequences, shared, heads, keys, values = pointer[3], pointer[4], pointer[5], pointer[6], pointer[7]
        head_parts, column_parts, rows, longest, reverse = (
            pointer[8], pointer[9], pointer[10], pointer[11], pointer[12],
        )  # fmt: skip
        d_step, d_head, d_key, delta = pointer[13], pointer[14], pointer[15], pointer[16]
        ranges = array(pointer[2], 2 * sequences, np.int64)
        q, k = array(pointer[17], rows * shared * keys, dtype), array(pointer[18], rows * shared * keys, dtype)
        v = array(pointer[19], rows * heads * values, dtype)
        a, b = array(pointer[20], rows * heads * keys, dtype), array(pointer[21], rows * heads * keys, dtype)
        g, beta = array(pointer[22], rows * heads * keys, dtype), array(pointer[23], rows * heads, dtype)
        scale = array(pointer[24], 1, dtype)[0]
        state = array(pointer[25], sequences * heads * keys * values, dtype)
        d_out, d_last = array(pointer[26], v.size, dtype), array(pointer[27], state.size, dtype)
        parts = head_parts * column_parts
        dq, dk = array(pointer[28], parts * q.size, dtype), array(pointer[29], parts * q.size, dtype)
        dv = array(pointer[30], v.size, dtype)
        da, db = array(pointer[31], column_parts * a.size, dtype), array(pointer[32], column_parts * a.size, dtype)
        dg = array(pointer[33], column_parts * a.size, dtype)
        d_beta = array(pointer[34], column_parts * beta.size, dtype)
        d_state = array(pointer[35], state.size, dtype)
        fours = -(-keys // 4) * 4  # rows whose sums are taken together
        block = fours * W
        S, dS, x = scratch(block, dtype), scratch(block, dtype), scratch(LANES, dtype)
        starts, held = np.empty((longest // CHUNK + 1) * block, dtype), scratch(CHUNK * block, dtype)
        ys = np.empty(CHUNK * W, dtype)
        c = scratch(VECTORS, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % parts, unit // parts
            n, shared_head = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
            to_come = AHEAD * top
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
                x[:] = 0  # lanes without a column too
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
                    for i in range(steps):
                        r = one + top * (chunk * CHUNK + i)
                        t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                        at = (r * heads + h) * values + first
                        weight = beta[r * heads + h] if delta else beta[0]
                        _step(
                            keys,
                            q,
                            k,
                            a,
                            b,
                            g,
                            scale,
                            weight,
                            t,
                            t + to_come * shared * keys,
                            r * heads + h,
                            d,
                            d_key,
                            delta,
                            c,
                            now,
                        )
                        _pass(held, max(0, i - 1) * back * block, i * back * block, keys, c, before, now, size, x)
                        _values(v, at, at + to_come * heads * values, weight, size, x, ys, i * W, d_out)
                        before, now = now, before
                    if not back:
                        _idle(keys, c, now)
                        _pass(held, 0, 0, keys, c, before, now, size, x)
                        _copy(held, 0, block, starts, (chunk + 1) * block)
                        continue
                    for i in range(steps - 1, -1, -1):
                        r = one + top * (chunk * CHUNK + i)
                        t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                        at = (r * heads + h) * values + first
                        weight = beta[r * heads + h] if delta else beta[0]
                        _step(
                            keys,
                            q,
                            k,
                            a,
                            b,
                            g,
                            scale,
                            weight,
                            t,
                            t + to_come * shared * keys,
                            r * heads + h,
                            d,
                            d_key,
                            delta,
                            c,
                            0,
                        )
                        _enter(v, at, weight, size, x, ys, i * W, d_out, c)
                        _gather_back(dS, keys, c, size, x)
                        _scatter_back(held, i * block, dS, fours, c, size, x)
                        row = (column * rows + r) * heads + h
                        _settle(
                            c, keys, scale, weight, delta, d_key, dq, dk, part * q.size + t, pair > 0, da, db, dg,
                            row * keys, again,
                        )  # fmt: skip
                        _leave(v, dv, at, weight, size, x, c)
                        constant += c[SUM_D]
                        if d_step and d_key == 0:
                            dg[row] = c[SUM_D] + (dg[row] if again else 0)
                        if delta:
                            d_beta[row] = c[V_DV] - c[K_DA] + (d_beta[row] if again else 0)
                store(dS, keys, values, size, d_state, corner)
                if d_step == 0:
                    spot = (column * sequences + n) * heads + h
                    dg[spot] = constant + (dg[spot] if again else 0)

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def _operands(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale):
    """How the work is divided, what both kernels are told first, and the tensors that they read."""
    work = divide(v, q.shape[2], state, reverse, cu_seqlens)
    heads, keys = state.shape[1:3]
    strides = [(0, 0, 0), (0, 1, 0), (), (heads, 1, 0), (heads * keys, keys, 1)][0 if g is None else g.ndim]
    scale = 1 / max(1, keys) ** 0.5 if scale is None else scale
    one = v.new_ones(1)
    tensors = [
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        *(one if value is None else value.contiguous() for value in (a, b)),
        one if g is None else g.exp().contiguous(),
        one if beta is None else beta.contiguous(),
        v.new_full((1,), scale),
        state.contiguous(),
    ]
    return work, [*work.head, *strides, int(beta is not None)], tensors


def run_forward(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale):
    """The delta rule when beta is given, in place of a and b."""
    work, head, tensors = _operands(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale)
    y, last = empty(v.shape, v.dtype), empty(state.shape, state.dtype)
    pointers = [tensor.data_ptr() for tensor in (*tensors, y, last)]
    _forward.run(v.dtype, [*head, *pointers], work.units, 2 * v.numel() * state.shape[2])
    return y, last


def run_backward(dy, dlast, q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale):
    """dq, dk, dv, then da and db or dβ, dg if there is one, and dstate."""
    work, head, tensors = _operands(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale)
    parts, columns, sequences = work.head_parts * work.column_parts, work.column_parts, len(work.ranges)
    heads = state.shape[1]
    dq, dk, dv = empty((parts, *q.shape), q.dtype), empty((parts, *k.shape), k.dtype), empty(v.shape, v.dtype)
    da, db = (empty((columns, *a.shape) if a is not None else (0,), v.dtype) for _ in range(2))
    d_beta = empty((columns, *beta.shape) if beta is not None else (0,), v.dtype)
    dg = empty((columns, *(g.shape if g is not None and g.ndim > 1 else (sequences, heads))), v.dtype)
    dstate = empty(state.shape, state.dtype)
    given = (*tensors, dy.contiguous(), dlast.contiguous(), dq, dk, dv, da, db, dg, d_beta, dstate)
    pointers = [tensor.data_ptr() for tensor in given]
    _backward.run(v.dtype, [*head, *pointers], work.units, 8 * v.numel() * state.shape[2])
    found = [summed(dq), summed(dk), dv]
    found += [summed(d_beta)] if a is None else [summed(da), summed(db)]
    if g is not None:
        found.append(summed(dg) if g.ndim > 1 else dg.sum((0, 1)))
    return [*found, dstate]


def forward(q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    return run_forward(q, k, v, a, b, g, None, state, reverse, cu_seqlens, scale)


def backward(dy, dlast, q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    return run_backward(dy, dlast, q, k, v, a, b, g, None, state, reverse, cu_seqlens, scale)
