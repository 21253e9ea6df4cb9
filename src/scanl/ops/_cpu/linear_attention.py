"""Linear attention four steps at a time, over blocks of the columns of S that stay in the first-level cache.

With s the state before four steps, a_m their decays, and w_m = a_m (1 with a bonus, which reads before it decays),

    o_m = Σ_i q_m w_m Π_{0..m-1} a s  +  Σ_{l<m} P_ml v_l + P_mm v_m,      P_ml = Σ_i q_m w_m k_l Π_{l+1..m-1} a,
    s  <-  Π_{0..3} a s + Σ_l k_l Π_{l+1..3} a v_lᵀ:

nine multiplications for each element of s instead of twelve, one load and one store of it instead of four. Decays of
columns multiply the values and what is read. The backward pass differentiates exactly this, from states recomputed out
of one kept every HELD groups of four. The decay's gradient is the sum of the terms in which the decay stands: the sum
of q ⊙ dq - k ⊙ dk, which needs no states, loses the gradients of strong decays in its rounding.
"""

import numpy as np
from numba import njit

from scanl.ops._cpu._columns import WIDTH as W
from scanl.ops._cpu._columns import divide, load, share, store
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._team import Kernel, array, take, wide_vectors

HELD = 16  # groups of four steps between the states that the backward pass keeps

R = W + 16  # from row to row of the scratch below: were it W, rows would share the last twelve bits of their addresses
# Rows in the scratch of keys: four steps each, but for those that say otherwise
Q, K, A, READ, READS, WRITES = (4 * n * R for n in range(6))
QUERIED, WRITTEN, DQ, DK, DG = (4 * n * R for n in range(6, 11))
ALL, U, KEPT, TOTAL, KEY_ROWS = 44 * R, 45 * R, 46 * R, 47 * R, 48  # one row each: all decays, u, s ⊙ dS, sums
# and in the scratch of values
V, O, DO, AV, VS, DOS, INTER, DVS = (4 * n * R for n in range(8))
AV_ALL, AV_KEPT, VALUE_ROWS = 32 * R, 33 * R, 34


@njit(forceinline=True)
def _gather(source, start, step, count, n, fill, z, at):
    """Up to four steps of n numbers into scratch; `fill` for the steps that are not there."""
    for m in range(count):
        for i in range(n):
            z[at + m * R + i] = source[start + m * step + i]
    for m in range(count, 4):
        for i in range(n):
            z[at + m * R + i] = fill


@njit(forceinline=True)
def _put(target, at, source, start, n, add):
    for i in range(n):
        target[at + i] = source[start + i] + (target[at + i] if add else 0)


@njit(forceinline=True)
def _pair(m, l):
    """Where P has what step m reads of step l: the steps' own, then (1,0), (2,1), (3,2), (2,0), (3,1), (3,0)."""
    return l + (4 if m - l == 1 else 7 if m - l == 2 else 9)


@njit(fastmath={"reassoc", "contract", "nsz"})
def _load_keys(z, n, count, q, k, t, step, a, d, a_step, a_key, u, at, before, P):
    """n keys of four steps: what each reads of s, writes to it, and reads of the steps before, which is added to P.

    t and d say where the first step's keys and decays lie. A step that is not there neither reads, writes nor decays.
    """
    zero = z.dtype.type(0)
    for i in range(n):
        z[ALL + i] = 1
        z[U + i] = 1
    if before:
        for i in range(n):
            z[U + i] = u[at + i]
    for m in range(4):
        row = m * R
        if m >= count:
            for i in range(n):
                z[Q + row + i] = z[K + row + i] = z[READ + row + i] = z[READS + row + i] = z[WRITES + row + i] = 0
                z[A + row + i] = 1
            continue
        t_m, d_m, own = t + m * step, d + m * a_step, zero
        if a_key:
            for i in range(n):
                z[A + row + i] = a[d_m + i]
        else:
            for i in range(n):
                z[A + row + i] = a[d_m]
        for i in range(n):
            query, key, decay, all_before = q[t_m + i], k[t_m + i], z[A + row + i], z[ALL + i]
            z[Q + row + i], z[K + row + i], z[WRITES + row + i] = query, key, key
            own += query * key * z[U + i]
            if not before:
                query *= decay
            z[READ + row + i], z[READS + row + i] = query, query * all_before
            z[ALL + i] = all_before * decay
        P[m] += own
        for l in range(m):
            met = zero
            for i in range(n):
                written = z[WRITES + l * R + i]
                met += z[READ + row + i] * written
                z[WRITES + l * R + i] = written * z[A + row + i]
            P[_pair(m, l)] += met


