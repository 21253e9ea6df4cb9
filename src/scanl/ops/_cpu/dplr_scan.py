"""The scan with diagonal-plus-low-rank transitions as the recurrence itself, and the delta rule as a case of it.

With P = S_{t-1}, d = e^g and y = Pᵀ b, a step is S = d P + a yᵀ + k vᵀ. What is read of P, y and Pᵀ (d q), is summed
while the step before is written, so each step takes one pass over a block of columns of S, in the first-level cache.
The delta rule has a = -β k, b = d k and β v for v. Backwards, dS being the gradient of S_t:

    dS += q doᵀ,  dv = dSᵀ k,  dy = dSᵀ a,  dk = dS v,  da = dS y,  db = P dy,  dg = d rowsum(dS ⊙ P),  dq = S do,
    dS <- d dS + b dyᵀ.

The states P are recomputed, CHUNK steps at a time, from one kept at the start of every chunk.
"""

import numpy as np
from numba import njit

from scanl.ops._cpu._columns import CHUNK, divide, load, share, store
from scanl.ops._cpu._columns import WIDTH as W
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._team import Kernel, array, take, wide_vectors

# Lanes: values, y, read of P, gradient of what is read, dv, dy; then values and y of the step before
V, Y, O, DO, DV, DY, V_BEFORE, Y_BEFORE, LANES = (n * W for n in range(9))
# Vectors of a step, a constant number of elements apart so that they are known not to overlap
MOST = 512
STRIDE = MOST + 16
D, A, K, B, Q, DQ, STEP = (n * STRIDE for n in range(7))  # two such steps, then the sums of the backward pass
TO_K, TO_A, TO_B, TO_D, TO_Q, VECTORS = (2 * STEP + n * STRIDE for n in range(6))


@njit(fastmath={"contract", "nsz"})
def _pass(S, at, keys, c, before, now, size, x):
    """Write the step before, and read the next, whose vectors begin there in c."""
    wide_vectors()  # pyright: ignore[reportCallIssue]
    for i in range(0, keys, 2):
        s = S[at + i * W : at + (i + 2) * W]
        w, r = before + i, now + i
        d0, d1, a0, a1, k0, k1 = c[D + w], c[D + w + 1], c[A + w], c[A + w + 1], c[K + w], c[K + w + 1]
        b0, b1, q0, q1 = c[B + r], c[B + r + 1], c[DQ + r], c[DQ + r + 1]
        for j in range(size):
            v, y = x[V_BEFORE + j], x[Y_BEFORE + j]
            p0 = d0 * s[j] + a0 * y + k0 * v
            p1 = d1 * s[W + j] + a1 * y + k1 * v
            x[Y + j] += b0 * p0 + b1 * p1
            x[O + j] += q0 * p0 + q1 * p1
            s[j] = p0
            s[W + j] = p1


@njit(fastmath={"contract", "nsz"})
def _gather_back(dS, keys, c, size, x):
    """dS += q doᵀ, then dv and dy."""
    wide_vectors()  # pyright: ignore[reportCallIssue]
    for i in range(0, keys, 2):
        s = dS[i * W : (i + 2) * W]
        q0, q1, k0, k1, a0, a1 = c[Q + i], c[Q + i + 1], c[K + i], c[K + i + 1], c[A + i], c[A + i + 1]
        for j in range(size):
            d0, d1 = s[j] + q0 * x[DO + j], s[W + j] + q1 * x[DO + j]
            x[DV + j] += k0 * d0 + k1 * d1
            x[DY + j] += a0 * d0 + a1 * d1
            s[j] = d0
            s[W + j] = d1


@njit(fastmath={"reassoc", "contract", "nsz"})
def _scatter_back(P, at, dS, keys, c, size, x):
    """The sums over columns, dS v, dS y, P dy, dS ⊙ P and P do, then the gradient before the step."""
    wide_vectors()  # pyright: ignore[reportCallIssue]
    zero = x.dtype.type(0)
    for i in range(keys):
        p, s = P[at + i * W : at + (i + 1) * W], dS[i * W : (i + 1) * W]
        decay, b = c[D + i], c[B + i]
        to_k = to_a = to_b = to_d = to_q = zero
        for j in range(size):
            d, before, dy = s[j], p[j], x[DY + j]
            to_k += d * x[V + j]
            to_a += d * x[Y + j]
            to_b += before * dy
            to_d += d * before
            to_q += before * x[DO + j]
            s[j] = decay * d + b * dy
        c[TO_K + i], c[TO_A + i], c[TO_B + i], c[TO_D + i], c[TO_Q + i] = to_k, to_a, to_b, to_d, to_q


