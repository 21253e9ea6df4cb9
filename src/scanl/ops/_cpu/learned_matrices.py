"""Whole mini-batches of memories that learn, as loops over one memory each.

A unit of work is one memory, from its first mini-batch to its last: its matrices stay in the second-level cache. What a
step has stands transposed in scratch, (features, C), so a vector has one feature of adjacent steps: norms sum whole
vectors, and products read a matrix in either direction without a copy of it.

The forward pass keeps the matrices with which each mini-batch began, and what its maps gave. The backward pass goes
from the last mini-batch to the first and carries the gradient of the matrices.
"""

import math

import torch
from torch import Tensor

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import contiguous, empty
from scanl.ops._cpu._sigmoid import tanh
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch
from scanl.ops.products.matrices import WHOLE, add_products, transpose
from scanl.ops.products.micro_kernel import BYTES, WIDE_REGISTERS, by_columns

TALL = 16 if WIDE_REGISTERS else 4  # rows of a tile of one vector
EPS = 1e-6  # of the norm
CURVE, CUBE = math.sqrt(2 / math.pi), 0.044715  # of GELU by tanh
_FLAGS = {"error_model": "numpy", "fastmath": {"contract", "nsz"}}
_HEAD = (
    "parts pairs heads steps width hidden copies bias slots_kept size norm q k v read carry within write states kept"
)
_tall = by_columns(TALL, 1, fresh=True)


@helper(fastmath={"contract", "nsz"})
def _multiply(out, rows, h, h_row, h_term, terms, w, width, keep):
    """Compute out = keep out + h w for out (rows, width) and w (terms, width). h has strides of both axes."""
    lanes = BYTES // out.itemsize
    for r in range(0, rows, TALL):
        for j in range(0, width, lanes):
            _tall(out, r * width + j, width, h, r * h_row, h_row, h_term, w, j, width, lanes, terms, keep)  # pyright: ignore[reportCallIssue]


@helper(**_FLAGS)
def _activate(z, y, slope, size):
    """Write GELU of z, and its derivative."""
    kind = z.dtype.type
    half, one = kind(0.5), kind(1)
    for i in range(size):
        x = z[i]
        t = tanh(kind(CURVE) * (x + kind(CUBE) * x * x * x))
        inner = kind(CURVE) * (one + kind(3 * CUBE) * x * x)
        y[i] = half * x * (one + t)
        slope[i] = half * (one + t) + half * x * (one - t * t) * inner


@helper(**_FLAGS)
def _bend(z, factor, by, size):
    """Multiply `by` by a factor and GELU's second derivative at z."""
    kind = z.dtype.type
    half, one, two = kind(0.5), kind(1), kind(2)
    for i in range(size):
        x = z[i]
        t = tanh(kind(CURVE) * (x + kind(CUBE) * x * x * x))
        inner = kind(CURVE) * (one + kind(3 * CUBE) * x * x)
        bent = (one - t * t) * (inner + half * x * (kind(6 * CURVE * CUBE) * x - two * t * inner * inner))
        by[i] *= factor[i] * bent


@helper(**_FLAGS)
def _standardize(z, n, scale, total, width, steps, eps):
    """Write n = (z - mean) scale of each step, and the scale. z: (width, steps)."""
    kind = z.dtype.type
    share = kind(1) / kind(width)
    for i in range(steps):
        total[i] = kind(0)
        scale[i] = kind(0)
    for c in range(width):
        for i in range(steps):
            total[i] += z[c * steps + i]
    for i in range(steps):
        total[i] *= share
    for c in range(width):
        for i in range(steps):
            x = z[c * steps + i] - total[i]
            n[c * steps + i] = x
            scale[i] += x * x
    for i in range(steps):
        scale[i] = kind(1) / math.sqrt(scale[i] * share + eps)
    for c in range(width):
        for i in range(steps):
            n[c * steps + i] *= scale[i]


@helper(**_FLAGS)
def _center(g, n, mean, along, width, steps):
    """Compute g = g - mean g - n mean(g n) of each step, and write both means."""
    kind = g.dtype.type
    share = kind(1) / kind(width)
    for i in range(steps):
        mean[i] = kind(0)
        along[i] = kind(0)
    for c in range(width):
        for i in range(steps):
            mean[i] += g[c * steps + i]
            along[i] += g[c * steps + i] * n[c * steps + i]
    for i in range(steps):
        mean[i] *= share
        along[i] *= share
    for c in range(width):
        for i in range(steps):
            g[c * steps + i] -= mean[i] + n[c * steps + i] * along[i]


