"""Chunks of time for matrix memories on a GPU: their rows, sums of log decays in a chunk, and pairs of its steps.

The pairs of a chunk are the matrix A_ts = sum over k of x_t[k] y_s[k] e^{D_ts[k]} of steps s < t, where D_ts is the sum
of g_i over s < i <= t (i < t if EXCLUSIVE). No exponent may be positive, as 1/e^{sum} overflows. To write A as a matrix
product, the decay is split at a step m between s and t: e^{D_tm} e^{D_ms}. This is done at log2(C) levels. At level i
the chunk is cut into segments of 2^{i+1} steps, and m is the middle of a segment. The x of a segment's upper half are
multiplied with the y of its lower half. Each pair of steps occurs at exactly one level. A level is one matrix product.
Its sums of decays are also a matrix product, of g with zeros and ones: g keeps its dtype, so it is exact, and no sum is
a difference. This takes log2(C) exponentials per number instead of C/2, and log2(C) products, whose masked parts are
wasted work. If all channels have the same decay, it is a factor of each pair, outside the product.

Legend: C steps of a chunk; i_row is t and i_col is s. DECAY: 0 none, 1 one per step, 2 one per step and channel. A unit
is a chunk of one head and a block of its channels. On a GPU a program does one unit, and blocks have two axes. In the
interpreter, time is proportional to the number of calls, so a program does many units there: their indices have shape
(UNITS, 1, 1), and every block has an extra first axis. So axes are counted from the end, here and in the modules that
import this one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._triton._tuned import HAS_SMALL_TILES

CHUNK = 16 if HAS_SMALL_TILES else 64  # short chunks, so that small tests have several
C, LEVELS = tl.constexpr(CHUNK), tl.constexpr(CHUNK.bit_length() - 1)
MAX_UNITS = 64 if CHUNK == 16 else 1  # units of a program
# It replaces -inf: its exponential is 0 in float32 too, but times 0 it is 0.
LOWEST_EXPONENT: tl.constexpr = tl.constexpr(-128.0)
LOWEST_IN_DOUBLE: tl.constexpr = tl.constexpr(-1e4)  # the same for float64
DECAY_SCALE: tl.constexpr = tl.constexpr(256.0)  # scales decays for float16: few become subnormal, and LOWEST fits


@triton.jit
def units(UNITS: tl.constexpr):
    """Return the indices of this program's units."""
    if UNITS == 1:
        return tl.program_id(0)
    else:
        return tl.program_id(0) * UNITS + tl.arange(0, UNITS)[:, None, None]


def units_of(count: int) -> int:
    """Return the number of units of a program: a power of two that divides `count`."""
    return min(MAX_UNITS, count & -count)