@njit(forceinline=True, fastmath={"reassoc", "contract", "nsz"})
def _sum_of(z, at, n):
    total = z.dtype.type(0)
    for i in range(n):
        total += z[at + i]
    return total


@njit(fastmath={"contract", "nsz"})
def _load_values(x, size, count, v, av, at, step, outer):
    """Values of four steps, as they are and as the state after the four holds them."""
    _gather(v, at, step, count, size, 0, x, V)
    if outer:
        _gather(av, at, step, count, size, 1, x, AV)
        for j in range(size):
            a1, a2, a3 = x[AV + R + j], x[AV + 2 * R + j], x[AV + 3 * R + j]
            x[VS + j], x[VS + R + j] = x[V + j] * (a1 * a2 * a3), x[V + R + j] * (a2 * a3)
            x[VS + 2 * R + j], x[VS + 3 * R + j] = x[V + 2 * R + j] * a3, x[V + 3 * R + j]
            x[AV_ALL + j] = x[AV + j] * a1 * (a2 * a3)
    else:
        for m in range(4):
            for j in range(size):
                x[VS + m * R + j] = x[V + m * R + j]


@njit(fastmath={"contract", "nsz"})
def _write_rows(S, at, n, z, x, size, outer):
    """n rows of the state from `at` on, four steps further."""
    wide_vectors()  # pyright: ignore[reportCallIssue]
    for i in range(n):
        s = S[at + i * W : at + (i + 1) * W]
        decay = z[ALL + i]
        k0, k1, k2, k3 = z[WRITES + i], z[WRITES + R + i], z[WRITES + 2 * R + i], z[WRITES + 3 * R + i]
        for j in range(size):
            kept = decay * s[j]
            if outer:
                kept *= x[AV_ALL + j]
            s[j] = kept + k0 * x[VS + j] + k1 * x[VS + R + j] + k2 * x[VS + 2 * R + j] + k3 * x[VS + 3 * R + j]


@njit(fastmath={"contract", "nsz"})
def _forward_rows(S, at, n, z, x, size, outer):
    """Read n rows, then write them."""
    wide_vectors()  # pyright: ignore[reportCallIssue]
    for i in range(n):
        s = S[at + i * W : at + (i + 1) * W]
        q0, q1, q2, q3 = z[READS + i], z[READS + R + i], z[READS + 2 * R + i], z[READS + 3 * R + i]
        decay = z[ALL + i]
        k0, k1, k2, k3 = z[WRITES + i], z[WRITES + R + i], z[WRITES + 2 * R + i], z[WRITES + 3 * R + i]
        for j in range(size):
            p = s[j]
            x[O + j] += q0 * p
            x[O + R + j] += q1 * p
            x[O + 2 * R + j] += q2 * p
            x[O + 3 * R + j] += q3 * p
            kept = decay * p
            if outer:
                kept *= x[AV_ALL + j]
            s[j] = kept + k0 * x[VS + j] + k1 * x[VS + R + j] + k2 * x[VS + 2 * R + j] + k3 * x[VS + 3 * R + j]