@helper(**_FLAGS)
def _gradient(z, k, v, norm, n, delta, scale, mean, along, width, steps, eps):
    """Write the gradient of ½ |LN(z) - (v - k)|² by z, and n, the normed z without its weight."""
    _standardize(z, n, scale, mean, width, steps, eps)
    for c in range(width):
        weight, bias = norm[c], norm[width + c]
        for i in range(steps):
            at = c * steps + i
            delta[at] = (n[at] * weight + bias - (v[at] - k[at])) * weight
    _center(delta, n, mean, along, width, steps)
    for c in range(width):
        for i in range(steps):
            delta[c * steps + i] *= scale[i]


@helper(**_FLAGS)
def _score(scores, mixed, within, u, inputs, rows, steps, bias):
    """Write scores (j, i) = u_j · input_i + bias, and -G_ij times them."""
    kind = scores.dtype.type
    _multiply(scores, steps, u, 1, steps, rows, inputs, steps, kind(0))
    for j in range(steps):
        for i in range(steps):
            score = scores[j * steps + i] + kind(bias)
            scores[j * steps + i] = score
            mixed[j * steps + i] = -within[i * steps + j] * score


@helper(**_FLAGS)
def _read(r, inputs, W, Z, copies, bias, rows, columns, steps, reading, within, u, delta, scaled, scores, mixed):
    """Write r = (a W + f Z)ᵀ input - Σ_j G_ij (u_j · input_i) δ_j for each step i."""
    kind = r.dtype.type
    if copies == 1:
        _multiply(r, columns, W, 1, columns, rows, inputs, steps, kind(0))
    else:
        for c in range(rows):
            for i in range(steps):
                scaled[c * steps + i] = reading[i] * inputs[c * steps + i]
        _multiply(r, columns, W, 1, columns, rows, scaled, steps, kind(0))
        for c in range(rows):
            for i in range(steps):
                scaled[c * steps + i] = reading[steps + i] * inputs[c * steps + i]
        _multiply(r, columns, Z, 1, columns, rows, scaled, steps, kind(1))
    _score(scores, mixed, within, u, inputs, rows, steps, bias)
    _multiply(r, columns, delta, steps, 1, steps, mixed, steps, kind(1))
    if bias:
        for c in range(columns):
            for i in range(steps):
                r[c * steps + i] += reading[i] * W[rows * columns + c]
                if copies == 2:
                    r[c * steps + i] += reading[steps + i] * Z[rows * columns + c]


@helper(**_FLAGS)
def _write(W, rates, u, delta, bias, rows, columns, steps, scaled):
    """Compute W -= Σ_j rate_j u_j δ_jᵀ. delta: (steps, columns)."""
    kind = W.dtype.type
    for c in range(rows):
        for j in range(steps):
            scaled[c * steps + j] = -rates[j] * u[c * steps + j]
    add_products(W, 0, columns, rows, columns, scaled, 0, steps, 1, steps, delta, 0, columns, WHOLE, kind(1))
    if bias:
        for j in range(steps):
            for c in range(columns):
                W[rows * columns + c] -= rates[j] * delta[j * columns + c]


@helper(**_FLAGS)
def _carry(W, Z, last_W, last_Z, copies, carry, size):
    if copies == 1:
        for i in range(size):
            W[i] = last_W[i]
    else:
        for i in range(size):
            W[i] = carry[0] * last_W[i] + carry[1] * last_Z[i]
            Z[i] = carry[3] * last_Z[i]


@helper(**_FLAGS)
def _turn_rates(read, reading, copies, steps):
    """Write a of all steps, then f."""
    for i in range(steps):
        reading[i] = read[2 * i] if copies == 2 else read.dtype.type(1)
        reading[steps + i] = read[2 * i + 1]


