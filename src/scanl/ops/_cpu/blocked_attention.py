"""Softmax attention by blocks of queries and keys, whose products are the micro-kernel's: no scores of all pairs.

With S = scale q kᵀ + bias, -inf where a key is hidden, P = e^{S - m}, m the largest score of a query so far, and l the
sum of P over its keys, y = P v / l. A larger m multiplies what is summed already by e^{m_old - m}. Backwards P / l is
computed again, from m + ln l, and

    dv = Pᵀ dy,  dS = P (dy vᵀ - dy·y + dlogs),  dq = scale dS k,  dk = scale dSᵀ q,  dbias = dS.

Attention by squares has max(0, S)² instead of P / l. A block of which no key is seen is not computed. A unit of work is
a few blocks of queries of a head; backwards a head of keys. (Dao et al., arXiv:2205.14135, algorithms 1 and 4.)
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import outlined
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch
from scanl.ops._cpu._vectors import emitted
from scanl.ops.products.matrices import ROWS, WIDE, transpose
from scanl.ops.products.micro_kernel import BYTES, by_columns

QUERIES = KEYS = 64  # of a block: its scores and operands stay in the first-level cache
CHUNK = 4 * QUERIES  # queries of a unit forwards: they share the transposed keys
LANES = BYTES // 4
ROW = KEYS + LANES  # distance of rows of scores: of a power of two they would share cache sets
TERMS = 128  # summed in registers
NONE, SOME, ALL = range(3)  # keys of a block that are seen

_OPERANDS = "q k v visible visible_batch bias bias_batch bias_head bias_row"
_HEAD = f"heads shared steps keys width values causal squared scale {_OPERANDS} " + " ".join(
    f"{name}_{axis}" for name in "qkv" for axis in ("batch", "head", "step")
)

_whole, _narrow = (by_columns(ROWS, wide, fresh=True) for wide in (WIDE, 1))


@helper(forceinline=True)
def _padded(count, to):
    return (count + to - 1) // to * to


@helper(fastmath={"contract", "nsz"})
def _products(y, y_at, y_row, rows, width, a, a_at, a_row, a_term, terms, b, b_at, b_row, keep):
    """Compute y = keep y + a b, where y may hold anything if `keep` is 0. rows: in ROWS.   width: in vectors."""
    outlined()
    lanes = BYTES // y.itemsize
    for first in range(0, terms, TERMS):
        some, factor = min(TERMS, terms - first), keep if first == 0 else y.dtype.type(1)
        for j in range(0, width, WIDE * lanes):
            for r in range(0, rows, ROWS):
                o, l, w = y_at + r * y_row + j, a_at + r * a_row + first * a_term, b_at + first * b_row + j
                if j + WIDE * lanes <= width:
                    _whole(y, o, y_row, a, l, a_row, a_term, b, w, b_row, lanes, some, factor)
                else:
                    _narrow(y, o, y_row, a, l, a_row, a_term, b, w, b_row, lanes, some, factor)


@helper()
def _take(x, x_row, count, width, factor, m, at, row, rows):
    """Copy `count` rows of x, times a factor, to rows of m; zeros to the rows that are left of `rows`."""
    outlined()
    for i in range(rows):
        target = m[at + i * row : at + i * row + width]
        if i < count:
            source = x[i * x_row : i * x_row + width]
            for j in range(width):
                target[j] = factor * source[j]
        else:
            for j in range(width):
                target[j] = 0


@helper()
def _give(m, at, row, count, width, factor, x, x_row):
    """Copy `count` rows of m, times a factor, to rows of x."""
    outlined()
    for i in range(count):
        source, target = m[at + i * row : at + i * row + width], x[i * x_row : i * x_row + width]
        for j in range(width):
            target[j] = factor * source[j]


@helper()
def _turn(x, x_row, count, width, out):
    """Write the transpose of `count` rows of x to rows of `out` that are ROW apart; zeros up to KEYS columns."""
    outlined()
    lanes = BYTES // x.itemsize
    full, wide = count - count % lanes, width - width % lanes
    transpose(x, 0, x_row, full, wide, out, 0, ROW)
    for j in range(width):
        for r in range(0 if j >= wide else full, count):
            out[j * ROW + r] = x[r * x_row + j]
        fill(out, j * ROW + count, KEYS - count, 0)


@helper()
def _seen(slots, batch, i, rows, j, count):
    """Return whether none, some or all keys of a block are seen."""
    outlined()
    if slots.causal and j > i + rows - 1:
        return NONE
    if slots.visible == 0:
        return ALL if count == KEYS and (slots.causal == 0 or j + KEYS - 1 <= i) else SOME
    at, total = batch * slots.visible_batch + i * slots.keys + j, 0
    visible = array(slots.visible + at, (rows - 1) * slots.keys + count, np.uint8)
    for r in range(rows):
        line, of_row = visible[r * slots.keys : r * slots.keys + count], np.int32(0)
        for c in range(count):
            of_row += np.int32(line[c])
        total += of_row
    return NONE if total == 0 else ALL if total == rows * KEYS else SOME


@helper()
def _mask(slots, s, batch, head, i, rows, j, count, seen):
    """Add the bias to a block of scores, and set those of hidden keys to -inf."""
    outlined()
    dtype, keys = slots.dtype, slots.keys
    if slots.bias != 0:
        at = batch * slots.bias_batch + head * slots.bias_head + i * slots.bias_row + j
        for r in range(rows):
            row, line = s[r * ROW : r * ROW + count], part(slots.bias, at + r * slots.bias_row, count, dtype)
            for c in range(count):
                row[c] += line[c]
    if seen == ALL:
        return
    hidden = dtype.type(-np.inf)
    visible = array(slots.visible + batch * slots.visible_batch + i * keys + j, (rows - 1) * keys + count, np.uint8)
    for r in range(rows):
        row = s[r * ROW : (r + 1) * ROW]
        last = min(count, i + r + 1 - j) if slots.causal else count
        if slots.visible != 0:
            line = visible[r * keys : r * keys + count]
            for c in range(count):
                row[c] = row[c] if line[c] != 0 else hidden
        for c in range(max(0, last), KEYS):
            row[c] = hidden


@emitted(width=BYTES)
def _raise_tops(e, s, tops, rows):
    """Compute tops[r] = max(tops[r], scores of row r)."""
    with e.rows(rows) as r:
        place = e.at(tops, r)
        top = e.number_at(place)
        for c in range(KEYS // LANES):
            row = e.read(e.at(s, (r, ROW), c * LANES))
            top = e.builder.select(e.builder.fcmp_ordered(">", row, top), row, top)
        while top.type.count > 1:
            half = top.type.count // 2
            low, high = (e._lanes(top, range(first, first + half)) for first in (0, half))
            top = e.builder.select(e.builder.fcmp_ordered(">", high, low), high, low)
        e.builder.store(e.builder.extract_element(top, ir.Constant(ir.IntType(32), 0)), place)


@emitted(width=BYTES)
def _raise_to_powers(e, s, bases, totals, rows):
    """Compute s = e^{s - base} for each row, and add its sum to totals."""
    with e.rows(rows) as r:
        base, total = e.number_at(e.at(bases, r)), None
        for c in range(KEYS // LANES):
            place = e.at(s, (r, ROW), c * LANES)
            power = e.exp(e.builder.fsub(e.read(place), base))
            e.write(power, place)
            total = power if total is None else e.add(total, power)
        e.add_number(e.at(totals, r), e.total(total))


@helper()
def _weigh(s, rows, tops, before, bases, totals, y, y_row, width):
    """Turn scores into powers, and what is summed already into multiples of the same. y: (rows, width)."""
    outlined()
    one, zero, lowest = y.dtype.type(1), y.dtype.type(0), y.dtype.type(-np.inf)
    for r in range(rows):
        before[r] = tops[r]
    _raise_tops(s, tops, rows)
    for r in range(rows):
        bases[r] = tops[r] if tops[r] > lowest else zero
        before[r] = exp(before[r] - bases[r])
        totals[r] *= before[r]
    for r in range(rows):
        factor = before[r]
        if factor != one:
            row = y[r * y_row : r * y_row + width]
            for c in range(width):
                row[c] *= factor
    _raise_to_powers(s, bases, totals, rows)


@helper()
def _square(s, rows):
    """Turn scores into the squares of those above 0."""
    outlined()
    for r in range(rows):
        row = s[r * ROW : r * ROW + KEYS]
        for c in range(KEYS):
            score = row[c] if row[c] > 0 else row.dtype.type(0)
            row[c] = score * score


@kernel(_HEAD + " chunks y logs")
def _forward(slots):
    dtype, steps, keys, width, values = slots.dtype, slots.steps, slots.keys, slots.width, slots.values
    scale, one = dtype.type(array(slots.scale, 1, np.float64)[0]), dtype.type(1)
    q_row, y_row = _padded(width, LANES) + LANES, _padded(values, LANES) + LANES
    q, turned, v = scratch(CHUNK * q_row, dtype), scratch(width * ROW, dtype), scratch(KEYS * y_row, dtype)
    s, y, numbers = scratch(QUERIES * ROW, dtype), scratch(CHUNK * y_row, dtype), scratch(4 * CHUNK, dtype)
    for unit in units(slots):
        row, begin = unit // slots.chunks, unit % slots.chunks * CHUNK
        batch, head = row // slots.heads, row % slots.heads
        group, end = head // slots.shared, min(steps, begin + CHUNK)
        of_q = part(slots.q, batch * slots.q_batch + head * slots.q_head + begin * slots.q_step,
                    (end - begin - 1) * slots.q_step + width, dtype)  # fmt: skip
        _take(of_q, slots.q_step, end - begin, width, scale, q, 0, q_row, CHUNK)
        fill(y, 0, CHUNK * y_row, 0)
        fill(numbers, 0, CHUNK, dtype.type(-np.inf))
        fill(numbers, CHUNK, CHUNK, 0)
        for j in range(0, keys, KEYS):
            count, turned_here = min(KEYS, keys - j), False
            for i in range(begin, end, QUERIES):
                rows, at = min(QUERIES, end - i), i - begin
                seen = _seen(slots, batch, i, rows, j, count)
                if seen == NONE:
                    continue
                if not turned_here:
                    turned_here = True
                    of_k = part(slots.k, batch * slots.k_batch + group * slots.k_head + j * slots.k_step,
                                (count - 1) * slots.k_step + width, dtype)  # fmt: skip
                    of_v = part(slots.v, batch * slots.v_batch + group * slots.v_head + j * slots.v_step,
                                (count - 1) * slots.v_step + values, dtype)  # fmt: skip
                    _turn(of_k, slots.k_step, count, width, turned)
                    _take(of_v, slots.v_step, count, values, one, v, 0, y_row, KEYS)
                tall = _padded(rows, ROWS)
                _products(s, 0, ROW, tall, KEYS, q, at * q_row, q_row, 1, width, turned, 0, ROW, dtype.type(0))
                _mask(slots, s, batch, head, i, rows, j, count, seen)
                if slots.squared:
                    _square(s, tall)
                else:
                    top, total = numbers[at : at + tall], numbers[CHUNK + at : CHUNK + at + tall]
                    before = numbers[2 * CHUNK + at : 2 * CHUNK + at + tall]
                    bases = numbers[3 * CHUNK + at : 3 * CHUNK + at + tall]
                    _weigh(s, tall, top, before, bases, total, y[at * y_row : (at + tall) * y_row], y_row, values)
                _products(y, at * y_row, y_row, tall, y_row - LANES, s, 0, ROW, 1, KEYS, v, 0, y_row, one)
        out = part(slots.y, ((batch * steps + begin) * slots.heads + head) * values,
                   (end - begin - 1) * slots.heads * values + values, dtype)  # fmt: skip
        logs = part(slots.logs, row * steps + begin, end - begin, dtype)
        for r in range(end - begin):
            total, at = numbers[CHUNK + r], r * slots.heads * values
            logs[r] = numbers[r] + np.log(total) if total != 0 else dtype.type(np.inf)
            factor = one if slots.squared else one / total if total != 0 else dtype.type(0)
            _give(y, r * y_row, y_row, 1, values, factor, out[at : at + values], values)


@helper(fastmath={"contract", "nsz", "reassoc"})
def _along(x, y, width):
    total = x.dtype.type(0)
    for j in range(width):
        total += x[j] * y[j]
    return total


@helper()
def _differentiate(s, d, rows, logs, along):
    """Turn scores s into weights P, and gradients d of the weights into those of the scores."""
    outlined()
    for r in range(rows):
        row, slope = s[r * ROW : r * ROW + KEYS], d[r * ROW : r * ROW + KEYS]
        log, mean = logs[r], along[r]
        for c in range(KEYS):
            row[c] = exp(row[c] - log)
            slope[c] = row[c] * (slope[c] - mean)


@helper()
def _differentiate_square(s, d, rows):
    """Do the same where weights are squares."""
    outlined()
    for r in range(rows):
        row, slope = s[r * ROW : r * ROW + KEYS], d[r * ROW : r * ROW + KEYS]
        for c in range(KEYS):
            score = row[c] if row[c] > 0 else row.dtype.type(0)
            row[c] = score * score
            slope[c] *= score + score


@helper()
def _clear(m, at, row, first, rows):
    """Set rows of m, from the `first` of `rows` on, to zero."""
    for r in range(first, rows):
        fill(m, at + r * row, row, 0)


@kernel(_HEAD + " y dy logs dlogs dq dk dv dbias dbias_batch dbias_head dbias_row")
def _backward(slots):
    dtype, steps, keys, width, values = slots.dtype, slots.steps, slots.keys, slots.width, slots.values
    heads, shared = slots.heads, slots.shared
    scale, one, zero = dtype.type(array(slots.scale, 1, np.float64)[0]), dtype.type(1), dtype.type(0)
    k_row, v_row = _padded(width, LANES) + LANES, _padded(values, LANES) + LANES
    k_wide, v_wide, padded = k_row - LANES, v_row - LANES, _padded(steps, QUERIES)
    q, dq = scratch(shared * padded * k_row, dtype), scratch(shared * padded * k_row, dtype)
    dy = scratch(shared * padded * v_row, dtype)
    turned_k, turned_v = scratch(width * ROW, dtype), scratch(values * ROW, dtype)
    k, dk, dv = scratch(KEYS * k_row, dtype), scratch(KEYS * k_row, dtype), scratch(KEYS * v_row, dtype)
    s, d = scratch(QUERIES * ROW, dtype), scratch(QUERIES * ROW, dtype)
    logs, along = scratch(shared * padded, dtype), scratch(shared * padded, dtype)
    for unit in units(slots):
        groups = heads // shared
        batch, group = unit // groups, unit % groups
        fill(dq, 0, dq.size, 0)
        for n in range(shared):
            head = group * shared + n
            of_q = part(slots.q, batch * slots.q_batch + head * slots.q_head,
                        (steps - 1) * slots.q_step + width, dtype)  # fmt: skip
            _take(of_q, slots.q_step, steps, width, scale, q, n * padded * k_row, k_row, padded)
            first = (batch * steps * heads + head) * values
            of_y = part(slots.y, first, ((steps - 1) * heads + 1) * values, dtype)
            of_dy = part(slots.dy, first, ((steps - 1) * heads + 1) * values, dtype)
            _take(of_dy, heads * values, steps, values, one, dy, n * padded * v_row, v_row, padded)
            of_logs = part(slots.logs, (batch * heads + head) * steps, steps, dtype)
            of_dlogs = part(slots.dlogs, (batch * heads + head) * steps, steps if slots.dlogs != 0 else 0, dtype)
            for t in range(steps):
                at = t * heads * values
                along[n * padded + t] = _along(of_y[at : at + values], of_dy[at : at + values], values)
                logs[n * padded + t] = of_logs[t]
                if slots.dlogs != 0:
                    along[n * padded + t] -= of_dlogs[t]
        for j in range(0, keys, KEYS):
            count = min(KEYS, keys - j)
            k_at = batch * slots.k_batch + group * slots.k_head + j * slots.k_step
            v_at = batch * slots.v_batch + group * slots.v_head + j * slots.v_step
            of_k = part(slots.k, k_at, (count - 1) * slots.k_step + width, dtype)
            of_v = part(slots.v, v_at, (count - 1) * slots.v_step + values, dtype)
            _turn(of_k, slots.k_step, count, width, turned_k)
            _turn(of_v, slots.v_step, count, values, turned_v)
            _take(of_k, slots.k_step, count, width, one, k, 0, k_row, KEYS)
            fill(dk, 0, dk.size, 0)
            fill(dv, 0, dv.size, 0)
            for i in range(0, steps, QUERIES):
                rows = min(QUERIES, steps - i)
                seen, tall = _seen(slots, batch, i, rows, j, count), _padded(rows, ROWS)
                if seen == NONE:
                    continue
                for n in range(shared):
                    q_at, dy_at = (n * padded + i) * k_row, (n * padded + i) * v_row
                    _products(s, 0, ROW, tall, KEYS, q, q_at, k_row, 1, width, turned_k, 0, ROW, zero)
                    _mask(slots, s, batch, group * shared + n, i, rows, j, count, seen)
                    _products(d, 0, ROW, tall, KEYS, dy, dy_at, v_row, 1, values, turned_v, 0, ROW, zero)
                    at = n * padded + i
                    if slots.squared:
                        _differentiate_square(s, d, rows)
                    else:
                        _differentiate(s, d, rows, logs[at : at + rows], along[at : at + rows])
                    _clear(s, 0, ROW, rows, tall)
                    _clear(d, 0, ROW, rows, tall)
                    _products(dv, 0, v_row, KEYS, v_wide, s, 0, 1, ROW, tall, dy, dy_at, v_row, one)
                    _products(dk, 0, k_row, KEYS, k_wide, d, 0, 1, ROW, tall, q, q_at, k_row, one)
                    _products(dq, q_at, k_row, tall, k_wide, d, 0, ROW, 1, KEYS, k, 0, k_row, one)
                    if slots.dbias != 0:
                        to = batch * slots.dbias_batch + (group * shared + n) * slots.dbias_head
                        to += i * slots.dbias_row + j
                        for r in range(rows):
                            of_row = part(slots.dbias, to + r * slots.dbias_row, count, dtype)
                            for c in range(count):
                                of_row[c] += d[r * ROW + c]
            groups_row = (batch * keys + j) * groups + group
            of_dk = part(slots.dk, groups_row * width, ((count - 1) * groups + 1) * width, dtype)
            of_dv = part(slots.dv, groups_row * values, ((count - 1) * groups + 1) * values, dtype)
            _give(dk, 0, k_row, count, width, one, of_dk, groups * width)
            _give(dv, 0, v_row, count, values, one, of_dv, groups * values)
        for n in range(shared):
            first = (batch * steps * heads + group * shared + n) * width
            of_dq = part(slots.dq, first, ((steps - 1) * heads + 1) * width, dtype)
            _give(dq, n * padded * k_row, k_row, steps, width, scale, of_dq, heads * width)


class AttentionRule(NamedTuple):
    """How scores become weights.

    visible: (B or 1, T, S) bool, contiguous.   bias: (B or 1, H or 1, T, S), whose rows may lie anywhere; or lines (B
    or 1, H or 1, T + S - 1), by the place of a key less that of a query, from 1 - T on.   causal: query t sees the keys
    up to t.   squared: whether weights are the squares of scores above 0.
    """

    visible: torch.Tensor | None
    bias: torch.Tensor | None
    causal: bool
    squared: bool
    scale: float


def _head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: AttentionRule) -> dict[str, Any]:
    (_, heads, steps, width), (groups, keys), values = q.shape, k.shape[1:3], v.shape[3]
    numbers: dict[str, Any] = {"heads": heads, "shared": heads // groups, "steps": steps, "keys": keys, "width": width}
    numbers |= {"values": values, "q": q, "k": k, "v": v, "causal": int(scores.causal), "squared": int(scores.squared)}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        batch, head, step, _ = tensor.stride()
        numbers |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_step": step}
    of_visible = 0 if scores.visible is None or scores.visible.shape[0] == 1 else scores.visible.stride(0)
    numbers |= {"scale": np.array([scores.scale]), "visible": scores.visible, "visible_batch": of_visible}
    return numbers | _added("bias", scores.bias, steps)


def _added(name: str, bias: torch.Tensor | None, steps: int) -> dict[str, Any]:
    """Return the address of a bias, or of its gradient, and its strides by axis, zero where all share."""
    values: list[Any] = [None, 0, 0, 0]
    if bias is not None:
        strides = [0 if bias.shape[n] == 1 else bias.stride(n) for n in range(2)]
        lines = bias.ndim == 3
        at = bias[..., steps - 1 :] if lines else bias  # of the first query and key
        values = [at, *strides, -1 if lines else bias.stride(2)]
    return dict(zip([name, f"{name}_batch", f"{name}_head", f"{name}_row"], values, strict=True))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: AttentionRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, (B, T, H, V), of q (B, H, T, K), k (B, G, S, K) and v (B, G, S, V), and the logarithms of sums.

    Rows of operands may lie anywhere.
    """
    (batch, heads, steps, _), chunks = q.shape, -(-q.shape[2] // CHUNK)
    y, logs = empty((batch, steps, heads, v.shape[3]), q.dtype), q.new_empty(batch, heads, steps)
    packed = _forward.pack(**_head(q, k, v, scores), chunks=chunks, y=y, logs=logs)
    _forward.run(q.dtype, packed, batch * heads * chunks, batch * heads * steps * k.shape[2])
    return y, logs


def backward(
    dy: torch.Tensor, y: torch.Tensor, logs: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    scores: AttentionRule, dbias: torch.Tensor | None, dlogs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients by q, k and v as (B, T, H, ·), from those by y (B, T, H, V) and logs; add that by the bias.

    dbias: (B, H, T, S), or lines (B, H, T + S - 1).
    """
    grads = [empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in (q, k, v)]
    head = _head(q, k, v, scores) | _added("dbias", dbias, q.shape[2])
    packed = _backward.pack(**head, y=y, dy=dy, logs=logs, dlogs=dlogs, dq=grads[0], dk=grads[1], dv=grads[2])
    _backward.run(q.dtype, packed, q.shape[0] * k.shape[1], 2 * q.shape[:3].numel() * k.shape[2])
    return grads[0], grads[1], grads[2]