@njit(fastmath={"contract", "nsz"})
def _within(x, P, size, outer, before):
    """Decay what was read by the columns, and add what the four steps read of each other."""
    p0, p1, p2, p3, p10, p21, p32, p20, p31, p30 = P[0], P[1], P[2], P[3], P[4], P[5], P[6], P[7], P[8], P[9]
    for j in range(size):
        v0, v1, v2, v3 = x[V + j], x[V + R + j], x[V + 2 * R + j], x[V + 3 * R + j]
        o0, o1, o2, o3 = x[O + j], x[O + R + j], x[O + 2 * R + j], x[O + 3 * R + j]
        if outer:
            a0, a1, a2, a3 = x[AV + j], x[AV + R + j], x[AV + 2 * R + j], x[AV + 3 * R + j]
            o1 = o1 * a0 + p10 * v0
            o2 = o2 * (a0 * a1) + p20 * a1 * v0 + p21 * v1
            o3 = o3 * (a0 * a1 * a2) + p30 * (a1 * a2) * v0 + p31 * a2 * v1 + p32 * v2
            if not before:
                o0, o1, o2, o3 = o0 * a0, o1 * a1, o2 * a2, o3 * a3
        else:
            o1 += p10 * v0
            o2 += p20 * v0 + p21 * v1
            o3 += p30 * v0 + p31 * v1 + p32 * v2
        x[O + j], x[O + R + j] = o0 + p0 * v0, o1 + p1 * v1
        x[O + 2 * R + j], x[O + 3 * R + j] = o2 + p2 * v2, o3 + p3 * v3


@njit(fastmath={"reassoc", "contract", "nsz"})
def _between(x, dP, size, outer, before):
    """The gradient of P, and do as the state before the four steps sees it."""
    p0 = p1 = p2 = p3 = p10 = p21 = p32 = p20 = p31 = p30 = x.dtype.type(0)
    for j in range(size):
        v0, v1, v2, v3 = x[V + j], x[V + R + j], x[V + 2 * R + j], x[V + 3 * R + j]
        o0, o1, o2, o3 = x[DO + j], x[DO + R + j], x[DO + 2 * R + j], x[DO + 3 * R + j]
        p0 += o0 * v0
        p1 += o1 * v1
        p2 += o2 * v2
        p3 += o3 * v3
        if outer:
            a0, a1, a2, a3 = x[AV + j], x[AV + R + j], x[AV + 2 * R + j], x[AV + 3 * R + j]
            if not before:
                o0, o1, o2, o3 = o0 * a0, o1 * a1, o2 * a2, o3 * a3
            p20 += o2 * a1 * v0
            p31 += o3 * a2 * v1
            p30 += o3 * (a1 * a2) * v0
            x[DOS + j], x[DOS + R + j] = o0, o1 * a0
            x[DOS + 2 * R + j], x[DOS + 3 * R + j] = o2 * (a0 * a1), o3 * (a0 * a1 * a2)
        else:
            p20 += o2 * v0
            p31 += o3 * v1
            p30 += o3 * v0
            x[DOS + j], x[DOS + R + j], x[DOS + 2 * R + j], x[DOS + 3 * R + j] = o0, o1, o2, o3
        p10 += o1 * v0
        p21 += o2 * v1
        p32 += o3 * v2
    dP[0], dP[1], dP[2], dP[3], dP[4] = p0, p1, p2, p3, p10
    dP[5], dP[6], dP[7], dP[8], dP[9] = p21, p32, p20, p31, p30


@njit(fastmath={"reassoc", "contract", "nsz"})
def _backward_rows(S, at, dS, d_at, n, z, x, size, outer):
    """n rows of s and of the gradient after four steps: sums over columns, dv, and the gradient before them."""
    wide_vectors()  # pyright: ignore[reportCallIssue]
    for i in range(n):
        s, ds = S[at + i * W : at + (i + 1) * W], dS[d_at + i * W : d_at + (i + 1) * W]
        q0, q1, q2, q3 = z[READS + i], z[READS + R + i], z[READS + 2 * R + i], z[READS + 3 * R + i]
        decay = z[ALL + i]
        k0, k1, k2, k3 = z[WRITES + i], z[WRITES + R + i], z[WRITES + 2 * R + i], z[WRITES + 3 * R + i]
        r0 = r1 = r2 = r3 = t0 = t1 = t2 = t3 = e = s.dtype.type(0)
        for j in range(size):
            p, d = s[j], ds[j]
            o0, o1, o2, o3 = x[DOS + j], x[DOS + R + j], x[DOS + 2 * R + j], x[DOS + 3 * R + j]
            r0 += p * o0
            r1 += p * o1
            r2 += p * o2
            r3 += p * o3
            t0 += d * x[VS + j]
            t1 += d * x[VS + R + j]
            t2 += d * x[VS + 2 * R + j]
            t3 += d * x[VS + 3 * R + j]
            x[DVS + j] += k0 * d
            x[DVS + R + j] += k1 * d
            x[DVS + 2 * R + j] += k2 * d
            x[DVS + 3 * R + j] += k3 * d
            if outer:
                d *= x[AV_ALL + j]
            e += p * d
            ds[j] = decay * d + q0 * o0 + q1 * o1 + q2 * o2 + q3 * o3
        z[QUERIED + i], z[QUERIED + R + i], z[QUERIED + 2 * R + i], z[QUERIED + 3 * R + i] = r0, r1, r2, r3
        z[WRITTEN + i], z[WRITTEN + R + i], z[WRITTEN + 2 * R + i], z[WRITTEN + 3 * R + i] = t0, t1, t2, t3
        z[KEPT + i] = e