@kernel(_HEAD + " y")
def _forward(slots):
    dtype, parts, pairs, steps, width = slots.dtype, slots.parts, slots.pairs, slots.steps, slots.width
    hidden, copies, bias, size, eps = slots.hidden, slots.copies, slots.bias, slots.size, dtype.type(EPS)
    inner = hidden if hidden else width  # what the last matrix reads
    most, cells = max(inner, width) * steps, width * steps
    first_size, last_size = (width + bias) * hidden, (inner + bias) * width
    last_at = copies * first_size
    kept_size = 3 * hidden * steps + 2 * cells
    q, k, v, n, delta, y = (
        scratch(cells, dtype), scratch(cells, dtype), scratch(cells, dtype), scratch(cells, dtype),
        scratch(cells, dtype), scratch(cells, dtype),
    )  # fmt: skip
    rows = scratch(most, dtype)
    u_of_hidden, p_of_hidden, slope, first_delta, scaled = (
        scratch(most, dtype), scratch(most, dtype), scratch(most, dtype), scratch(most, dtype), scratch(most, dtype),
    )  # fmt: skip
    scores, mixed = scratch(steps * steps, dtype), scratch(steps * steps, dtype)
    scale, mean, along, reading = (
        scratch(steps, dtype), scratch(steps, dtype), scratch(steps, dtype), scratch(2 * steps, dtype),
    )  # fmt: skip
    for pair in units(slots):
        norm = part(slots.norm, pair % slots.heads * 2 * width, 2 * width, dtype)
        for p in range(parts):
            at = p * pairs + pair
            transpose(part(slots.q, at * cells, cells, dtype), 0, width, steps, width, q, 0, steps)
            transpose(part(slots.k, at * cells, cells, dtype), 0, width, steps, width, k, 0, steps)
            transpose(part(slots.v, at * cells, cells, dtype), 0, width, steps, width, v, 0, steps)
            _turn_rates(part(slots.read, at * 2 * steps, 2 * steps, dtype), reading, copies, steps)
            within = part(slots.within, at * steps * steps, steps * steps, dtype)
            write = part(slots.write, at * 2 * steps, 2 * steps, dtype)
            carry = part(slots.carry, at * 4, 4, dtype)
            place = pair * (slots.slots_kept + 1)
            here, there = (p, p + 1) if slots.slots_kept == parts else (p % 2, 1 - p % 2)
            old = part(slots.states, (place + here) * size, size, dtype)
            new = part(slots.states, (place + there) * size, size, dtype)
            kept_at = (pair * slots.slots_kept + (p if slots.slots_kept == parts else 0)) * kept_size
            kept = part(slots.kept, kept_at, kept_size, dtype)
            z2, r2 = kept[:cells], kept[cells : 2 * cells]
            z1 = kept[2 * cells : 2 * cells + hidden * steps]
            m = kept[2 * cells + hidden * steps : 2 * cells + 2 * hidden * steps]
            r1 = kept[2 * cells + 2 * hidden * steps : kept_size]
            W1, Z1 = old[:first_size], old[last_at - first_size : last_at]
            W2, Z2 = old[last_at : last_at + last_size], old[size - last_size : size]
            u, inputs = k, q
            if hidden:
                _multiply(z1, hidden, W1, 1, hidden, width, k, steps, dtype.type(0))
                if bias:
                    for c in range(hidden):
                        for i in range(steps):
                            z1[c * steps + i] += W1[width * hidden + c]
                u, inputs = u_of_hidden, p_of_hidden
                _activate(z1, u, slope, hidden * steps)
            _multiply(z2, width, W2, 1, width, inner, u, steps, dtype.type(0))
            if bias:
                for c in range(width):
                    for i in range(steps):
                        z2[c * steps + i] += W2[inner * width + c]
            _gradient(z2, k, v, norm, n, delta, scale, mean, along, width, steps, eps)
            if hidden:
                _multiply(m, hidden, W2, width, 1, width, delta, steps, dtype.type(0))
                for i in range(hidden * steps):
                    first_delta[i] = slope[i] * m[i]
                _read(r1, q, W1, Z1, copies, bias, width, hidden, steps, reading, within, k, first_delta, scaled,
                      scores, mixed)  # fmt: skip
                _activate(r1, inputs, slope, hidden * steps)
            _read(r2, inputs, W2, Z2, copies, bias, inner, width, steps, reading, within, u, delta, scaled, scores,
                  mixed)  # fmt: skip
            _standardize(r2, n, scale, mean, width, steps, eps)
            for c in range(width):
                for i in range(steps):
                    y[c * steps + i] = q[c * steps + i] + n[c * steps + i] * norm[c] + norm[width + c]
            transpose(y, 0, steps, width, steps, part(slots.y, at * cells, cells, dtype), 0, width)
            new_W1, new_Z1 = new[:first_size], new[last_at - first_size : last_at]
            new_W2, new_Z2 = new[last_at : last_at + last_size], new[size - last_size : size]
            transpose(delta, 0, steps, width, steps, rows, 0, width)
            _carry(new_W2, new_Z2, W2, Z2, copies, carry, last_size)
            _write(new_W2, write[:steps], u, rows, bias, inner, width, steps, scaled)
            if copies == 2:
                _write(new_Z2, write[steps:], u, rows, bias, inner, width, steps, scaled)
            if hidden:
                transpose(first_delta, 0, steps, hidden, steps, rows, 0, hidden)
                _carry(new_W1, new_Z1, W1, Z1, copies, carry, first_size)
                _write(new_W1, write[:steps], k, rows, bias, width, hidden, steps, scaled)
                if copies == 2:
                    _write(new_Z1, write[steps:], k, rows, bias, width, hidden, steps, scaled)


