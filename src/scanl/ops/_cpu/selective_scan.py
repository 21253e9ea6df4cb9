"""Selective scan: the N states of a block of channels stay in the first-level cache from step to step.

Lanes are channels: row n of the scratch memory holds state n of every channel of the block. The backward pass first
runs forwards and stores the state every CHUNK steps. Then it goes through the chunks from the last to the first and
recomputes the states of each. With s_t the gradient of h_t, a_t = exp(Δ_t A) and p_t = a_t h_{t-1} s_t,

    s_t = C_t dy_t + a_{t+1} s_{t+1},       dA   = Σ_t Δ_t p_t,
    dΔ_t = Σ_n A p_t + u_t Σ_n B_t s_t,     du_t = Δ_t Σ_n B_t s_t + D dy_t,

and dB_t, dC_t are the sums of Δ_t u_t s_t and of dy_t h_t over the channels of a group. For complex operands, the
factors A, B, C, a and h are conjugated, and the gradient of a real operand is the real part.

Usually B and C of a step and a state are one number for all lanes. They are rows, with a number for each lane, if
groups are narrow (a block then has several groups) or if B or C is constant over time (each channel then has its own).
"""

import functools
import itertools
import operator
from typing import NamedTuple

import numpy as np
import torch

from scanl.ops._cpu._cells import rows
from scanl.ops._cpu._flat import FlatType, array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import intrinsic, outlined
from scanl.ops._cpu._rows import fill, move
from scanl.ops._cpu._sigmoid import log_sigmoid, sigmoid
from scanl.ops._cpu._slots import channels, constant_of, units
from scanl.ops._cpu._team import CORES
from scanl.ops.offsets import offsets

# rows: batch × steps; groups, parts: of B and of C; groups is 0 for a matrix that is constant over time
_WORK = (
    "ranges sequences steps longest width states span blocks block parts B_groups C_groups B_parts C_parts wide rows"
)
_HEAD = _WORK + " reverse positive A B C D bias state"

W = 128  # most channels of a block; constant, so that the compiler knows that rows of an array do not overlap
CHUNK = 16  # steps whose states the backward pass holds at a time
MIN_GROUP_CHANNELS = 32  # with fewer channels in a group, B and C become rows
OUTLINED_FLAGS = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}
FLAGS = {**OUTLINED_FLAGS, "forceinline": True}

# Rows of W in the scratch of a step
DELTA, DU, Y, BIAS, SKIP, DY, WRITTEN, STEP, ROWS = (n * W for n in range(9))
# Rows of W in the scratch of state n: h and A, the gradient of h, and the current chunk's part of the gradient of A
H, A, DH, DA = (n * W for n in range(4))

_real = constant_of(lambda dtype: np.finfo(dtype).dtype)
_double = constant_of(lambda dtype: np.result_type(dtype, np.float64))


@intrinsic
def lane(typingctx, b, j):
    """Return b if it is one number for all lanes, or the j-th number of a row."""
    if not isinstance(b, FlatType):
        return b(b, j), lambda context, builder, signature, args: args[0]
    read = typingctx.resolve_function_type(operator.getitem, (b, j), {})
    return b.dtype(*read.args), lambda context, builder, signature, args: context.get_function(operator.getitem, read)(
        builder, args
    )


@helper(**FLAGS)
def _positive(x):
    """Return softplus(x) as torch computes it: x itself above 20."""
    return x if x > 20 else -log_sigmoid(-x)


@helper(**OUTLINED_FLAGS)
def _enter(z, u, delta, positive):
    """Load the inputs of a step: Δ, Δ u, and D u, the initial value of the sum for y."""
    outlined()
    if positive:
        for j in range(u.size):
            z[DELTA + j] = _positive(delta[j] + z[BIAS + j])
    else:
        for j in range(u.size):
            z[DELTA + j] = delta[j] + z[BIAS + j]
    for j in range(u.size):
        z[DU + j] = z[DELTA + j] * u[j]
        z[Y + j] = z[SKIP + j] * u[j]