@njit(fastmath={"contract", "nsz"})
def _columns_backward_rows(S, at, dS, d_at, n, z, x, size):
    """Of n rows, what the gradients of the decays of columns need, before `_backward_rows`."""
    for i in range(n):
        s, ds = S[at + i * W : at + (i + 1) * W], dS[d_at + i * W : d_at + (i + 1) * W]
        q0, q1, q2, q3 = z[READS + i], z[READS + R + i], z[READS + 2 * R + i], z[READS + 3 * R + i]
        decay = z[ALL + i]
        for j in range(size):
            p = s[j]
            x[INTER + j] += q0 * p
            x[INTER + R + j] += q1 * p
            x[INTER + 2 * R + j] += q2 * p
            x[INTER + 3 * R + j] += q3 * p
            x[AV_KEPT + j] += decay * p * ds[j] * x[AV_ALL + j]


@njit(fastmath={"contract", "nsz"})
def _keys_backward(z, n, dP, before):
    """dq, dk and the gradients of log decays of n keys, from the sums over columns."""
    p0, p1, p2, p3, p10, p21, p32, p20, p31, p30 = dP[0], dP[1], dP[2], dP[3], dP[4], dP[5], dP[6], dP[7], dP[8], dP[9]
    for i in range(n):
        a0, a1, a2, a3, u = z[A + i], z[A + R + i], z[A + 2 * R + i], z[A + 3 * R + i], z[U + i]
        k0, k1, k2, k3 = z[K + i], z[K + R + i], z[K + 2 * R + i], z[K + 3 * R + i]
        r1, r2, r3 = z[QUERIED + R + i], z[QUERIED + 2 * R + i], z[QUERIED + 3 * R + i]
        t0, t1, t2 = z[WRITTEN + i], z[WRITTEN + R + i], z[WRITTEN + 2 * R + i]
        x1, x2, x3 = z[READ + R + i], z[READ + 2 * R + i], z[READ + 3 * R + i]
        d0 = z[QUERIED + i]
        d1 = a0 * r1 + p10 * k0
        d2 = a0 * a1 * r2 + p20 * k0 * a1 + p21 * k1
        d3 = a0 * a1 * a2 * r3 + p30 * k0 * (a1 * a2) + p31 * k1 * a2 + p32 * k2
        kept = z[ALL + i] * z[KEPT + i]
        m1, m2, m3 = z[READS + R + i] * r1, z[READS + 2 * R + i] * r2, z[READS + 3 * R + i] * r3
        l0, l1, l2 = z[WRITES + i] * t0, z[WRITES + R + i] * t1, z[WRITES + 2 * R + i] * t2
        i20, i31, i30 = p20 * x2 * k0 * a1, p31 * x3 * k1 * a2, p30 * x3 * k0 * (a1 * a2)
        g0, g1 = kept + m1 + m2 + m3, kept + m2 + m3 + l0 + i20 + i30
        g2, g3 = kept + m3 + l0 + l1 + i31 + i30, kept + l0 + l1 + l2
        if not before:
            g0, g1, g2, g3 = g0 + z[READ + i] * d0, g1 + x1 * d1, g2 + x2 * d2, g3 + x3 * d3
            d0, d1, d2, d3 = a0 * d0, a1 * d1, a2 * d2, a3 * d3
        z[DG + i], z[DG + R + i], z[DG + 2 * R + i], z[DG + 3 * R + i] = g0, g1, g2, g3
        z[DQ + i], z[DQ + R + i] = d0 + p0 * k0 * u, d1 + p1 * k1 * u
        z[DQ + 2 * R + i], z[DQ + 3 * R + i] = d2 + p2 * k2 * u, d3 + p3 * k3 * u
        z[DK + i] = a1 * a2 * a3 * t0 + p10 * x1 + p20 * x2 * a1 + p30 * x3 * (a1 * a2) + p0 * z[Q + i] * u
        z[DK + R + i] = a2 * a3 * t1 + p21 * x2 + p31 * x3 * a2 + p1 * z[Q + R + i] * u
        z[DK + 2 * R + i] = a3 * t2 + p32 * x3 + p2 * z[Q + 2 * R + i] * u
        z[DK + 3 * R + i] = z[WRITTEN + 3 * R + i] + p3 * z[Q + 3 * R + i] * u


