"""Matrix memories with one decay a head, as products of matrices over chunks of steps.

In a chunk, with S_0 the state that enters it, D_ij = Π_{j<s<=i} e^{g_s} and e_i = Π_{s<=i} e^{g_s}, a step's output is
o_i = e_i S_0ᵀ q_i + Σ_{j<=i} D_ij (q_i·k_j) u_j, and the next chunk gets w S_0 + Σ_j t_j k_j u_jᵀ, where t_j = D_Cj and
w = e_C. In linear attention u is v. In the delta rule u_i = β_i r_i, and the reads r solve a triangular system:
r_i = v_i - e_i S_0ᵀ k_i - Σ_{j<i} D_ij (k_i·k_j) u_j (arXiv:2412.06464, section 3.3). Backwards, dS is the gradient
of the state that leaves the chunk. With A = D ⊙ (do uᵀ) and P = D ⊙ (q kᵀ), both on and below the diagonal:

    dq = A k + e (S_0 do),  dk = Aᵀ q + t (dS u),  du = Pᵀ do + t (dSᵀ k),  dS <- w dS + Σ_i e_i q_i do_iᵀ.

In the delta rule, the transposed system gives y from du: z_j = du_j - Σ_{i>j} D_ij (k_i·k_j) y_i, y = β z. Then dv = y,
dβ = z·r, and k has three terms more. With M = -D ⊙ (y uᵀ) below the diagonal: M k + Mᵀ k - e (S_0 y).

A decay's gradient is the sum of the terms that contain it. Those inside the chunk are a matrix N, and step s gets all
N_ij with j < s <= i. They are added up row by row, never as a difference of longer sums, whose rounding errors exceed
the gradients of strong decays. Decays are multiplied one by one, so e^{-inf} = 0 is exact, and nothing overflows.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from typing import Any, NamedTuple

import numpy as np
import torch

from scanl.ops._cpu._columns import WIDTH, Work, unit_of
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import Kernel, kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import outlined
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import itemsize, units
from scanl.ops._cpu._team import take
from scanl.ops._cpu._vectors import STRIP, emitted
from scanl.ops.products.matrices import ADJACENT_STRIDE, BELOW, LOWER, UPPER, WHOLE, add_products, transpose

GROUP = 8  # rows of a triangular system that are solved one by one, between products
PREFETCHED_ROWS = 8  # rows between prefetching a row and using it
BLOCK = 256  # columns of the state at a time: more would leave the second-level cache
WIDER = 576  # the same forwards, where less memory is needed and there are at most BLOCK keys
LINE = 16  # widths are rounded up to whole vectors, and rows lie one vector further apart: else they share cache sets
PLACES = "m_states m_u m_r m_q m_k m_to_q m_to_k m_kt m_ke m_v m_do m_dv m_y m_turned_k m_turned_u m_D m_P m_A m_L m_B "
PLACES += "m_S m_dS m_turned_dS m_vectors"
_HEAD = (
    "ranges sequences shared heads keys values head_parts column_parts rows reverse d_step d_head delta q k v g beta "
    f"scale state size k_row v_row workers room needed block {PLACES} "
)


def _places_of(longest: int, size: int, keys: int, values: int, delta: bool) -> tuple[dict[str, int], int]:
    """Return where each matrix begins in the memory of a worker, and how many numbers they have in all.

    values: the most columns of the state at a time.
    """
    k_row, v_row, c_row = (-(-width // LINE) * LINE + LINE for width in (keys, values, size))
    chunks = -(-longest // size)
    numbers = {"states": chunks * v_row * k_row, **dict.fromkeys(("u", "r"), delta * chunks * size * v_row)}
    numbers |= dict.fromkeys(("q", "k", "to_q", "to_k", "kt", "ke"), size * k_row)
    numbers |= dict.fromkeys(("v", "do", "dv", "y"), size * v_row)
    numbers |= {"turned_k": k_row * c_row, "turned_u": v_row * c_row}
    numbers |= dict.fromkeys("DPALB", size * c_row) | dict.fromkeys(("S", "dS", "turned_dS"), k_row * v_row)
    numbers["vectors"] = 8 * c_row
    places, total = {"k_row": k_row, "v_row": v_row}, 0
    for name in PLACES.split():
        places[name] = total
        total += numbers[name.removeprefix("m_")]
    return places, total


@emitted
def _fetch(e, x, at):
    """Prefetch a strip of x: processors do not predict rows that lie far apart."""
    e.prefetch(e.at(x, at))


@helper()
def _take_rows(x, at, step, count, width, scale, m, to, row, rows, padded):
    """Copy `count` rows of x, `step` apart, times `scale`; fill up with zeros to `rows` rows of `padded` numbers."""
    outlined()
    for i in range(rows):
        target = m[to + i * row : to + i * row + padded]
        if i < count:
            for j in range(0, width, STRIP // x.itemsize):
                _fetch(x, at + min(i + PREFETCHED_ROWS, count - 1) * step + j)
            source = x[at + i * step : at + i * step + width]
            for j in range(width):
                target[j] = scale * source[j]
        for j in range(width if i < count else 0, padded):
            target[j] = 0


@helper()
def _give_rows(m, at, row, count, width, scale, x, to, step, add):
    """Write `count` rows, times `scale`, to x, `step` apart; or add them."""
    outlined()
    for i in range(count):
        source, target = m[at + i * row : at + i * row + width], x[to + i * step : to + i * step + width]
        if add:
            for j in range(width):
                target[j] += scale * source[j]
        else:
            for j in range(width):
                target[j] = scale * source[j]


@helper()
def _scale_rows(m, at, row, rows, width, by, sign, to):
    """Multiply each row by its number, `sign` m[by + i], and write it to the row at `to`."""
    outlined()
    for i in range(rows):
        source, target = m[at + i * row : at + i * row + width], m[to + i * row : to + i * row + width]
        factor = sign * m[by + i]
        for j in range(width):
            target[j] = factor * source[j]


@helper()
def _scale(m, at, row, rows, width, factor, to):
    """Multiply a matrix by a number."""
    outlined()
    for i in range(rows):
        source, target = m[at + i * row : at + i * row + width], m[to + i * row : to + i * row + width]
        for j in range(width):
            target[j] = factor * source[j]


@helper()
def _add(m, at, row, rows, width, to):
    """Add a matrix to the one at `to`."""
    outlined()
    for i in range(rows):
        source, target = m[at + i * row : at + i * row + width], m[to + i * row : to + i * row + width]
        for j in range(width):
            target[j] += source[j]


@helper()
def _decay(m, at, row, rows, by, low, sign):
    """Multiply a square matrix by the one at `by`, element by element, and by `sign`; zeros above its diagonal.

    low: how far below the diagonal the first zeros are.
    """
    outlined()
    for i in range(rows):
        target, factors = m[at + i * row : at + i * row + rows], m[by + i * row : by + i * row + rows]
        for j in range(i + 1 - low):
            target[j] *= sign * factors[j]
        for j in range(i + 1 - low, rows):
            target[j] = 0


@helper(fastmath={"contract", "nsz", "reassoc"})
def _dot(m, x, y, width):
    outlined()
    total, lhs, rhs = m.dtype.type(0), m[x : x + width], m[y : y + width]
    for j in range(width):
        total += lhs[j] * rhs[j]
    return total


@helper()
def _add_dots(m, x, y, row, rows, width, to):
    """Add the dot product of row i of x with row i of y to m[to + i]."""
    outlined()
    for i in range(rows):
        m[to + i] += _dot(m, x + i * row, y + i * row, width)


@helper(fastmath={"contract", "nsz", "reassoc"})
def _add_terms(m, x, y, row, rows, sums, to):
    """With N = x ⊙ y (rows, rows), add the sum of all N_ij with j < s <= i to m[to + s]."""
    outlined()
    below = m[sums : sums + rows]
    for j in range(rows):
        below[j] = 0
    for s in range(rows - 1, 0, -1):
        lhs, rhs = m[x + s * row : x + s * row + s], m[y + s * row : y + s * row + s]
        total = m.dtype.type(0)
        for j in range(s):
            below[j] += lhs[j] * rhs[j]
            total += below[j]
        m[to + s] += total


@helper()
def _decays_of(g, at, step, count, rows, m, D, row, e, t, a):
    """Write the decays of a chunk: D, e, t and, at `a`, each step's own."""
    outlined()
    for i in range(rows):
        m[a + i] = np.exp(g[at + i * step]) if i < count else 1
    none, running = m.dtype.type(0), m.dtype.type(1)
    tiny = m.dtype.type(1e-37)  # what is smaller becomes zero: numbers without leading bits slow down every product
    for i in range(rows):
        running *= m[a + i]
        running = none if running < tiny else running
        m[e + i] = running
        here, previous = m[D + i * row : D + i * row + rows], m[D + max(0, i - 1) * row : D + i * row]
        decay = m[a + i]
        for j in range(i):
            value = decay * previous[j]
            here[j] = none if value < tiny else value
        here[i] = 1
        for j in range(i + 1, rows):
            here[j] = 0
    for i in range(rows):
        m[t + i] = m[D + (rows - 1) * row + i]