@helper(**_FLAGS)
def _back_one_write(d_matrix, rates, d_rates, u, du, delta, d_delta, bias, rows, columns, steps, h, scaled):
    """Add to the gradients of what `_write` reads, from that of the matrix. delta: (columns, steps)."""
    kind = u.dtype.type
    _multiply(h, rows, d_matrix, columns, 1, columns, delta, steps, kind(0))
    for c in range(rows):
        for j in range(steps):
            at = c * steps + j
            d_rates[j] -= u[at] * h[at]
            du[at] -= rates[j] * h[at]
            scaled[at] = -rates[j] * u[at]
    _multiply(d_delta, columns, d_matrix, 1, columns, rows, scaled, steps, kind(1))
    if bias:
        for c in range(columns):
            by = d_matrix[rows * columns + c]
            for j in range(steps):
                d_rates[j] -= by * delta[c * steps + j]
                d_delta[c * steps + j] -= rates[j] * by


@helper(**_FLAGS)
def _back_carry(W, Z, dW, dZ, copies, carry, d_carry, sums, rows, columns):
    """Turn the gradient of the matrices after the steps into that of those before. sums: 3 rows of scratch."""
    if copies == 2:
        kind = W.dtype.type
        for c in range(3 * columns):
            sums[c] = kind(0)
        a, f, e = carry[0], carry[1], carry[3]
        for r in range(rows):
            for c in range(columns):
                at = r * columns + c
                by_W, by_Z = dW[at], dZ[at]
                sums[c] += by_W * W[at]
                sums[columns + c] += by_W * Z[at]
                sums[2 * columns + c] += by_Z * Z[at]
                dW[at] = a * by_W
                dZ[at] = f * by_W + e * by_Z
        for c in range(columns):
            d_carry[0] += sums[c]
            d_carry[1] += sums[columns + c]
            d_carry[3] += sums[2 * columns + c]


@helper(**_FLAGS)
def _back_one_read(
    W, dW, reading, d_reading, inputs, d_inputs, dr, dr_rows, bias, copies, rows, columns, steps, h, scaled
):
    """Add to the gradients of one matrix and its factors, from that of what was read."""
    kind = W.dtype.type
    _multiply(h, rows, W, columns, 1, columns, dr, steps, kind(0))
    for c in range(rows):
        for i in range(steps):
            at = c * steps + i
            d_reading[i] += inputs[at] * h[at]
            d_inputs[at] += reading[i] * h[at]
            scaled[at] = reading[i] * inputs[at]
    add_products(dW, 0, columns, rows, columns, scaled, 0, steps, 1, steps, dr_rows, 0, columns, WHOLE, kind(1))
    if bias:
        for c in range(columns):
            total, weight = kind(0), W[rows * columns + c]
            for i in range(steps):
                d_reading[i] += weight * dr[c * steps + i]
                total += reading[i] * dr[c * steps + i]
            dW[rows * columns + c] += total