@helper(**FLAGS)
def _advance(s, z, size, b, c):
    """Advance state n by one step, and add its contribution to y."""
    for j in range(size):
        h = exp(z[DELTA + j] * s[A + j]) * s[H + j] + z[DU + j] * lane(b, j)
        s[H + j] = h
        z[Y + j] += (h * lane(c, j)).real


@helper(**FLAGS)
def _carry(s, z, size, b):
    """Advance state n by one step."""
    for j in range(size):
        s[H + j] = exp(z[DELTA + j] * s[A + j]) * s[H + j] + z[DU + j] * lane(b, j)


@helper(**FLAGS)
def _keep(saved, s, z, size, b):
    """Like `_carry`, but store the decay and the state before the step."""
    for j in range(size):
        a, h = exp(z[DELTA + j] * s[A + j]), s[H + j]
        saved[j], saved[W + j] = a, h
        s[H + j] = a * h + z[DU + j] * lane(b, j)


@helper(fastmath={"reassoc", "contract", "nsz"})
def _retreat(saved, s, z, size, b, c):
    """Move the gradient of state n one step back; return the gradients of b and c."""
    db = dc = s.dtype.type(0)
    for j in range(size):
        a, previous = saved[j], saved[W + j]
        h = a * previous + z[DU + j] * b
        z[Y + j] += (h * c).real
        d = s[DH + j] + z[DY + j] * c.conjugate()
        dc += z[DY + j] * h.conjugate()
        db += z[DU + j] * d
        z[WRITTEN + j] += (d * b.conjugate()).real
        d *= a.conjugate()
        s[DH + j] = d
        d *= previous.conjugate()
        z[STEP + j] += (d * s[A + j].conjugate()).real
        s[DA + j] += d * z[DELTA + j]
    return db, dc


@helper(**FLAGS)
def _retreat_rows(saved, s, z, size, b, c, db, dc):
    """Like `_retreat`, but add the gradients to rows."""
    for j in range(size):
        a, previous = saved[j], saved[W + j]
        h = a * previous + z[DU + j] * b[j]
        z[Y + j] += (h * c[j]).real
        d = s[DH + j] + z[DY + j] * c[j].conjugate()
        dc[j] += z[DY + j] * h.conjugate()
        db[j] += z[DU + j] * d
        z[WRITTEN + j] += (d * b[j].conjugate()).real
        d *= a.conjugate()
        s[DH + j] = d
        d *= previous.conjugate()
        z[STEP + j] += (d * s[A + j].conjugate()).real
        s[DA + j] += d * z[DELTA + j]


@helper(**FLAGS)
def _gate(z, y, gate):
    for j in range(y.size):
        y[j] = z[Y + j] * (gate[j] * sigmoid(gate[j]))


@helper(**FLAGS)
def _ungate(z, dy, gate):
    for j in range(dy.size):
        z[DY + j] = dy[j] * (gate[j] * sigmoid(gate[j]))


@helper(**FLAGS)
def _gate_backward(z, dy, gate, dgate):
    for j in range(dy.size):
        p = sigmoid(gate[j])
        dgate[j] = dy[j] * z[Y + j] * (p + gate[j] * p * (1 - p))


@helper(**OUTLINED_FLAGS)
def _leave(z, u, delta, du, ddelta, sums, positive):
    """Write the gradients of u and Δ; add to the sums for the gradients of D and the bias."""
    outlined()
    for j in range(u.size):
        du[j] = z[DELTA + j] * z[WRITTEN + j] + z[SKIP + j] * z[DY + j]
        ddelta[j] = z[STEP + j] + u[j] * z[WRITTEN + j]
    if positive:
        for j in range(u.size):
            x = delta[j] + z[BIAS + j]
            ddelta[j] = ddelta[j] if x > 20 else ddelta[j] * sigmoid(x)
    for j in range(u.size):
        sums[j] += z[DY + j] * u[j]
        sums[W + j] += ddelta[j]


@helper(**OUTLINED_FLAGS)
def _load(s, at, step, matrix, start, states, size):
    """Transpose (size, states), from `start` on, into rows at stride `step`."""
    outlined()
    for n in range(states):
        row, column = s[at + n * step : at + n * step + size], matrix[start + n :]
        for j in range(size):
            row[j] = column[j * states]