@helper()
def _solve(m, x, row, L, c_row, beta, u, rows, width, back):
    """Solve r = x + L u, u = β r, for L strictly lower; x becomes r. If `back`, solve r = x + Lᵀ u."""
    outlined()
    one = m.dtype.type(1)
    for turn in range(0, rows, GROUP):
        first = rows - GROUP - turn if back else turn
        next_row = first + GROUP
        if back:
            o, remaining = L + next_row * c_row + first, rows - next_row
            add_products(
                m,
                x + first * row,
                row,
                GROUP,
                width,
                m,
                o,
                ADJACENT_STRIDE,
                c_row,
                remaining,
                m,
                u + next_row * row,
                row,
                WHOLE,
                one,
            )
        else:
            add_products(
                m,
                x + first * row,
                row,
                GROUP,
                width,
                m,
                L + first * c_row,
                c_row,
                ADJACENT_STRIDE,
                first,
                m,
                u,
                row,
                WHOLE,
                one,
            )
        for i in range(GROUP):
            s = next_row - 1 - i if back else first + i
            target, solved = m[x + s * row : x + s * row + width], m[u + s * row : u + s * row + width]
            for n in range(i):
                other = next_row - 1 - n if back else first + n
                factor = m[L + other * c_row + s] if back else m[L + s * c_row + other]
                source = m[u + other * row : u + other * row + width]
                for j in range(width):
                    target[j] += factor * source[j]
            factor = m[beta + s]
            for j in range(width):
                solved[j] = factor * target[j]