@helper(**_FLAGS)
def _back_scores(
    within, d_within, u, du, delta, d_delta, inputs, d_inputs, dr, bias, rows, columns, steps, scores, mixed, d_mixed,
    turned,
):  # fmt: skip
    """Add to the gradients of what the steps of a mini-batch read of one another."""
    kind = u.dtype.type
    _score(scores, mixed, within, u, inputs, rows, steps, bias)
    transpose(mixed, 0, steps, steps, steps, turned, 0, steps)
    _multiply(d_delta, columns, dr, steps, 1, steps, turned, steps, kind(1))
    _multiply(d_mixed, steps, delta, 1, steps, columns, dr, steps, kind(0))
    for j in range(steps):
        for i in range(steps):
            at = j * steps + i
            d_within[i * steps + j] -= scores[at] * d_mixed[at]
            d_mixed[at] *= -within[i * steps + j]
    transpose(d_mixed, 0, steps, steps, steps, turned, 0, steps)
    _multiply(du, rows, inputs, steps, 1, steps, turned, steps, kind(1))
    _multiply(d_inputs, rows, u, steps, 1, steps, d_mixed, steps, kind(1))


@helper(**_FLAGS)
def _back_map(W, dW, u, du, dz, dz_rows, bias, rows, columns, steps):
    """Add to the gradients of a matrix and its input, from that of Wᵀ u."""
    kind = W.dtype.type
    _multiply(du, rows, W, columns, 1, columns, dz, steps, kind(1))
    add_products(dW, 0, columns, rows, columns, u, 0, steps, 1, steps, dz_rows, 0, columns, WHOLE, kind(1))
    if bias:
        for c in range(columns):
            total = kind(0)
            for i in range(steps):
                total += dz[c * steps + i]
            dW[rows * columns + c] += total


@helper(**_FLAGS)
def _back_norm(r, dy, norm, d_norm, n, scale, mean, along, width, steps, eps, dr):
    """Write the gradient by r of its norm, and add to those of the norm's weights, one number for each step."""
    _standardize(r, n, scale, mean, width, steps, eps)
    for c in range(width):
        for i in range(steps):
            at = c * steps + i
            d_norm[at] += dy[at] * n[at]
            d_norm[width * steps + at] += dy[at]
            dr[at] = dy[at] * norm[c]
    _center(dr, n, mean, along, width, steps)
    for c in range(width):
        for i in range(steps):
            dr[c * steps + i] *= scale[i]


@helper(**_FLAGS)
def _back_gradient(
    z, k, v, norm, d_norm, d_delta, n, g, scale, mean, along, other, by_scale, width, steps, eps, dz, d_target
):
    """Write the gradients by z and by the target of δ = scale (g - mean g - n mean(g n)), which `_gradient` writes."""
    kind = z.dtype.type
    share = kind(1) / kind(width)
    _standardize(z, n, scale, mean, width, steps, eps)
    for i in range(steps):
        mean[i] = kind(0)
        along[i] = kind(0)
        by_scale[i] = kind(0)
    for c in range(width):
        weight, bias = norm[c], norm[width + c]
        for i in range(steps):
            at = c * steps + i
            g[at] = (n[at] * weight + bias - (v[at] - k[at])) * weight
            mean[i] += g[at]
            along[i] += g[at] * n[at]
    for i in range(steps):
        mean[i] *= share
        along[i] *= share
    for c in range(width):
        for i in range(steps):
            at = c * steps + i
            by_scale[i] += d_delta[at] * (g[at] - mean[i] - n[at] * along[i])
            dz[at] = scale[i] * d_delta[at]
    _center(dz, n, mean, other, width, steps)  # it is its own transpose, so this is the gradient of g
    for c in range(width):
        weight, bias = norm[c], norm[width + c]
        for i in range(steps):
            at = c * steps + i
            dg, error = dz[at], n[at] * weight + bias - (v[at] - k[at])
            d_norm[at] += dg * (error + n[at] * weight)
            d_norm[width * steps + at] += dg * weight
            d_target[at] = -dg * weight
            dn = dg * weight * weight - scale[i] * d_delta[at] * along[i] - other[i] * g[at]
            by_scale[i] += dn * (n[at] / scale[i])
            dz[at] = dn * scale[i]
    for i in range(steps):
        by_scale[i] *= -scale[i] * scale[i] * share
        mean[i] = kind(0)
    for c in range(width):
        for i in range(steps):
            at = c * steps + i
            dz[at] += by_scale[i] * n[at]
            mean[i] += dz[at]
    for c in range(width):
        for i in range(steps):
            dz[c * steps + i] -= mean[i] * share


@helper(**_FLAGS)
def _fill(values, size):
    for i in range(size):
        values[i] = values.dtype.type(0)