@triton.jit
def chunk(i_chunk, p_chunks, length, per_seq, REVERSE: tl.constexpr, TABLE: tl.constexpr):
    """Return the row of a chunk's first step, and its number of steps. per_seq: chunks of a sequence of `length`."""
    if TABLE:
        return tl.load(p_chunks + 2 * i_chunk), tl.load(p_chunks + 2 * i_chunk + 1).to(tl.int32)
    else:
        i_n, start = (i_chunk // per_seq).to(tl.int64), i_chunk % per_seq * C
        first = i_n * length + (length - 1 - start if REVERSE else start)
        return first, tl.minimum(length - start, C)


@triton.jit
def sequence(i_n, p_sequences, length, per_seq, REVERSE: tl.constexpr, TABLE: tl.constexpr):
    """Return the row of a sequence's first step, its number of steps, and the index of its first chunk."""
    if TABLE:
        p = p_sequences + 3 * i_n
        return tl.load(p), tl.load(p + 1).to(tl.int32), tl.load(p + 2)
    else:
        begin = i_n.to(tl.int64) * length
        return begin + (length - 1 if REVERSE else 0), length.to(tl.int32), i_n.to(tl.int64) * per_seq


@triton.jit
def _place(
    rows,
    i_column,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i_row = tl.arange(0, ROWS)[:, None]
    i_col = i_column + tl.arange(0, COLUMNS)[None, :]
    return (-i_row if REVERSE else i_row) * (HEADS * WIDTH) + i_col, (i_row < rows) & (i_col < WIDTH)


@triton.jit
def load(p, first, rows, i_head, i_column, HEADS: tl.constexpr, WIDTH: tl.constexpr, REVERSE: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Load (C, BLOCK) of a tensor (rows, HEADS, WIDTH), in the order of the scan; zero outside the tensor."""
    at, there = _place(rows, i_column, HEADS, WIDTH, REVERSE, C, BLOCK)
    return tl.load(p + (first * HEADS + i_head) * WIDTH + at, mask=there, other=0.0)


@triton.jit
def store(p, value, first, rows, i_head, i_column, HEADS: tl.constexpr, WIDTH: tl.constexpr, REVERSE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Store what `load` loads."""
    at, there = _place(rows, i_column, HEADS, WIDTH, REVERSE, C, BLOCK)
    tl.store(p + (first * HEADS + i_head) * WIDTH + at, value, mask=there)


@triton.jit
def load_state(p, some, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Load (BK, BV) of a matrix (K, V). some: 1, or 0 for an empty chunk, which loads zeros."""
    at, there = _place(some * K - i_k, i_v, 1, V, False, BK, BV)
    return tl.load(p + i_k * V + at, mask=there, other=0.0)


@triton.jit
def store_state(p, value, i_k, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    at, there = _place(K - i_k, i_v, 1, V, False, BK, BV)
    tl.store(p + i_k * V + at, value, mask=there)


@triton.jit
def dot(x, y, dtype: tl.constexpr):
    """Multiply matrices. Factors are rounded to `dtype`; sums are float32, or float64 if `dtype` is."""
    x, y = _paired(x.to(dtype), y.to(dtype))
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _paired(x, y):
    """Broadcast a factor that all units have in common to every unit."""
    if len(x.shape) < len(y.shape):
        return tl.broadcast_to(x[None, :, :], (y.shape[0], x.shape[0], x.shape[1])), y
    elif len(y.shape) < len(x.shape):
        return x, tl.broadcast_to(y[None, :, :], (x.shape[0], y.shape[0], y.shape[1]))
    else:
        return x, y


@triton.jit
def load_decays(p_g, first, rows, i_head, i_column, H: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr,
                DECAY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Load log decays: (C, BLOCK) per step and channel, (1, C) per step, or a zero if there are none."""
    if DECAY == 2:
        b_g = load(p_g, first, rows, i_head, i_column, H, K, REVERSE, BLOCK)
    elif DECAY == 1:
        i_col = tl.arange(0, C)[None, :]
        p = p_g + first * H + i_head + (-i_col if REVERSE else i_col) * H
        b_g = tl.load(p, mask=i_col < rows + 0 * i_head, other=0.0)
    if DECAY == 0:
        return tl.zeros((1, 1), tl.float32)
    else:
        dtype: tl.constexpr = p_g.dtype.element_ty
        lowest: tl.constexpr = LOWEST_IN_DOUBLE if dtype == tl.float64 else LOWEST_EXPONENT
        return tl.maximum(b_g, lowest, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def finite(b):
    """Replace numbers that are not finite by zero: masked numbers are multiplied by zero, and 0 times NaN is NaN."""
    return tl.where(tl.abs(b) < float("inf"), b, 0.0).to(b.dtype)


@triton.jit
def fault(b):
    """Return (C, 1): for each step 0, or NaN if one of its numbers is not finite."""
    return tl.sum((b * 0.0).to(tl.float32), -1, keep_dims=True)


@triton.jit
def fault_of_decays(b_g, DECAY: tl.constexpr):
    if DECAY == 2:
        return fault(b_g)
    else:
        return (tl.trans(b_g) * 0.0).to(tl.float32)


@triton.jit
def first_fault(b_fault):
    """Return each column's first step with a fault, C if there is none: a row, which takes few registers."""
    return tl.min(tl.where(b_fault == 0, C, tl.arange(0, C)[:, None]), -2, keep_dims=True)


@triton.jit
def spoilt(b, i_fault):
    """Set each column to NaN from its first fault on, since `finite` removed the NaN from the products."""
    return tl.where(tl.arange(0, C)[:, None] >= i_fault, float("nan"), b)


@triton.jit
def _added(chosen, b_g):
    """Multiply zeros and ones by log decays, exactly: for tensor cores, a float32 is split into three float16."""
    if b_g.dtype == tl.float32:
        chosen, b_rest = _paired(chosen.to(tl.float16), b_g * DECAY_SCALE)
        b_high = b_rest.to(tl.float16)
        b_rest -= b_high.to(tl.float32)
        b_middle = b_rest.to(tl.float16)
        b_sum = tl.dot(chosen, (b_rest - b_middle.to(tl.float32)).to(tl.float16))
        return tl.dot(chosen, b_high, tl.dot(chosen, b_middle, b_sum)) / DECAY_SCALE
    else:
        return dot(chosen, b_g, b_g.dtype)


@triton.jit
def _sums(chosen, b_g, DECAY: tl.constexpr):
    """Return (C, 1 or BLOCK): for each step, the sum of log decays over the steps in its row of `chosen` (C, C)."""
    if DECAY == 2:
        return _added(chosen, b_g)
    elif DECAY == 1:
        wide: tl.constexpr = tl.float64 if b_g.dtype == tl.float64 else tl.float32
        return tl.sum(tl.where(chosen, b_g.to(wide), 0.0), -1, keep_dims=True)
    else:
        return b_g


@triton.jit
def leading(b_g, DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Return the decay from the chunk's beginning to each step, excluding the step itself if EXCLUSIVE."""
    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.exp(_sums(i_col < i_row if EXCLUSIVE else i_col <= i_row, b_g, DECAY))


@triton.jit
def trailing(b_g, DECAY: tl.constexpr):
    """Return the decay after each step, to the chunk's end."""
    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.exp(_sums(i_col > i_row, b_g, DECAY))


@triton.jit
def whole(b_g, DECAY: tl.constexpr):
    """Return the decay of the whole chunk, (1, 1 or BLOCK)."""
    wide: tl.constexpr = tl.float64 if b_g.dtype == tl.float64 else tl.float32
    return tl.exp(tl.sum(b_g.to(wide), -2 if DECAY == 2 else -1, keep_dims=True))


@triton.jit
def _level(i, b_g, EXCLUSIVE: tl.constexpr):
    """Describe level i, with segments of 2^{i+1} steps.

    Return a mask (C, C) of the steps between each step and the middle of its segment, the decay over these, a mask of
    the steps in upper halves, and a mask (C, C) of the pairs of steps in one segment.
    """
    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    middle = ((i_row >> i) | 1) << i
    upper, after = i_row >= middle, i_row + 1
    begin, end = tl.where(upper, middle, after), tl.where(upper, i_row if EXCLUSIVE else after, middle)
    between = (i_col >= begin) & (i_col < end)  # written so that no mask is common to all levels and kept in registers
    return between, tl.exp(_sums(between, b_g, 2)), upper, (i_row >> (i + 1)) == (i_col >> (i + 1))


@triton.jit
def pairs(b_A, b_x, b_y, b_g, DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Add the pairs of a block of channels to b_A. After adding all blocks, call `decayed`."""
    if DECAY == 2:
        for i in tl.range(0, LEVELS, num_stages=1, disable_licm=True):
            _, b_e, upper, near = _level(i, b_g, EXCLUSIVE)
            b_up, b_low = tl.where(upper, b_x * b_e, 0.0), tl.where(upper, 0.0, b_y * b_e)
            b_A += tl.where(near, dot(b_up, tl.trans(b_low), b_x.dtype), 0.0)
        return b_A
    else:
        return b_A + dot(b_x, tl.trans(b_y), b_x.dtype)


@triton.jit
def decayed(b_A, b_g, DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Apply the decay, if it is one for all channels, to pairs or their gradient; make them strictly lower."""
    if DECAY == 2:
        return b_A
    else:
        i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        if DECAY == 1:
            to_step = i_col < i_row if EXCLUSIVE else i_col <= i_row
            b_A *= tl.exp(_added(to_step, tl.where(i_row > i_col, tl.trans(b_g), 0.0)))
        return tl.where(i_row > i_col, b_A, 0.0)


@triton.jit
def pairs_backward(b_dA, b_x, b_y, b_g, DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr, b_dx=None, b_dy=None, b_dg=None):
    """Return the gradients of x, y and the decays of a block of channels, from the gradient of the pairs after
    `decayed`.

    Each is added to the one passed in, if any. The gradient of a decay is the sum over the pairs that it decays; the
    axes are as in `decay_gradient`. Sums of x dx - y dy from a step on equal it, but in them the pairs of later steps
    would have to cancel.
    """
    if b_dx is None:
        b_dx, b_dy = tl.zeros(b_x.shape, b_dA.dtype), tl.zeros(b_x.shape, b_dA.dtype)
    if DECAY == 2:
        if b_dg is None:
            b_dg = tl.zeros(b_x.shape, b_dA.dtype)
        b_dA = b_dA.to(b_x.dtype)
        for i in tl.range(0, LEVELS, num_stages=1, disable_licm=True):
            between, b_e, upper, near = _level(i, b_g, EXCLUSIVE)
            b_d = tl.where(near, b_dA, 0.0)
            b_low = dot(b_d, tl.where(upper, 0.0, b_y * b_e), b_x.dtype)
            b_low = tl.where(upper, b_e * b_low, 0.0)
            b_up = dot(tl.trans(b_d), tl.where(upper, b_x * b_e, 0.0), b_x.dtype)
            b_up = tl.where(upper, 0.0, b_e * b_up)
            b_dx += b_low
            b_dy += b_up
            b_dg += dot(tl.trans(between), b_x * b_low + b_y * b_up, b_x.dtype)
        return b_dx, b_dy, b_dg
    else:
        if b_dg is None:
            b_dg = tl.zeros((1, 1), b_dA.dtype)
        if DECAY == 1:
            i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
            to_step = i_row > i_col if EXCLUSIVE else i_row >= i_col
            b_more = dot(tl.trans(b_dA * dot(b_x, tl.trans(b_y), b_x.dtype)), to_step, b_x.dtype)
            b_dg += tl.sum(tl.where(i_row < i_col, b_more, 0.0), -2, keep_dims=True)
        return b_dx + dot(b_dA, b_y, b_x.dtype), b_dy + dot(tl.trans(b_dA), b_x, b_x.dtype), b_dg


@triton.jit
def decay_gradient(b_x, b_y, dtype: tl.constexpr, DECAY: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Return the gradient of the log decays, (C, BLOCK) or (1, C), from terms that cross the chunk's borders.

    b_x: x dx of what is read from the state before the chunk.   b_y: y dy of what is written to the state after the
    chunk, or None.
    """
    i_row, i_col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if DECAY == 2:
        b_dg = dot(i_col > i_row if EXCLUSIVE else i_col >= i_row, b_x, dtype)
        return b_dg if b_y is None else b_dg + dot(i_col < i_row, b_y, dtype)
    else:
        b_x = tl.sum(b_x, -1, keep_dims=True)
        b_x = tl.where(i_row > i_col if EXCLUSIVE else i_row >= i_col, b_x, 0.0)
        if b_y is not None:
            b_x += tl.where(i_row < i_col, tl.sum(b_y, -1, keep_dims=True), 0.0)
        return tl.sum(b_x, -2, keep_dims=True)


class Chunks(NamedTuple):
    """The rows of the chunks of all sequences."""

    count: int  # an upper bound for packed sequences; the surplus chunks are empty
    sequences: int
    numbers: tuple[Tensor | None, Tensor | None, int, int]  # chunks, sequences, length, per_seq: arguments of `chunk`
    flags: dict[str, bool | int]


def chunks(batch: int, length: int, reverse: bool, cu_seqlens: Tensor | None) -> Chunks:
    """Compute the chunks without synchronising the GPU."""
    flags: dict[str, bool | int] = {"REVERSE": reverse, "TABLE": cu_seqlens is not None}
    per_seq = -(-length // CHUNK)
    if cu_seqlens is None:
        return Chunks(batch * per_seq, batch, (None, None, length, per_seq), flags)
    offsets = cu_seqlens.long()
    n = len(offsets) - 1
    steps = offsets.diff()
    first = offsets[1:] - 1 if reverse else offsets[:-1]
    parts = (steps + CHUNK - 1) // CHUNK
    ends = parts.cumsum(0)
    count = length // CHUNK + n
    if MAX_UNITS > 1:  # round up, so that one program of the interpreter can do many chunks
        count = triton.next_power_of_2(count)
    i = torch.arange(count, device=offsets.device)
    owner = torch.searchsorted(ends, i, right=True).clamp(max=n - 1)
    start = (i - (ends - parts)[owner]) * CHUNK
    table = torch.stack([first[owner] + (-start if reverse else start), (steps[owner] - start).clamp(0, CHUNK)], 1)
    return Chunks(count, n, (table, torch.stack([first, steps, ends - parts], 1), length, per_seq), flags)