@njit(fastmath={"contract", "nsz"})
def _keys_back(c, keys, y_do, v_do, weight, delta):
    """dq, dk and the gradient of log decays from the sums over columns; the delta rule's own a and b are of k."""
    for i in range(keys):
        decay, key, to_b = c[D + i], c[K + i], c[TO_B + i]
        to_d = decay * c[TO_D + i]
        c[TO_Q + i] = decay * c[TO_Q + i] + c[A + i] * y_do + key * v_do
        c[TO_D + i] = to_d + decay * key * to_b if delta else to_d
        c[TO_K + i] = c[TO_K + i] + decay * to_b - weight * c[TO_A + i] if delta else c[TO_K + i]


@njit(forceinline=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(x, a, y, b, size):
    total = x.dtype.type(0)
    for j in range(size):
        total += x[a + j] * y[b + j]
    return total


@njit(forceinline=True)
def _copy(source, start, n, target, at):
    for i in range(n):
        target[at + i] = source[start + i]


@njit(forceinline=True)
def _put(target, at, source, start, n, add):
    if add:
        for i in range(n):
            target[at + i] += source[start + i]
    else:
        _copy(source, start, n, target, at)


@njit(fastmath={"contract", "nsz"})
def _step(keys, q, k, a, b, g, weight, t, h, d, d_key, delta, c, at):
    """The vectors of one step into c; t, h and d say where they lie."""
    _copy(q, t, keys, c, at + Q)
    _copy(k, t, keys, c, at + K)
    if d_key:
        _copy(g, d, keys, c, at + D)
    else:
        for i in range(keys):
            c[at + D + i] = g[d]
    if delta:
        for i in range(keys):
            c[at + A + i] = -weight * c[at + K + i]
            c[at + B + i] = c[at + D + i] * c[at + K + i]
    else:
        _copy(a, h * keys, keys, c, at + A)
        _copy(b, h * keys, keys, c, at + B)
    for i in range(keys):
        c[at + DQ + i] = c[at + D + i] * c[at + Q + i]


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
        state = array(pointer[24], sequences * heads * keys * values, dtype)
        out, last = array(pointer[25], v.size, dtype), array(pointer[26], state.size, dtype)
        even = keys + keys % 2  # rows go in pairs
        S, x = np.empty(even * W, dtype), np.empty(LANES, dtype)
        c = np.zeros(2 * STEP, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % (head_parts * column_parts), unit // (head_parts * column_parts)
            n, shared_head = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
            each = heads // shared
            low, high = share(part // column_parts, head_parts, each)
            left, right = share(part % column_parts, column_parts, -(-values // W))
            for pair in range((high - low) * (right - left)):
                h = shared_head * each + low + pair // (right - left)
                first = (left + pair % (right - left)) * W
                size = min(W, values - first)
                corner = (n * heads + h) * keys * values + first
                S[:] = 0
                load(state, corner, keys, values, size, S)
                before, now = 0, STEP
                _idle(keys, c, before)
                x[V_BEFORE:LANES] = 0
                for i in range(end - begin):
                    r = one + top * i
                    t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                    at = (r * heads + h) * values + first
                    weight = beta[r * heads + h] if delta else beta[0]
                    _step(keys, q, k, a, b, g, weight, t, r * heads + h, d, d_key, delta, c, now)
                    x[Y : O + W] = 0
                    _pass(S, 0, even, c, before, now, size, x)
                    read_y, read_v = _dot(c, now + Q, c, now + A, keys), _dot(c, now + Q, c, now + K, keys)
                    before, now = now, before
                    for j in range(size):
                        value = weight * v[at + j]
                        x[V_BEFORE + j] = value
                        x[Y_BEFORE + j] = x[Y + j]
                        out[at + j] = x[O + j] + read_y * x[Y + j] + read_v * value
                _idle(keys, c, now)
                _pass(S, 0, even, c, before, now, size, x)
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
        state = array(pointer[24], sequences * heads * keys * values, dtype)
        d_out, d_last = array(pointer[25], v.size, dtype), array(pointer[26], state.size, dtype)
        parts = head_parts * column_parts
        dq, dk = array(pointer[27], parts * q.size, dtype), array(pointer[28], parts * q.size, dtype)
        dv = array(pointer[29], v.size, dtype)
        da, db = array(pointer[30], column_parts * a.size, dtype), array(pointer[31], column_parts * a.size, dtype)
        dg = array(pointer[32], column_parts * a.size, dtype)
        d_beta = array(pointer[33], column_parts * beta.size, dtype)
        d_state = array(pointer[34], state.size, dtype)
        even = keys + keys % 2
        block = even * W
        S, dS, x = np.empty(block, dtype), np.empty(block, dtype), np.empty(LANES, dtype)
        starts, held = np.empty((longest // CHUNK + 1) * block, dtype), np.empty((CHUNK + 1) * block, dtype)
        ys = np.empty(CHUNK * W, dtype)
        c = np.zeros(VECTORS, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % parts, unit // parts
            n, shared_head = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
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
                    x[V_BEFORE:LANES] = 0
                    for i in range(steps):
                        r = one + top * (chunk * CHUNK + i)
                        t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                        at = (r * heads + h) * values + first
                        weight = beta[r * heads + h] if delta else beta[0]
                        _step(keys, q, k, a, b, g, weight, t, r * heads + h, d, d_key, delta, c, now)
                        x[Y : O + W] = 0
                        spot = i * block if back else 0
                        if back and i > 0:
                            _copy(held, spot - block, block, held, spot)
                        _pass(held, spot, even, c, before, now, size, x)
                        before, now = now, before
                        for j in range(size):
                            x[V_BEFORE + j] = weight * v[at + j]
                            x[Y_BEFORE + j] = ys[i * W + j] = x[Y + j]
                    if not back:
                        _idle(keys, c, now)
                        _pass(held, 0, even, c, before, now, size, x)
                        _copy(held, 0, block, starts, (chunk + 1) * block)
                        continue
                    for i in range(steps - 1, -1, -1):
                        r = one + top * (chunk * CHUNK + i)
                        t, d = (r * shared + shared_head) * keys, r * d_step + h * d_head
                        at = (r * heads + h) * values + first
                        weight = beta[r * heads + h] if delta else beta[0]
                        _step(keys, q, k, a, b, g, weight, t, r * heads + h, d, d_key, delta, c, 0)
                        for j in range(size):
                            x[V + j], x[Y + j] = weight * v[at + j], ys[i * W + j]
                            x[DO + j] = d_out[at + j]
                            x[DV + j] = x[DY + j] = 0
                        _gather_back(dS, even, c, size, x)
                        _scatter_back(held, i * block, dS, keys, c, size, x)
                        _keys_back(c, keys, _dot(x, Y, x, DO, size), _dot(x, V, x, DO, size), weight, delta)
                        row = (column * rows + r) * heads + h
                        total = dS.dtype.type(0)
                        for m in range(keys):
                            total += c[TO_D + m]
                        constant += total
                        if d_key:
                            _put(dg, row * keys, c, TO_D, keys, again)
                        elif d_step:
                            dg[row] = total + (dg[row] if again else 0)
                        _put(dq, part * q.size + t, c, TO_Q, keys, pair > 0)
                        _put(dk, part * q.size + t, c, TO_K, keys, pair > 0)
                        if delta:
                            to_beta = _dot(x, DV, v, at, size) - _dot(c, TO_A, c, K, keys)
                            d_beta[row] = to_beta + (d_beta[row] if again else 0)
                        else:
                            _put(da, row * keys, c, TO_A, keys, again)
                            _put(db, row * keys, c, TO_B, keys, again)
                        for j in range(size):
                            dv[at + j] = weight * x[DV + j]
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
        (q * scale).contiguous(),
        k.contiguous(),
        v.contiguous(),
        *(one if value is None else value.contiguous() for value in (a, b)),
        one if g is None else g.exp().contiguous(),
        one if beta is None else beta.contiguous(),
        state.contiguous(),
    ]
    return work, [*work.head, *strides, int(beta is not None)], tensors, scale


def run_forward(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale):
    """The delta rule when beta is given, in place of a and b."""
    work, head, tensors, _ = _operands(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale)
    y, last = empty(v.shape, v.dtype), empty(state.shape, state.dtype)
    pointers = [tensor.data_ptr() for tensor in (*tensors, y, last)]
    _forward.run(v.dtype, [*head, *pointers], work.units, 2 * v.numel() * state.shape[2])
    return y, last


def run_backward(dy, dlast, q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale):
    """dq, dk, dv, then da and db or dβ, dg if there is one, and dstate."""
    work, head, tensors, scale = _operands(q, k, v, a, b, g, beta, state, reverse, cu_seqlens, scale)
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
    found = [dq.sum(0) * scale, dk.sum(0), dv]
    found += [d_beta.sum(0)] if a is None else [da.sum(0), db.sum(0)]
    if g is not None:
        found.append(dg.sum(0) if g.ndim > 1 else dg.sum((0, 1)))
    return [*found, dstate]


def forward(q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    return run_forward(q, k, v, a, b, g, None, state, reverse, cu_seqlens, scale)


def backward(dy, dlast, q, k, v, a, b, g, state, reverse, cu_seqlens, scale):
    return run_backward(dy, dlast, q, k, v, a, b, g, None, state, reverse, cu_seqlens, scale)