@kernel(_HEAD + " dy d_states dq dk dv d_read d_carry d_within d_write d_norm")
def _backward(slots):
    dtype, parts, pairs, steps, width = slots.dtype, slots.parts, slots.pairs, slots.steps, slots.width
    hidden, copies, bias, size, eps = slots.hidden, slots.copies, slots.bias, slots.size, dtype.type(EPS)
    inner = hidden if hidden else width
    most, cells, cross = max(inner, width) * steps, width * steps, steps * steps
    first_size, last_size = (width + bias) * hidden, (inner + bias) * width
    last_at = copies * first_size
    kept_size = 3 * hidden * steps + 2 * cells
    q, k, v, dy, n, g = (
        scratch(cells, dtype), scratch(cells, dtype), scratch(cells, dtype), scratch(cells, dtype),
        scratch(cells, dtype), scratch(cells, dtype),
    )  # fmt: skip
    delta, d_delta, d_result, d_target, d_k = (
        scratch(cells, dtype), scratch(cells, dtype), scratch(cells, dtype), scratch(cells, dtype),
        scratch(cells, dtype),
    )  # fmt: skip
    rows, h, scaled, slope, d_hidden, d_read_of = (
        scratch(most, dtype), scratch(most, dtype), scratch(most, dtype), scratch(most, dtype), scratch(most, dtype),
        scratch(most, dtype),
    )  # fmt: skip
    u_of_hidden, p_of_hidden, first_delta, d_first_delta, read_slope = (
        scratch(most, dtype), scratch(most, dtype), scratch(most, dtype), scratch(most, dtype), scratch(most, dtype),
    )  # fmt: skip
    scores, mixed, d_mixed, turned = (
        scratch(cross, dtype), scratch(cross, dtype), scratch(cross, dtype), scratch(cross, dtype),
    )  # fmt: skip
    scale, mean, along, other, by_scale = (
        scratch(steps, dtype), scratch(steps, dtype), scratch(steps, dtype), scratch(steps, dtype),
        scratch(steps, dtype),
    )  # fmt: skip
    reading, d_reading, sums = scratch(2 * steps, dtype), scratch(2 * steps, dtype), scratch(3 * most, dtype)
    d_norm = scratch(2 * cells, dtype)
    for pair in units(slots):
        norm = part(slots.norm, pair % slots.heads * 2 * width, 2 * width, dtype)
        d_state = part(slots.d_states, pair * size, size, dtype)
        dW1, dZ1 = d_state[:first_size], d_state[last_at - first_size : last_at]
        dW2, dZ2 = d_state[last_at : last_at + last_size], d_state[size - last_size : size]
        _fill(d_norm, 2 * cells)
        for reversed_p in range(parts):
            p = parts - 1 - reversed_p
            at = p * pairs + pair
            transpose(part(slots.q, at * cells, cells, dtype), 0, width, steps, width, q, 0, steps)
            transpose(part(slots.k, at * cells, cells, dtype), 0, width, steps, width, k, 0, steps)
            transpose(part(slots.v, at * cells, cells, dtype), 0, width, steps, width, v, 0, steps)
            transpose(part(slots.dy, at * cells, cells, dtype), 0, width, steps, width, dy, 0, steps)
            _turn_rates(part(slots.read, at * 2 * steps, 2 * steps, dtype), reading, copies, steps)
            within = part(slots.within, at * cross, cross, dtype)
            write = part(slots.write, at * 2 * steps, 2 * steps, dtype)
            carry = part(slots.carry, at * 4, 4, dtype)
            d_within = part(slots.d_within, at * cross, cross, dtype)
            d_write = part(slots.d_write, at * 2 * steps, 2 * steps, dtype)
            d_carry = part(slots.d_carry, at * 4, 4, dtype)
            _fill(d_within, cross)
            _fill(d_write, 2 * steps)
            _fill(d_carry, 4)
            _fill(d_reading, 2 * steps)
            _fill(d_k, cells)
            _fill(d_delta, cells)
            old = part(slots.states, (pair * (parts + 1) + p) * size, size, dtype)
            kept = part(slots.kept, (pair * parts + p) * kept_size, kept_size, dtype)
            z2, r2 = kept[:cells], kept[cells : 2 * cells]
            z1 = kept[2 * cells : 2 * cells + hidden * steps]
            m = kept[2 * cells + hidden * steps : 2 * cells + 2 * hidden * steps]
            r1 = kept[2 * cells + 2 * hidden * steps : kept_size]
            W1, Z1 = old[:first_size], old[last_at - first_size : last_at]
            W2, Z2 = old[last_at : last_at + last_size], old[size - last_size : size]
            dq = part(slots.dq, at * cells, cells, dtype)

            _gradient(z2, k, v, norm, n, delta, scale, mean, along, width, steps, eps)
            _back_norm(r2, dy, norm, d_norm, n, scale, mean, along, width, steps, eps, d_result)
            u, inputs, du, d_inputs = k, q, d_k, dy  # y is q plus what is read
            if hidden:
                _activate(r1, p_of_hidden, read_slope, hidden * steps)
                _activate(z1, u_of_hidden, slope, hidden * steps)
                for i in range(hidden * steps):
                    first_delta[i] = slope[i] * m[i]
                _fill(d_hidden, hidden * steps)
                _fill(d_read_of, hidden * steps)
                _fill(d_first_delta, hidden * steps)
                u, inputs, du, d_inputs = u_of_hidden, p_of_hidden, d_hidden, d_read_of
            _back_one_write(dW2, write[:steps], d_write[:steps], u, du, delta, d_delta, bias, inner, width, steps, h,
                            scaled)  # fmt: skip
            if copies == 2:
                _back_one_write(dZ2, write[steps:], d_write[steps:], u, du, delta, d_delta, bias, inner, width, steps,
                                h, scaled)  # fmt: skip
            _back_carry(W2, Z2, dW2, dZ2, copies, carry, d_carry, sums, inner + bias, width)
            transpose(d_result, 0, steps, width, steps, rows, 0, width)
            _back_one_read(W2, dW2, reading[:steps], d_reading[:steps], inputs, d_inputs, d_result, rows, bias, copies,
                           inner, width, steps, h, scaled)  # fmt: skip
            if copies == 2:
                _back_one_read(Z2, dZ2, reading[steps:], d_reading[steps:], inputs, d_inputs, d_result, rows, bias,
                               copies, inner, width, steps, h, scaled)  # fmt: skip
            _back_scores(within, d_within, u, du, delta, d_delta, inputs, d_inputs, d_result, bias, inner, width, steps,
                         scores, mixed, d_mixed, turned)  # fmt: skip
            if hidden:
                for i in range(hidden * steps):
                    d_read_of[i] *= read_slope[i]
                _back_one_write(dW1, write[:steps], d_write[:steps], k, d_k, first_delta, d_first_delta, bias, width,
                                hidden, steps, h, scaled)  # fmt: skip
                if copies == 2:
                    _back_one_write(dZ1, write[steps:], d_write[steps:], k, d_k, first_delta, d_first_delta, bias,
                                    width, hidden, steps, h, scaled)  # fmt: skip
                _back_carry(W1, Z1, dW1, dZ1, copies, carry, d_carry, sums, width + bias, hidden)
                transpose(d_read_of, 0, steps, hidden, steps, rows, 0, hidden)
                _back_one_read(W1, dW1, reading[:steps], d_reading[:steps], q, dy, d_read_of, rows, bias, copies, width,
                               hidden, steps, h, scaled)  # fmt: skip
                if copies == 2:
                    _back_one_read(Z1, dZ1, reading[steps:], d_reading[steps:], q, dy, d_read_of, rows, bias, copies,
                                   width, hidden, steps, h, scaled)  # fmt: skip
                _back_scores(within, d_within, k, d_k, first_delta, d_first_delta, q, dy, d_read_of, bias, width,
                             hidden, steps, scores, mixed, d_mixed, turned)  # fmt: skip
                for i in range(hidden * steps):
                    h[i] = slope[i] * d_first_delta[i]
                _bend(z1, m, d_first_delta, hidden * steps)
                _multiply(d_delta, width, W2, 1, width, hidden, h, steps, dtype.type(1))
                transpose(delta, 0, steps, width, steps, rows, 0, width)
                add_products(dW2, 0, width, hidden, width, h, 0, steps, 1, steps, rows, 0, width, WHOLE, dtype.type(1))
            _back_gradient(z2, k, v, norm, d_norm, d_delta, n, g, scale, mean, along, other, by_scale, width, steps,
                           eps, d_result, d_target)  # fmt: skip
            transpose(d_result, 0, steps, width, steps, rows, 0, width)
            _back_map(W2, dW2, u, du, d_result, rows, bias, inner, width, steps)
            if hidden:
                for i in range(hidden * steps):
                    d_first_delta[i] += slope[i] * d_hidden[i]
                transpose(d_first_delta, 0, steps, hidden, steps, rows, 0, hidden)
                _back_map(W1, dW1, k, d_k, d_first_delta, rows, bias, width, hidden, steps)
            transpose(dy, 0, steps, width, steps, dq, 0, width)
            for i in range(cells):
                d_k[i] -= d_target[i]
            transpose(d_k, 0, steps, width, steps, part(slots.dk, at * cells, cells, dtype), 0, width)
            transpose(d_target, 0, steps, width, steps, part(slots.dv, at * cells, cells, dtype), 0, width)
            d_read = part(slots.d_read, at * 2 * steps, 2 * steps, dtype)
            for i in range(steps):
                d_read[2 * i] = d_reading[i] if copies == 2 else dtype.type(0)
                d_read[2 * i + 1] = d_reading[steps + i]
        to_norm = part(slots.d_norm, pair * 2 * width, 2 * width, dtype)
        for c in range(2 * width):
            total = dtype.type(0)
            for i in range(steps):
                total += d_norm[c * steps + i]
            to_norm[c] = total