@helper()
def _product(m, out, out_row, rows, width, h, h_row, h_term, terms, w, w_row, region):
    """Write a product of matrices."""
    outlined()
    for i in range(rows):
        target = m[out + i * out_row : out + i * out_row + width]
        for j in range(width):
            target[j] = 0
    add_products(m, out, out_row, rows, width, m, h, h_row, h_term, terms, m, w, w_row, region, m.dtype.type(1))


class _Sizes(NamedTuple):
    """The sizes that all loops of a kernel use, read from the slots once."""

    shared: int  # heads of q and k
    heads: int
    keys: int
    values: int
    block: int  # the most columns of the state at a time
    d_step: int  # strides of the decays
    d_head: int
    delta: int  # whether it is the delta rule
    steps: int  # of a chunk
    k_row: int  # from a row of keys to the next, in the memory of a worker
    v_row: int
    c_row: int
    k_width: int  # the number of keys, rounded up


class _FlatOperands(NamedTuple):
    """The operands as flat arrays."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    scale: Any
    one: Any


class _Places(NamedTuple):
    """Indices in the memory of a worker. Arrays with a number for each step of a chunk lie from `vectors` on."""

    k: int
    kt: int  # t k
    ke: int  # -e k
    turned_k: int
    D: int
    L: int  # minus D ⊙ (k kᵀ) below the diagonal
    a: int
    e: int
    t: int
    b: int
    E: int  # gradients of log e, of log t, and of the decays inside the chunk
    F: int
    of_g: int
    spare: int


class _Chunk(NamedTuple):
    """A chunk of one head and one block of its columns."""

    r: int  # the row of its first step
    steps: int
    qk_at: int  # indices of its first step in q and k, and in v
    v_at: int
    qk_step: int  # from a step to the next
    v_step: int
    r_step: int
    h: int
    size: int  # columns
    v_width: int  # columns, rounded up


@helper(forceinline=True)
def _sizes(slots):
    return _Sizes(
        slots.shared, slots.heads, slots.keys, slots.values, slots.block, slots.d_step, slots.d_head, slots.delta,
        slots.size, slots.k_row, slots.v_row, slots.size + LINE, slots.k_row - LINE,
    )  # fmt: skip


@helper(forceinline=True)
def _given(slots, dtype):
    of_keys, of_steps = slots.rows * slots.shared * slots.keys, slots.rows * slots.heads
    scale = array(slots.scale, 1, dtype)
    return _FlatOperands(
        array(slots.q, of_keys, dtype), array(slots.k, of_keys, dtype), array(slots.v, of_steps * slots.values, dtype),
        array(slots.g, of_steps, dtype), array(slots.beta, of_steps, dtype), scale[0], scale.dtype.type(1),
    )  # fmt: skip


@helper(forceinline=True)
def _places(slots, c):
    v = slots.m_vectors
    return _Places(
        slots.m_k, slots.m_kt, slots.m_ke, slots.m_turned_k, slots.m_D, slots.m_L,
        v, v + c, v + 2 * c, v + 3 * c, v + 4 * c, v + 5 * c, v + 6 * c, v + 7 * c,
    )  # fmt: skip


@helper(forceinline=True)
def _blocks(sizes, unit):
    """Return how many blocks of columns a unit has."""
    return -(-unit.columns * WIDTH // sizes.block)


@helper(forceinline=True)
def _columns(sizes, unit, block):
    """Return the first column of a block of a unit, how many it has, and their number rounded up."""
    first = unit.column * WIDTH + block * sizes.block
    size = min(sizes.block, sizes.values - first, (unit.column + unit.columns) * WIDTH - first)
    return first, size, -(-size // LINE) * LINE


@helper(forceinline=True)
def _chunk(sizes, unit, h, first, size, v_width, n):
    r, shared, heads = unit.start + unit.direction * n * sizes.steps, sizes.shared, sizes.heads
    return _Chunk(
        r, min(sizes.steps, unit.steps - n * sizes.steps),
        (r * shared + unit.shared_head) * sizes.keys, (r * heads + h) * sizes.values + first,
        unit.direction * shared * sizes.keys, unit.direction * heads * sizes.values, unit.direction, h, size, v_width,
    )  # fmt: skip


@helper()
def _enter(sizes, operands, chunk, m, to):
    """Load the keys and the decays of a chunk, and what comes from them alone."""
    outlined()
    C, K, row, c_row, one = sizes.steps, sizes.k_width, sizes.k_row, sizes.c_row, operands.one
    _take_rows(operands.k, chunk.qk_at, chunk.qk_step, chunk.steps, sizes.keys, one, m, to.k, row, C, K)
    at, step = chunk.r * sizes.d_step + chunk.h * sizes.d_head, chunk.r_step * sizes.d_step
    _decays_of(operands.g, at, step, chunk.steps, C, m, to.D, c_row, to.e, to.t, to.a)
    _scale_rows(m, to.k, row, C, K, to.t, one, to.kt)
    transpose(m, to.k, row, C, K, m, to.turned_k, c_row)
    if sizes.delta:
        for i in range(C):
            spot = (chunk.r + chunk.r_step * i) * sizes.heads + chunk.h
            m[to.b + i] = operands.beta[spot] if i < chunk.steps else 0
        _scale_rows(m, to.k, row, C, K, to.e, -one, to.ke)
        _product(m, to.L, c_row, C, C, to.k, row, ADJACENT_STRIDE, K, to.turned_k, c_row, BELOW)
        _decay(m, to.L, c_row, C, to.D, 1, -one)


@helper()
def _write(sizes, operands, chunk, m, to, S, r, u):
    """Load the values of a chunk at r. In the delta rule, solve for r and u, from the state S (K, V) that enters it."""
    outlined()
    row = sizes.v_row
    _take_rows(
        operands.v,
        chunk.v_at,
        chunk.v_step,
        chunk.steps,
        chunk.size,
        operands.one,
        m,
        r,
        row,
        sizes.steps,
        chunk.v_width,
    )
    if sizes.delta:
        C, K, one = sizes.steps, sizes.k_width, operands.one
        add_products(m, r, row, C, chunk.v_width, m, to.ke, sizes.k_row, ADJACENT_STRIDE, K, m, S, row, WHOLE, one)
        _solve(m, r, row, to.L, sizes.c_row, to.b, u, sizes.steps, chunk.v_width, False)


@helper(fastmath={"contract", "nsz", "reassoc"})
def _finite(m, u, row, rows, width):
    """Return the index of the first row that has a number that is not finite."""
    outlined()
    for i in range(rows):
        source, total = m[u + i * row : u + i * row + width], m.dtype.type(0)
        for j in range(width):
            total += m.dtype.type(0) * source[j]
        if total != 0:
            return i
    return rows


@kernel(_HEAD + "out last")
def _forward(slots):
    dtype = slots.dtype
    ranges = array(slots.ranges, 2 * slots.sequences, np.int64)
    sizes, operands = _sizes(slots), _given(slots, dtype)
    heads, keys, values, C, K = sizes.heads, sizes.keys, sizes.values, sizes.steps, sizes.k_width
    k_row, v_row, c_row, one = sizes.k_row, sizes.v_row, sizes.c_row, operands.one
    to = _places(slots, c_row)
    q, y, P, S, u, spare = slots.m_q, slots.m_do, slots.m_P, slots.m_S, slots.m_v, slots.m_y
    r = slots.m_dv if sizes.delta else u
    out, of_states = array(slots.out, operands.v.size, dtype), slots.sequences * heads * keys * values
    state, last = array(slots.state, of_states, dtype), array(slots.last, of_states, dtype)
    m = array(slots.room + take(slots.workers) * slots.needed * itemsize(dtype), slots.needed, dtype)
    for number in units(slots):
        unit = unit_of(number, slots, ranges)
        blocks = _blocks(sizes, unit)
        for pair in range(unit.heads * blocks):
            h = unit.head + pair // blocks
            first, size, V = _columns(sizes, unit, pair % blocks)
            corner = (unit.n * heads + h) * keys * values + first
            _take_rows(state, corner, values, keys, size, one, m, S, v_row, K, V)
            for n in range(-(-unit.steps // C)):
                chunk = _chunk(sizes, unit, h, first, size, V, n)
                _enter(sizes, operands, chunk, m, to)
                _write(sizes, operands, chunk, m, to, S, r, u)
                _take_rows(operands.q, chunk.qk_at, chunk.qk_step, chunk.steps, keys, operands.scale, m, q, k_row, C, K)
                _product(m, P, c_row, C, C, q, k_row, ADJACENT_STRIDE, K, to.turned_k, c_row, BELOW)
                _decay(m, P, c_row, C, to.D, 0, one)
                # a tile multiplies later steps by zero, so those from one that is not finite on are cleared
                fault, source = _finite(m, u, v_row, C, V), u
                if fault < C:
                    source = spare
                    _scale(m, u, v_row, fault, V, one, spare)
                    fill(m, spare + fault * v_row, (C - fault) * v_row, 0)
                _product(m, y, v_row, C, V, P, c_row, ADJACENT_STRIDE, C, source, v_row, LOWER)
                _scale_rows(m, q, k_row, C, K, to.e, one, q)
                add_products(m, y, v_row, C, V, m, q, k_row, ADJACENT_STRIDE, K, m, S, v_row, WHOLE, one)
                fill(m, y + fault * v_row, (C - fault) * v_row, np.nan)
                _give_rows(m, y, v_row, chunk.steps, size, one, out, chunk.v_at, chunk.v_step, False)
                decay = m[to.e + C - 1]
                add_products(m, S, v_row, K, V, m, to.kt, ADJACENT_STRIDE, k_row, C, m, u, v_row, WHOLE, decay)
            _give_rows(m, S, v_row, keys, size, one, last, corner, values, False)


@kernel(_HEAD + "do dlast dq dk dv dg dbeta dstate")
def _backward(slots):
    dtype = slots.dtype
    ranges = array(slots.ranges, 2 * slots.sequences, np.int64)
    sizes, operands = _sizes(slots), _given(slots, dtype)
    heads, keys, values, C, K = sizes.heads, sizes.keys, sizes.values, sizes.steps, sizes.k_width
    k_row, v_row, c_row, one = sizes.k_row, sizes.v_row, sizes.c_row, operands.one
    to, parts, delta = _places(slots, c_row), slots.head_parts * slots.column_parts, sizes.delta
    m_q, m_do, m_dv, m_y, to_q, to_k = slots.m_q, slots.m_do, slots.m_dv, slots.m_y, slots.m_to_q, slots.m_to_k
    P, A, B, S, dS = slots.m_P, slots.m_A, slots.m_B, slots.m_S, slots.m_dS
    turned_u, turned_dS = slots.m_turned_u, slots.m_turned_dS
    of_states, decay_rows = slots.sequences * heads * keys * values, slots.rows if sizes.d_step else slots.sequences
    state, dlast = array(slots.state, of_states, dtype), array(slots.dlast, of_states, dtype)
    dstate, do = array(slots.dstate, of_states, dtype), array(slots.do, operands.v.size, dtype)
    dq, dk = array(slots.dq, parts * operands.q.size, dtype), array(slots.dk, parts * operands.q.size, dtype)
    dv, dg = array(slots.dv, operands.v.size, dtype), array(slots.dg, slots.column_parts * decay_rows * heads, dtype)
    dbeta = array(slots.dbeta, slots.column_parts * slots.rows * heads, dtype)
    m = array(slots.room + take(slots.workers) * slots.needed * itemsize(dtype), slots.needed, dtype)
    for number in units(slots):
        unit = unit_of(number, slots, ranges)
        chunks, blocks = -(-unit.steps // C), _blocks(sizes, unit)
        spot = unit.share % slots.column_parts * decay_rows * heads  # where the part's gradients of decays begin
        for pair in range(unit.heads * blocks):
            h = unit.head + pair // blocks
            first, size, V = _columns(sizes, unit, pair % blocks)
            again = pair % blocks > 0  # an earlier block of columns of this head has written
            corner = (unit.n * heads + h) * keys * values + first
            constant = 0.0  # the gradient of a decay that is constant over time
            _take_rows(state, corner, values, keys, size, one, m, S, v_row, K, V)
            transpose(m, S, v_row, K, V, m, slots.m_states, k_row)
            for n in range(chunks if delta else chunks - 1):  # the transposed state that enters each chunk
                chunk, previous = _chunk(sizes, unit, h, first, size, V, n), slots.m_states + n * v_row * k_row
                u = slots.m_u + n * C * v_row if delta else slots.m_v
                r = slots.m_r + n * C * v_row if delta else u
                _enter(sizes, operands, chunk, m, to)
                if delta:
                    transpose(m, previous, k_row, V, K, m, S, v_row)
                _write(sizes, operands, chunk, m, to, S, r, u)
                if n < chunks - 1:
                    after = previous + v_row * k_row
                    _scale(m, previous, k_row, V, K, m[to.e + C - 1], after)
                    add_products(m, after, k_row, V, K, m, u, ADJACENT_STRIDE, v_row, C, m, to.kt, k_row, WHOLE, one)
            _take_rows(dlast, corner, values, keys, size, one, m, dS, v_row, K, V)
            for n in range(chunks - 1, -1, -1):
                chunk, previous = _chunk(sizes, unit, h, first, size, V, n), slots.m_states + n * v_row * k_row
                u = slots.m_u + n * C * v_row if delta else slots.m_v
                r = slots.m_r + n * C * v_row if delta else u
                _enter(sizes, operands, chunk, m, to)
                if not delta:
                    _write(sizes, operands, chunk, m, to, S, r, u)
                _take_rows(
                    operands.q, chunk.qk_at, chunk.qk_step, chunk.steps, keys, operands.scale, m, m_q, k_row, C, K
                )
                _take_rows(do, chunk.v_at, chunk.v_step, chunk.steps, size, one, m, m_do, v_row, C, V)
                transpose(m, u, v_row, C, V, m, turned_u, c_row)
                transpose(m, dS, v_row, K, V, m, turned_dS, k_row)
                fill(m, to.E, 3 * c_row, 0)
                # inside the chunk
                _product(m, P, c_row, C, C, m_q, k_row, ADJACENT_STRIDE, K, to.turned_k, c_row, BELOW)
                _decay(m, P, c_row, C, to.D, 0, one)
                _product(m, A, c_row, C, C, m_do, v_row, ADJACENT_STRIDE, V, turned_u, c_row, BELOW)
                _add_terms(m, P, A, c_row, C, to.spare, to.of_g)
                _decay(m, A, c_row, C, to.D, 0, one)
                _product(m, m_dv, v_row, C, V, to.kt, k_row, ADJACENT_STRIDE, K, dS, v_row, WHOLE)
                add_products(m, m_dv, v_row, C, V, m, P, ADJACENT_STRIDE, c_row, C, m, m_do, v_row, UPPER, one)
                # with the state that enters it, and with the gradient of the state that leaves it
                _product(m, to_q, k_row, C, K, m_do, v_row, ADJACENT_STRIDE, V, previous, k_row, WHOLE)
                _scale_rows(m, to_q, k_row, C, K, to.e, one, to_q)
                _add_dots(m, m_q, to_q, k_row, C, K, to.E)
                _product(m, to_k, k_row, C, K, u, v_row, ADJACENT_STRIDE, V, turned_dS, k_row, WHOLE)
                _scale_rows(m, to_k, k_row, C, K, to.t, one, to_k)
                _add_dots(m, to.k, to_k, k_row, C, K, to.F)
                add_products(m, to_q, k_row, C, K, m, A, c_row, ADJACENT_STRIDE, C, m, to.k, k_row, LOWER, one)
                add_products(m, to_k, k_row, C, K, m, A, ADJACENT_STRIDE, c_row, C, m, m_q, k_row, UPPER, one)
                across = dtype.type(0)  # the terms that contain all decays of the chunk
                for j in range(V):
                    across += _dot(m, previous + j * k_row, turned_dS + j * k_row, K)
                across *= m[to.e + C - 1]
                offset = unit.share * operands.q.size + chunk.qk_at
                _give_rows(m, to_q, k_row, chunk.steps, keys, operands.scale, dq, offset, chunk.qk_step, pair > 0)
                if delta:
                    _solve(m, m_dv, v_row, to.L, c_row, to.b, m_y, C, V, True)
                    _product(m, B, c_row, C, C, m_y, v_row, ADJACENT_STRIDE, V, turned_u, c_row, BELOW)
                    _add_terms(m, to.L, B, c_row, C, to.spare, to.of_g)
                    _decay(m, B, c_row, C, to.D, 1, -one)
                    _product(m, to_q, k_row, C, K, m_y, v_row, ADJACENT_STRIDE, V, previous, k_row, WHOLE)
                    _scale_rows(m, to_q, k_row, C, K, to.e, -one, to_q)
                    _add_dots(m, to.k, to_q, k_row, C, K, to.E)
                    add_products(m, to_k, k_row, C, K, m, B, c_row, ADJACENT_STRIDE, C, m, to.k, k_row, LOWER, one)
                    add_products(m, to_k, k_row, C, K, m, B, ADJACENT_STRIDE, c_row, C, m, to.k, k_row, UPPER, one)
                    _add(m, to_q, k_row, C, K, to_k)
                    fill(m, to.spare, C, 0)
                    _add_dots(m, m_dv, r, v_row, C, V, to.spare)
                    for i in range(chunk.steps):
                        at = ((unit.share % slots.column_parts) * slots.rows + chunk.r + chunk.r_step * i) * heads + h
                        dbeta[at] = m[to.spare + i] + (dbeta[at] if again else 0)
                _give_rows(m, to_k, k_row, chunk.steps, keys, one, dk, offset, chunk.qk_step, pair > 0)
                du = m_y if delta else m_dv
                _give_rows(m, du, v_row, chunk.steps, size, one, dv, chunk.v_at, chunk.v_step, False)
                # dS enters the chunk before
                _scale(m, dS, v_row, K, V, m[to.e + C - 1], dS)
                _scale_rows(m, m_q, k_row, C, K, to.e, one, m_q)
                add_products(m, dS, v_row, K, V, m, m_q, ADJACENT_STRIDE, k_row, C, m, m_do, v_row, WHOLE, one)
                if delta:
                    add_products(m, dS, v_row, K, V, m, to.ke, ADJACENT_STRIDE, k_row, C, m, m_y, v_row, WHOLE, one)
                # a decay's terms also have the outputs from its step on, and the writes before it
                for i in range(C - 2, -1, -1):
                    m[to.E + i] += m[to.E + i + 1]
                for i in range(chunk.steps):
                    gradient = m[to.of_g + i] + m[to.E + i] + across
                    across += m[to.F + i]
                    if sizes.d_step:
                        at = spot + (chunk.r + chunk.r_step * i) * heads + h
                        dg[at] = gradient + (dg[at] if again else 0)
                    else:
                        constant += gradient
            _give_rows(m, dS, v_row, keys, size, one, dstate, corner, values, False)
            if sizes.d_step == 0:
                at = spot + unit.n * heads + h
                dg[at] = constant + (dg[at] if again else 0)


def _run(chosen: Kernel, work: Work, slots: dict[str, Any], elements: int, *, back: bool) -> None:
    keys, values, longest = work.slots["keys"], work.slots["values"], work.slots["longest"]
    wide = 64 if not slots["delta"] or keys > 128 else 32  # steps of a chunk; the fastest by measurement
    size = min(wide, -(-longest // LINE) * LINE)
    block = BLOCK if back or keys > BLOCK else WIDER
    places, needed = _places_of(longest if back else 0, size, keys, min(values, block), slots["delta"])
    workers = torch.zeros(1, dtype=torch.int64)
    memory = empty((min(torch.get_num_threads(), work.units), needed), slots["v"].dtype)
    contents = {**slots, **places, "size": size, "workers": workers, "room": memory, "needed": needed, "block": block}
    packed = chosen.pack(**{name: contents[name] for name in chosen.slots.numbers})
    chosen.run(memory.dtype, packed, work.units, elements)


def run_forward(work: Work, slots: dict[str, Any], elements: int) -> None:
    """Write the outputs and the last state to `out` and `last` in `slots`, the kernel's slots."""
    _run(_forward, work, slots, elements, back=False)


def run_backward(work: Work, slots: dict[str, Any], elements: int) -> None:
    """Write the gradients of the operands to `dq` and so on in `slots`."""
    _run(_backward, work, slots, elements, back=True)