@njit(fastmath={"contract", "nsz"})
def _values_backward(x, P, size, outer, before):
    """dv (in V) and the gradients of the log decays of columns (in AV), from the sums over keys."""
    p0, p1, p2, p3, p10, p21, p32, p20, p31, p30 = P[0], P[1], P[2], P[3], P[4], P[5], P[6], P[7], P[8], P[9]
    for j in range(size):
        v0, v1, v2 = x[V + j], x[V + R + j], x[V + 2 * R + j]
        o0, o1, o2, o3 = x[DO + j], x[DO + R + j], x[DO + 2 * R + j], x[DO + 3 * R + j]
        d0, d1, d2, d3 = x[DVS + j], x[DVS + R + j], x[DVS + 2 * R + j], x[DVS + 3 * R + j]
        x[V + j], x[V + R + j], x[V + 2 * R + j], x[V + 3 * R + j] = p0 * o0, p1 * o1, p2 * o2, p3 * o3
        if outer:
            a0, a1, a2, a3 = x[AV + j], x[AV + R + j], x[AV + 2 * R + j], x[AV + 3 * R + j]
            y0, y1, y2, y3 = o0, o1, o2, o3
            if not before:
                y0, y1, y2, y3 = a0 * o0, a1 * o1, a2 * o2, a3 * o3
            l0, l1, l2 = d0 * x[VS + j], d1 * x[VS + R + j], d2 * x[VS + 2 * R + j]
            m0, m1 = x[INTER + j] * y0, x[INTER + R + j] * a0 * y1
            m2, m3 = x[INTER + 2 * R + j] * (a0 * a1) * y2, x[INTER + 3 * R + j] * (a0 * a1 * a2) * y3
            i10, i21, i32 = p10 * v0 * y1, p21 * v1 * y2, p32 * v2 * y3
            i20, i31, i30 = p20 * a1 * v0 * y2, p31 * a2 * v1 * y3, p30 * (a1 * a2) * v0 * y3
            kept = x[AV_KEPT + j]
            g0, g1 = kept + m1 + m2 + m3, kept + m2 + m3 + l0 + i20 + i30
            g2, g3 = kept + m3 + l0 + l1 + i31 + i30, kept + l0 + l1 + l2
            if not before:
                g0, g1, g2, g3 = g0 + m0, g1 + m1 + i10, g2 + m2 + i20 + i21, g3 + m3 + i30 + i31 + i32
            x[AV + j], x[AV + R + j], x[AV + 2 * R + j], x[AV + 3 * R + j] = g0, g1, g2, g3
            d0, d1, d2 = d0 * (a1 * a2 * a3), d1 * (a2 * a3), d2 * a3
            d0 += p10 * y1 + p20 * a1 * y2 + p30 * (a1 * a2) * y3
            d1 += p21 * y2 + p31 * a2 * y3
            d2 += p32 * y3
        else:
            d0 += p10 * o1 + p20 * o2 + p30 * o3
            d1 += p21 * o2 + p31 * o3
            d2 += p32 * o3
        x[V + j] += d0
        x[V + R + j] += d1
        x[V + 2 * R + j] += d2
        x[V + 3 * R + j] += d3