def _shared(
    operands: list[Tensor], norm: Tensor, states: Tensor, kept: Tensor, hidden: int, copies: int, bias: bool
) -> dict[str, object]:
    """Return the slots that both passes have. operands: q, k, v, then the rates, (P, B, H, ...) each."""
    q = operands[0]
    parts, batch, heads, steps, width = q.shape
    names = ("q", "k", "v", "read", "carry", "within", "write")
    return dict(
        zip(names, operands, strict=True), parts=parts, pairs=batch * heads, heads=heads, steps=steps, width=width,
        hidden=hidden, copies=copies, bias=int(bias), slots_kept=kept.shape[1], size=states.shape[2], norm=norm,
        states=states, kept=kept,
    )  # fmt: skip


def forward(
    operands: list[Tensor], norm: Tensor, begin: Tensor, hidden: int, copies: int, bias: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last matrices, all of them where they are kept, and what the maps gave.

    operands: q, k, v (P, B, H, C, K), then the rates.   norm: weight and bias, (H, 2, K).   begin: the matrices (B H,
    S), of each map W and Z.   hidden: features of a hidden layer; 0 for none.   keep: for the backward pass.
    """
    operands = [contiguous(x) for x in operands]
    q = operands[0]
    parts, steps, width = q.shape[0], *q.shape[3:]
    states = empty((len(begin), (parts if keep else 1) + 1, begin.shape[1]), q.dtype)
    states[:, 0] = begin
    kept = empty((len(begin), parts if keep else 1, (3 * hidden + 2 * width) * steps), q.dtype)
    y = empty(q.shape, q.dtype)
    packed = _forward.pack(**_shared(operands, contiguous(norm), states, kept, hidden, copies, bias), y=y)
    _forward.run(q.dtype, packed, len(begin), parts * begin.numel() * steps)
    return y, states[:, parts if keep else parts % 2].clone(), states, kept


def backward(
    dy: Tensor,
    d_end: Tensor,
    operands: list[Tensor],
    norm: Tensor,
    states: Tensor,
    kept: Tensor,
    hidden: int,
    copies: int,
    bias: bool,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the gradients of the operands, of the norm (B H, 2, K), and of the first matrices."""
    operands = [contiguous(x) for x in operands]
    gradients, d_states = [empty(x.shape, x.dtype) for x in operands], d_end.clone()
    d_norm = torch.empty(len(states), *norm.shape[1:], dtype=norm.dtype)
    names = ("dq", "dk", "dv", "d_read", "d_carry", "d_within", "d_write")
    packed = _backward.pack(
        **_shared(operands, contiguous(norm), states, kept, hidden, copies, bias), dy=contiguous(dy),
        d_states=d_states, d_norm=d_norm, **dict(zip(names, gradients, strict=True)),
    )  # fmt: skip
    _backward.run(dy.dtype, packed, len(states), states.numel() * operands[0].shape[3])
    return gradients, d_norm, d_states