@helper(**OUTLINED_FLAGS)
def _store(s, at, step, matrix, start, states, size):
    outlined()
    for j in range(size):
        row, column = matrix[start + j * states : start + (j + 1) * states], s[at + j :]
        for n in range(states):
            row[n] = column[n * step]


@helper(**OUTLINED_FLAGS)
def _spread(target, B, row, groups, width, first, states, size):
    """Copy B of one step to the lanes: each channel gets the B of its group."""
    outlined()
    for j in range(size):
        at = (row * groups + (first + j) // (width // groups)) * states
        for n in range(states):
            target[n * W + j] = B[at + n]


@helper(**OUTLINED_FLAGS)
def _gather(source, dB, row, groups, width, first, states, size):
    """Sum rows over the channels of each group, then clear the rows."""
    outlined()
    per_group = width // groups
    for j in range(size):
        at = (row * groups + (first + j) // per_group) * states
        new = j == 0 or (first + j) % per_group == 0
        for n in range(states):
            dB[at + n] = source[n * W + j] + (0 if new else dB[at + n])
            source[n * W + j] = 0


@helper(**OUTLINED_FLAGS)
def _flush(source, at, step, total, start, states, size):
    """Add a chunk's sums to the sums over all time, which have a wider dtype; then clear the chunk's sums."""
    outlined()
    for n in range(states):
        for j in range(size):
            total[start + n * W + j] += source[at + n * step + j]
            source[at + n * step + j] = 0


@helper(**FLAGS)
def _nth(source, n, step):
    """Return the rows of state n."""
    return source[n * step : (n + 1) * step]


class _Sizes(NamedTuple):
    """The sizes that all loops of a kernel use, read from the slots once."""

    states: int
    width: int
    rows: int
    B_groups: int
    C_groups: int
    B_parts: int
    C_parts: int
    wide: int
    positive: int


class _Block(NamedTuple):
    """The block of channels of a unit of work."""

    column: int  # index among all blocks
    group: int  # group of B and C
    first: int
    size: int


@helper(**FLAGS)
def _sizes(slots):
    return _Sizes(
        slots.states, slots.width, slots.rows, slots.B_groups, slots.C_groups, slots.B_parts, slots.C_parts,
        slots.wide, slots.positive,
    )  # fmt: skip


@helper(**FLAGS)
def _columns(slots):
    """Return the number of all blocks of channels."""
    return slots.width // max(1, slots.span) * slots.blocks


@helper(**FLAGS)
def _block(column, span, blocks, block):
    group = column // blocks
    first = group * span + column % blocks * block
    return _Block(column, group, first, min(block, (group + 1) * span - first))


@helper(**FLAGS)
def _time(i, begin, end, reverse):
    """Return the time index of the i-th step of the scan."""
    return end - 1 - i if reverse else begin + i


@helper(**FLAGS)
def _open(slots, s, step, z, bs, cs, block, dtype, real):
    """Load the constants over time: A, D, the bias of Δ, and B and C if they are."""
    width, states, first, size = slots.width, slots.states, block.first, block.size
    _load(s, A, step, array(slots.A, width * states, dtype), first * states, states, size)
    fill(z, SKIP, W, 0)
    fill(z, BIAS, W, 0)
    if slots.D:
        move(array(slots.D, width, real), first, size, z, SKIP)
    if slots.bias:
        move(array(slots.bias, width, real), first, size, z, BIAS)
    if slots.B_groups == 0:
        _load(bs, 0, W, array(slots.B, width * states, dtype), first * states, states, size)
    if slots.C_groups == 0:
        _load(cs, 0, W, array(slots.C, width * states, dtype), first * states, states, size)


@kernel(_HEAD + " last", rows="u delta z y")
def _forward(slots):
    dtype = slots.dtype
    real = _real(dtype)
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    sizes, sequences = _sizes(slots), slots.sequences
    states, width, B_groups, C_groups = sizes.states, sizes.width, sizes.B_groups, sizes.C_groups
    B = array(slots.B, max(sizes.rows * B_groups, width) * states, dtype)
    C = array(slots.C, max(sizes.rows * C_groups, width) * states, dtype)
    state = array(slots.state, sequences * width * states, dtype)
    last = array(slots.last, sequences * width * states, dtype)
    step, columns = 2 * W, _columns(slots)
    s, z = np.empty(states * step, dtype), np.empty(ROWS, real)
    bs, cs = np.empty(sizes.wide * states * W, dtype), np.empty(sizes.wide * states * W, dtype)
    for unit in units(slots):
        block, share = _block(unit % columns, slots.span, slots.blocks, slots.block), unit // columns
        first, size, group = block.first, block.size, block.group
        _open(slots, s, step, z, bs, cs, block, dtype, real)
        for n in range(sequences * share // slots.parts, sequences * (share + 1) // slots.parts):
            batch, begin, end = ranges[3 * n], ranges[3 * n + 1], ranges[3 * n + 2]
            corner = (n * width + first) * states
            _load(s, H, step, state, corner, states, size)
            for i in range(end - begin):
                t = _time(i, begin, end, slots.reverse)
                row = batch * slots.steps + t
                us = channels(slots.u, batch, t, first, size, real)
                _enter(z, us, channels(slots.delta, batch, t, first, size, real), sizes.positive)
                if sizes.wide:
                    if B_groups:
                        _spread(bs, B, row, B_groups, width, first, states, size)
                    if C_groups:
                        _spread(cs, C, row, C_groups, width, first, states, size)
                    for m in range(states):
                        _advance(_nth(s, m, step), z, size, _nth(bs, m, W), _nth(cs, m, W))
                else:
                    b = (row * B_groups + group % B_groups) * states
                    c = (row * C_groups + group % C_groups) * states
                    for m in range(states):
                        _advance(_nth(s, m, step), z, size, B[b + m], C[c + m])
                y = channels(slots.y, batch, t, first, size, real)
                if slots.z.at:
                    _gate(z, y, channels(slots.z, batch, t, first, size, real))
                else:
                    for j in range(size):
                        y[j] = z[Y + j]
            _store(s, H, step, last, corner, states, size)


@helper(**FLAGS)
def _remember(starts, s, step, at, states, block, size):
    """Store the states before chunk `at`."""
    for m in range(states):
        move(s, m * step + H, size, starts, (at * states + m) * block)


@helper(**FLAGS)
def _recall(starts, s, step, at, states, block, size):
    """Load the states that `_remember` stored."""
    for m in range(states):
        move(starts, (at * states + m) * block, size, s, m * step + H)


@helper(**FLAGS)
def _step_forward(slots, sizes, block, batch, t, s, step, z, bs, B, saved, place, back, real):
    """Advance all states by one step. If `back`, store each one's decay and its value before the step."""
    states, first, size, wide = sizes.states, block.first, block.size, sizes.wide
    row = batch * slots.steps + t
    us = channels(slots.u, batch, t, first, size, real)
    _enter(z, us, channels(slots.delta, batch, t, first, size, real), sizes.positive)
    b = (row * sizes.B_groups + block.group % max(1, sizes.B_groups)) * states
    if wide and sizes.B_groups:
        _spread(bs, B, row, sizes.B_groups, sizes.width, first, states, size)
    for m in range(states):
        sm, keep = _nth(s, m, step), _nth(saved, place * states + m, 2 * W)
        if wide and back:
            _keep(keep, sm, z, size, _nth(bs, m, W))
        elif wide:
            _carry(sm, z, size, _nth(bs, m, W))
        elif back:
            _keep(keep, sm, z, size, B[b + m])
        else:
            _carry(sm, z, size, B[b + m])


@helper(**FLAGS)
def _states_back(sizes, block, row, s, step, z, B, C, bs, cs, dB, dC, dbs, dcs, saved, place):
    """Move the gradients of all states one step back; write the gradients of B and C."""
    states, width, first, size, group = sizes.states, sizes.width, block.first, block.size, block.group
    B_groups, C_groups, total = sizes.B_groups, sizes.C_groups, sizes.rows
    b = (row * B_groups + group % max(1, B_groups)) * states
    c = (row * C_groups + group % max(1, C_groups)) * states
    B_row, C_row = block.column % sizes.B_parts * total + row, block.column % sizes.C_parts * total + row
    if sizes.wide:
        if B_groups:
            _spread(bs, B, row, B_groups, width, first, states, size)
        if C_groups:
            _spread(cs, C, row, C_groups, width, first, states, size)
        for m in range(states):
            sm, keep = _nth(s, m, step), _nth(saved, place * states + m, 2 * W)
            bm, cm, dbm, dcm = _nth(bs, m, W), _nth(cs, m, W), _nth(dbs, m, W), _nth(dcs, m, W)
            _retreat_rows(keep, sm, z, size, bm, cm, dbm, dcm)
        if B_groups:
            _gather(dbs, dB, B_row, B_groups, width, first, states, size)
        if C_groups:
            _gather(dcs, dC, C_row, C_groups, width, first, states, size)
    else:
        for m in range(states):
            sm, keep = _nth(s, m, step), _nth(saved, place * states + m, 2 * W)
            db, dc = _retreat(keep, sm, z, size, B[b + m], C[c + m])
            dB[(B_row * B_groups + group % B_groups) * states + m] = db
            dC[(C_row * C_groups + group % C_groups) * states + m] = dc


@helper(**FLAGS)
def _step_back(slots, sizes, block, batch, t, s, step, z, B, C, bs, cs, dB, dC, dbs, dcs, saved, place, sums, real):
    """Move all gradients one step back, and write the gradients of the step's inputs: u, Δ, B, C and the gate."""
    first, size = block.first, block.size
    us = channels(slots.u, batch, t, first, size, real)
    deltas = channels(slots.delta, batch, t, first, size, real)
    _enter(z, us, deltas, sizes.positive)
    fill(z, WRITTEN, W, 0)
    fill(z, STEP, W, 0)
    dy = channels(slots.dy, batch, t, first, size, real)
    if slots.z.at:
        _ungate(z, dy, channels(slots.z, batch, t, first, size, real))
    else:
        for j in range(size):
            z[DY + j] = dy[j]
    row = batch * slots.steps + t
    _states_back(sizes, block, row, s, step, z, B, C, bs, cs, dB, dC, dbs, dcs, saved, place)
    du = channels(slots.du, batch, t, first, size, real)
    _leave(z, us, deltas, du, channels(slots.ddelta, batch, t, first, size, real), sums, sizes.positive)
    if slots.z.at:
        gates = channels(slots.z, batch, t, first, size, real)
        _gate_backward(z, dy, gates, channels(slots.dz, batch, t, first, size, real))


@helper(**FLAGS)
def _close(slots, sizes, block, share, totals, sums, dA, dB, dC, real):
    """Write the sums over time: the gradients of A, D and the bias, and of B and C if constant over time."""
    states, width, first, size = sizes.states, sizes.width, block.first, block.size
    corner = (share * width + first) * states
    _store(totals, 0, W, dA, corner, states, size)
    if sizes.B_groups == 0:
        _store(totals, states * W, W, dB, corner, states, size)
    if sizes.C_groups == 0:
        _store(totals, 2 * states * W, W, dC, corner, states, size)
    dD, dbias = array(slots.dD, slots.parts * width, real), array(slots.dbias, slots.parts * width, real)
    for j in range(size):
        dD[share * width + first + j] = sums[j]
        dbias[share * width + first + j] = sums[W + j]


@kernel(_HEAD + " dlast dA dB dC dD dbias dstate", rows="u delta z dy du ddelta dz")
def _backward(slots):
    dtype = slots.dtype
    real, double = _real(dtype), _double(dtype)
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    sizes, parts = _sizes(slots), slots.parts
    states, width, rows, wide = sizes.states, sizes.width, sizes.rows, sizes.wide
    B = array(slots.B, max(rows * sizes.B_groups, width) * states, dtype)
    C = array(slots.C, max(rows * sizes.C_groups, width) * states, dtype)
    state = array(slots.state, slots.sequences * width * states, dtype)
    dlast, dstate = array(slots.dlast, state.size, dtype), array(slots.dstate, state.size, dtype)
    dA = array(slots.dA, parts * width * states, dtype)
    dB = array(slots.dB, max(sizes.B_parts * rows * sizes.B_groups, parts * width) * states, dtype)
    dC = array(slots.dC, max(sizes.C_parts * rows * sizes.C_groups, parts * width) * states, dtype)

    step, columns = 4 * W, _columns(slots)
    s, z, saved = np.empty(states * step, dtype), np.empty(ROWS, real), np.empty(CHUNK * states * 2 * W, dtype)
    starts = np.empty(((slots.longest + CHUNK - 1) // CHUNK) * states * slots.block, dtype)
    totals, sums = np.empty(3 * states * W, double), np.empty(2 * W, np.float64)
    bs, cs = np.empty(wide * states * W, dtype), np.empty(wide * states * W, dtype)
    dbs, dcs = np.empty(wide * states * W, dtype), np.empty(wide * states * W, dtype)
    for unit in units(slots):
        block, share = _block(unit % columns, slots.span, slots.blocks, slots.block), unit // columns
        size = block.size
        _open(slots, s, step, z, bs, cs, block, dtype, real)
        for m in range(states):
            fill(s, m * step + DA, W, 0)
        fill(totals, 0, totals.size, 0)
        fill(sums, 0, sums.size, 0)
        fill(dbs, 0, dbs.size, 0)
        fill(dcs, 0, dcs.size, 0)
        for n in range(slots.sequences * share // parts, slots.sequences * (share + 1) // parts):
            batch, begin, end = ranges[3 * n], ranges[3 * n + 1], ranges[3 * n + 2]
            corner = (n * width + block.first) * states
            _load(s, H, step, state, corner, states, size)
            _load(s, DH, step, dlast, corner, states, size)
            count = (end - begin + CHUNK - 1) // CHUNK
            # run forwards to the last chunk; then each chunk forwards and backwards, from the last to the first
            for turn in range(2 * count - 1):
                back = turn >= count - 1
                chunk = 2 * count - 2 - turn if back else turn
                low, high = chunk * CHUNK, min((chunk + 1) * CHUNK, end - begin)
                if turn < count:
                    _remember(starts, s, step, chunk, states, slots.block, size)
                else:
                    _recall(starts, s, step, chunk, states, slots.block, size)
                for i in range(low, high):
                    t = _time(i, begin, end, slots.reverse)
                    _step_forward(slots, sizes, block, batch, t, s, step, z, bs, B, saved, i - low, back, real)
                if not back:
                    continue
                for i in range(high - 1, low - 1, -1):
                    t = _time(i, begin, end, slots.reverse)
                    _step_back(
                        slots, sizes, block, batch, t, s, step, z, B, C, bs, cs, dB, dC, dbs, dcs, saved, i - low,
                        sums, real,
                    )  # fmt: skip
                _flush(s, DA, step, totals, 0, states, size)
                if wide:
                    _flush(dbs, 0, W, totals, states * W, states, size)
                    _flush(dcs, 0, W, totals, 2 * states * W, states, size)
            _store(s, DH, step, dstate, corner, states, size)
        _close(slots, sizes, block, share, totals, sums, dA, dB, dC, real)


class _Work(NamedTuple):
    """How the work is divided into units: a unit is a block of channels for a part of the sequences."""

    ranges: np.ndarray  # for each sequence: batch row, first step, the step after its last
    parts: int  # parts of the sequences
    B_parts: int  # partial sums of the gradient of B; next, of C
    C_parts: int
    units: int
    slots: dict[str, int]  # the kernels' slots for this division


@functools.lru_cache(512)
def _divide(
    batch: int, steps: int, width: int, states: int, B_groups: int, C_groups: int, bounds: tuple[int, ...] | None
) -> _Work:
    """Divide the work into units. B_groups, C_groups: 0 if B or C is constant over time."""
    if bounds is None:
        ranges = np.array([(b, 0, steps) for b in range(batch)], np.int64).reshape(-1, 3)
    else:
        ranges = np.array([(0, a, b) for a, b in itertools.pairwise(bounds)], np.int64).reshape(-1, 3)
    groups = max(1, B_groups, C_groups)
    narrow = groups > 1 and width // groups < MIN_GROUP_CHANNELS
    span = width if narrow else width // groups  # blocks do not cross multiples of this many channels
    least = max(-(-span // W), -(-CORES * span // max(1, width * len(ranges))))
    unit = width // groups if narrow else 16
    block = -(-span // (unit * max(1, least))) * unit
    block = max(1, min(block, W // unit * unit, span))
    blocks = -(-span // block)
    columns = width // max(1, span) * blocks
    parts = min(len(ranges), -(-2 * CORES // max(1, columns)))
    B_parts, C_parts = (
        1 if g == 0 or (narrow and g > 1) else blocks if g > 1 else columns for g in (B_groups, C_groups)
    )
    longest = int((ranges[:, 2] - ranges[:, 1]).max(initial=0))
    wide = int(narrow or B_groups == 0 or C_groups == 0)
    slots = {
        "ranges": ranges.ctypes.data, "sequences": len(ranges), "steps": steps, "longest": longest, "width": width,
        "states": states, "span": span, "blocks": blocks, "block": block, "parts": parts, "B_groups": B_groups,
        "C_groups": C_groups, "B_parts": max(1, B_parts), "C_parts": max(1, C_parts), "wide": wide,
        "rows": batch * steps,
    }  # fmt: skip
    return _Work(ranges, parts, max(1, B_parts), max(1, C_parts), parts * columns, slots)


def _groups(B: torch.Tensor) -> int:
    """Return the number of groups of B; 0 if B is constant over time."""
    return B.shape[2] if B.ndim == 4 else B.ndim - 2


def _operands(u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus):
    """Return the division of the work, and the arguments of both kernels, by slot."""
    bounds = None if cu_seqlens is None else offsets(cu_seqlens, u.shape[1], "selective_scan")
    work = _divide(*u.shape, A.shape[1], _groups(B), _groups(C), bounds)
    if C.is_complex():
        C = C * 2  # y is twice the real part
    slots = {**work.slots, "reverse": reverse, "positive": delta_softplus}
    for name, value in {"A": A, "B": B, "C": C, "D": D, "bias": delta_bias, "state": state}.items():
        slots[name] = None if value is None else value.contiguous()
    return work, {**slots, "u": rows(u), "delta": rows(delta), "z": None if z is None else rows(z)}


def forward(u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus):
    work, slots = _operands(u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus)
    y, last = empty(u.shape, u.dtype), empty(state.shape, state.dtype)
    _forward.run(A.dtype, _forward.pack(**slots, y=y, last=last), work.units, u.numel() * A.shape[1])
    return y, last


def backward(dy, dlast, u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus):
    work, slots = _operands(u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus)
    dy, dlast = rows(dy), dlast.contiguous()
    du, ddelta, dz = empty(u.shape, u.dtype), empty(u.shape, u.dtype), None if z is None else empty(u.shape, u.dtype)
    dA = empty((work.parts, *A.shape), A.dtype)
    dB = empty((work.parts if B.ndim == 2 else work.B_parts, *B.shape), B.dtype)
    dC = empty((work.parts if C.ndim == 2 else work.C_parts, *C.shape), C.dtype)
    dD, dbias = (empty((work.parts, u.shape[2]), u.dtype) for _ in range(2))
    dstate = empty(state.shape, state.dtype)
    packed = _backward.pack(
        **slots, dy=dy, du=du, ddelta=ddelta, dz=dz, dlast=dlast, dA=dA, dB=dB, dC=dC, dD=dD, dbias=dbias, dstate=dstate
    )
    _backward.run(A.dtype, packed, work.units, 4 * u.numel() * A.shape[1])
    dC = _sum(dC)
    gradients = [du, ddelta, _sum(dA), _sum(dB), dC * 2 if C.is_complex() else dC]
    if D is not None:
        gradients.append(_sum(dD))
    if dz is not None:
        gradients.append(dz)
    if delta_bias is not None:
        gradients.append(_sum(dbias))
    return [*gradients, dstate]


def _sum(parts: torch.Tensor) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)