def _build_forward(dtype):
    def forward(pointer):
        counter, units = pointer[0], pointer[1]
        sequences, shared, heads, keys, values = pointer[3], pointer[4], pointer[5], pointer[6], pointer[7]
        head_parts, column_parts, rows, reverse = pointer[8], pointer[9], pointer[10], pointer[12]
        a_step, a_head, a_key, outer, before = pointer[13], pointer[14], pointer[15], pointer[16], pointer[17]
        ranges = array(pointer[2], 2 * sequences, np.int64)
        q, k = array(pointer[18], rows * shared * keys, dtype), array(pointer[19], rows * shared * keys, dtype)
        v, a = array(pointer[20], rows * heads * values, dtype), array(pointer[21], rows * heads * keys, dtype)
        av, u = array(pointer[22], rows * heads * values, dtype), array(pointer[23], heads * keys, dtype)
        state = array(pointer[24], sequences * heads * keys * values, dtype)
        y, last = array(pointer[25], v.size, dtype), array(pointer[26], state.size, dtype)
        S, P = np.empty(keys * W, dtype), np.empty(10, dtype)
        z, x = np.empty(KEY_ROWS * R, dtype), np.empty(VALUE_ROWS * R, dtype)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % (head_parts * column_parts), unit // (head_parts * column_parts)
            n, g = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
            each = heads // shared
            low, high = share(part // column_parts, head_parts, each)
            left, right = share(part % column_parts, column_parts, -(-values // W))
            for pair in range((high - low) * (right - left)):
                h = g * each + low + pair // (right - left)
                first = (left + pair % (right - left)) * W
                size = min(W, values - first)
                corner = (n * heads + h) * keys * values + first
                load(state, corner, keys, values, size, S)
                for i in range(0, end - begin, 4):
                    r, count = one + top * i, min(4, end - begin - i)
                    at = (r * heads + h) * values + first
                    _load_values(x, size, count, v, av, at, top * heads * values, outer)
                    x[O : O + 4 * R] = 0
                    P[:] = 0
                    for base in range(0, keys, W):
                        t = (r * shared + g) * keys + base
                        _load_keys(
                            z, min(W, keys - base), count, q, k, t, top * shared * keys, a,
                            r * a_step + h * a_head + base * a_key, top * a_step, a_key, u, h * keys + base, before, P,
                        )  # fmt: skip
                        _forward_rows(S, base * W, min(W, keys - base), z, x, size, outer)
                    _within(x, P, size, outer, before)
                    for m in range(count):
                        for j in range(size):
                            y[at + m * top * heads * values + j] = x[O + m * R + j]
                store(S, keys, values, size, last, corner)

    return forward


def _build_backward(dtype):
    def backward(pointer):
        counter, units = pointer[0], pointer[1]
        sequences, shared, heads, keys, values = pointer[3], pointer[4], pointer[5], pointer[6], pointer[7]
        head_parts, column_parts, rows, longest, reverse = (
            pointer[8], pointer[9], pointer[10], pointer[11], pointer[12],
        )  # fmt: skip
        a_step, a_head, a_key, outer, before = pointer[13], pointer[14], pointer[15], pointer[16], pointer[17]
        ranges = array(pointer[2], 2 * sequences, np.int64)
        q, k = array(pointer[18], rows * shared * keys, dtype), array(pointer[19], rows * shared * keys, dtype)
        v, a = array(pointer[20], rows * heads * values, dtype), array(pointer[21], rows * heads * keys, dtype)
        av, u = array(pointer[22], rows * heads * values, dtype), array(pointer[23], heads * keys, dtype)
        state = array(pointer[24], sequences * heads * keys * values, dtype)
        dy, dlast = array(pointer[25], v.size, dtype), array(pointer[26], state.size, dtype)
        parts = head_parts * column_parts
        dq, dk = array(pointer[27], parts * q.size, dtype), array(pointer[28], parts * q.size, dtype)
        dv, dav = array(pointer[29], v.size, dtype), array(pointer[30], v.size, dtype)
        da = array(pointer[31], column_parts * rows * heads * keys, dtype)
        du = array(pointer[32], column_parts * sequences * u.size, dtype)
        dstate = array(pointer[33], state.size, dtype)
        block = keys * W
        S, dS, held = np.empty(block, dtype), np.empty(block, dtype), np.empty(HELD * block, dtype)
        starts = np.empty((longest // (4 * HELD) + 1) * block, dtype)
        z, x = np.empty(KEY_ROWS * R, dtype), np.empty(VALUE_ROWS * R, dtype)
        P, dP, u_sums = np.empty(10, dtype), np.empty(10, dtype), np.empty(keys, np.float64)
        while True:
            unit = take(counter)
            if unit >= units:
                return
            part, group = unit % parts, unit // parts
            n, g = group // shared, group % shared
            begin, end = ranges[2 * n], ranges[2 * n + 1]
            one, top = (end - 1, -1) if reverse else (begin, 1)
            each, fours = heads // shared, (end - begin + 3) // 4
            column = part % column_parts
            low, high = share(part // column_parts, head_parts, each)
            left, right = share(column, column_parts, -(-values // W))
            for pair in range((high - low) * (right - left)):
                h = g * each + low + pair // (right - left)
                again = pair % (right - left) > 0  # another block of columns of this head has been here
                first = (left + pair % (right - left)) * W
                size = min(W, values - first)
                corner = (n * heads + h) * keys * values + first
                u_sums[:] = 0
                constant = 0.0
                load(state, corner, keys, values, size, S)
                load(dlast, corner, keys, values, size, dS)
                for c in range(2 * fours):
                    # forwards, keeping some states; then backwards, remaking those between them
                    back = c >= fours
                    i = 2 * fours - 1 - c if back else c
                    if not back:
                        if i % HELD == 0:
                            starts[i // HELD * block : (i // HELD + 1) * block] = S
                        if i // HELD == (fours - 1) // HELD:
                            continue
                    elif i % HELD == HELD - 1 or i == fours - 1:
                        held[:block] = starts[i // HELD * block : (i // HELD + 1) * block]
                        for m in range(i % HELD):
                            r, count = one + top * 4 * (i - i % HELD + m), 4
                            at = (r * heads + h) * values + first
                            _load_values(x, size, count, v, av, at, top * heads * values, outer)
                            for w in range(block):
                                held[(m + 1) * block + w] = held[m * block + w]
                            for base in range(0, keys, W):
                                t = (r * shared + g) * keys + base
                                _load_keys(
                                    z, min(W, keys - base), count, q, k, t, top * shared * keys, a,
                                    r * a_step + h * a_head + base * a_key, top * a_step, a_key,
                                    u, h * keys + base, before, P,
                                )  # fmt: skip
                                _write_rows(held, (m + 1) * block + base * W, min(W, keys - base), z, x, size, outer)
                    r, count = one + top * 4 * i, min(4, end - begin - 4 * i)
                    at = (r * heads + h) * values + first
                    _load_values(x, size, count, v, av, at, top * heads * values, outer)
                    if back:
                        _gather(dy, at, top * heads * values, count, size, 0, x, DO)
                        _between(x, dP, size, outer, before)
                        x[INTER : INTER + 8 * R] = 0  # and DVS
                        x[AV_KEPT : AV_KEPT + R] = 0
                        P[:] = 0
                    for m in range(4):
                        z[TOTAL + m] = 0
                    for base in range(0, keys, W):
                        t, n_keys = (r * shared + g) * keys + base, min(W, keys - base)
                        _load_keys(
                            z, n_keys, count, q, k, t, top * shared * keys, a,
                            r * a_step + h * a_head + base * a_key, top * a_step, a_key, u, h * keys + base, before, P,
                        )  # fmt: skip
                        if not back:
                            _write_rows(S, base * W, n_keys, z, x, size, outer)
                            continue
                        spot = i % HELD * block + base * W
                        if outer:
                            _columns_backward_rows(held, spot, dS, base * W, n_keys, z, x, size)
                        _backward_rows(held, spot, dS, base * W, n_keys, z, x, size, outer)
                        _keys_backward(z, n_keys, dP, before)
                        for m in range(count):
                            spot = part * q.size + t + m * top * shared * keys
                            _put(dq, spot, z, DQ + m * R, n_keys, pair > 0)
                            _put(dk, spot, z, DK + m * R, n_keys, pair > 0)
                            if a_key:
                                spot = ((column * rows + r + m * top) * heads + h) * keys + base
                                _put(da, spot, z, DG + m * R, n_keys, again)
                            else:
                                z[TOTAL + m] += _sum_of(z, DG + m * R, n_keys)
                        if before:
                            for m in range(4):
                                for w in range(n_keys):
                                    u_sums[base + w] += dP[m] * z[Q + m * R + w] * z[K + m * R + w]
                    if back:
                        _values_backward(x, P, size, outer, before)
                        for m in range(count):
                            spot = at + m * top * heads * values
                            _put(dv, spot, x, V + m * R, size, False)
                            if outer:
                                _put(dav, spot, x, AV + m * R, size, False)
                            constant += z[TOTAL + m]
                            if a_step and not a_key:
                                _put(da, (column * rows + r + m * top) * heads + h, z, TOTAL + m, 1, again)
                store(dS, keys, values, size, dstate, corner)
                spot = (column * sequences + n) * heads + h
                if a_step == 0:
                    da[spot] = constant + (da[spot] if again else 0)
                if before:
                    for i in range(keys):
                        du[spot * keys + i] = u_sums[i] + (du[spot * keys + i] if again else 0)

    return backward


_forward, _backward = Kernel(_build_forward), Kernel(_build_backward)


def _operands(q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
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
        one if g is None else g.exp().contiguous(),
        one if gv is None else gv.exp().contiguous(),
        one if u is None else u.contiguous(),
        state.contiguous(),
    ]
    return work, [*work.head, *strides, int(gv is not None), int(u is not None)], tensors, scale


def forward(q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
    work, head, tensors, _ = _operands(q, k, v, g, gv, u, state, reverse, cu_seqlens, scale)
    y, last = empty(v.shape, v.dtype), empty(state.shape, state.dtype)
    pointers = [tensor.data_ptr() for tensor in (*tensors, y, last)]
    _forward.run(v.dtype, [*head, *pointers], work.units, v.numel() * state.shape[2])
    return y, last


def backward(dy, dlast, q, k, v, g, gv, u, state, reverse, cu_seqlens, scale):
    work, head, tensors, scale = _operands(q, k, v, g, gv, u, state, reverse, cu_seqlens, scale)
    parts, columns, sequences = work.head_parts * work.column_parts, work.column_parts, len(work.ranges)
    heads, keys = state.shape[1:3]
    dq, dk = empty((parts, *q.shape), q.dtype), empty((parts, *k.shape), k.dtype)
    dv, dgv = empty(v.shape, v.dtype), empty(v.shape if gv is not None else (0,), v.dtype)
    dg = empty((columns, *(g.shape if g is not None and g.ndim > 1 else (sequences, heads))), v.dtype)
    du = empty((columns * sequences, heads, keys) if u is not None else (0,), v.dtype)
    dstate = empty(state.shape, state.dtype)
    given = (*tensors, dy.contiguous(), dlast.contiguous(), dq, dk, dv, dgv, dg, du, dstate)
    pointers = [tensor.data_ptr() for tensor in given]
    _backward.run(v.dtype, [*head, *pointers], work.units, 4 * v.numel() * state.shape[2])
    found = [_sum(dq).mul_(scale), _sum(dk), dv]
    if g is not None:
        found.append(_sum(dg) if g.ndim > 1 else dg.sum((0, 1)))
    if gv is not None:
        found.append(dgv)
    if u is not None:
        found.append(du.sum(0))
    return [*found, dstate]


def _sum(parts):
    return parts[0] if len(parts) == 1 else parts.sum(0)
