"""Multiply matrices inside a kernel: a few rows by a matrix, or matrices of whole tiles.

With AVX-512 a vector is one register: a tile is four rows of two vectors, two of four, or one of eight. Where there are
eight rows, a tile takes them all, which needs fewer loads for each sum. Without it a vector takes two of sixteen
registers, and tiles are half as wide: sums for which no register is left would go through memory at every term.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._vectors import emitted
from scanl.ops.products.micro_kernel import BYTES, WIDE_REGISTERS, by_columns, by_some_columns

TERMS = 32  # terms summed in registers
LONG_ROWS = 64  # the same for whole tiles: these rows of a panel of w stay in the first-level cache
ROWS, WIDE = (8, 2) if WIDE_REGISTERS else (4, 1)  # rows and vectors of a whole tile
WHOLE, LOWER, UPPER, BELOW = range(4)  # what `add_products` may leave out
ADJACENT_STRIDE = 1  # the stride of adjacent numbers


_large, _narrow = by_columns(ROWS, WIDE), by_columns(ROWS, 1)
_four, _two, _one = by_columns(4, WIDE), by_columns(2, 2 * WIDE), by_columns(1, 4 * WIDE)
_four_by_one, _one_by_one = by_columns(4, 1), by_columns(1, 1)
_four_by_some, _one_by_some = by_some_columns(4), by_some_columns(1)


@helper(forceinline=True, fastmath={"contract", "nsz"})
def add_part_products(out, out_at, out_row, width, h, h_at, h_row, n, w, w_at, panels, count):
    """Compute out += h w for `count` rows: out (count, width), h (count, n), w (n, width).

    Each is a part of a flat array, given by its start index (_at) and its row stride (_row). The rows of w are
    adjacent, unless `panels` says that its columns are in panels, as `in_panels` of _cells.py has them.

    TERMS terms at a time are summed from zero and then added, so rounding errors of long sums stay small.
    """
    lanes, one = BYTES // out.itemsize, out.dtype.type(1)
    full = width - width % lanes
    w_row, w_next = (lanes, n * lanes) if panels else (width, lanes)
    done = 0
    while done < count:
        remaining = count - done
        tall = ROWS if remaining >= ROWS else 4 if remaining >= 4 else 2 if remaining >= 2 else 1
        wide, end = 4 * WIDE // min(tall, 4) * lanes, count - remaining % tall
        j = 0
        while j < full:
            step = wide if full - j >= wide else lanes
            for k in range(0, n, TERMS):
                terms, row = min(TERMS, n - k), w_at + j // lanes * w_next + k * w_row
                for r in range(done, end, tall):
                    o, a = out_at + r * out_row + j, h_at + r * h_row + k
                    if step < wide and tall >= 4:
                        for s in range(0, tall, 4):
                            o_s, a_s = o + s * out_row, a + s * h_row
                            _four_by_one(out, o_s, out_row, h, a_s, h_row, 1, w, row, w_row, w_next, terms, one)
                    elif step < wide:
                        for s in range(tall):
                            o_s, a_s = o + s * out_row, a + s * h_row
                            _one_by_one(out, o_s, out_row, h, a_s, h_row, 1, w, row, w_row, w_next, terms, one)
                    elif tall == ROWS:
                        _large(out, o, out_row, h, a, h_row, 1, w, row, w_row, w_next, terms, one)
                    elif tall == 4:
                        _four(out, o, out_row, h, a, h_row, 1, w, row, w_row, w_next, terms, one)
                    elif tall == 2:
                        _two(out, o, out_row, h, a, h_row, 1, w, row, w_row, w_next, terms, one)
                    else:
                        _one(out, o, out_row, h, a, h_row, 1, w, row, w_row, w_next, terms, one)
            j += step
        done = end
    tail, tail_row = (w_at + n * full, width - full) if panels else (w_at + full, width)
    done = 0 if full < width else count
    while done < count:
        o, a = out_at + done * out_row + full, h_at + done * h_row
        if count - done >= 4:
            _four_by_some(out, o, out_row, h, a, h_row, w, tail, tail_row, n, width - full)
            done += 4
        else:
            _one_by_some(out, o, out_row, h, a, h_row, w, tail, tail_row, n, width - full)
            done += 1


@helper(fastmath={"contract", "nsz"})
def add_products(out, out_at, out_row, rows, width, h, h_at, h_row, h_term, terms, w, w_at, w_row, region, keep):
    """Compute out = keep out + h w for matrices of whole tiles: `rows` in ROWS, `width` in vectors.

    h has strides of both axes.
    region: WHOLE; LOWER or UPPER if h is zero above or below its diagonal, where no product is then computed; BELOW if
    only out on and below its diagonal is computed. The others need a `keep` of 1.
    """
    lanes = BYTES // out.itemsize
    for first in range(0, terms, LONG_ROWS):
        factor = keep if first == 0 else out.dtype.type(1)
        for j in range(0, width, WIDE * lanes):
            for r in range(0, rows, ROWS):
                low = max(first, r) if region == UPPER else first
                high = min(first + LONG_ROWS, terms, r + ROWS) if region == LOWER else min(first + LONG_ROWS, terms)
                if low >= high or (region == BELOW and j >= r + ROWS):
                    continue
                o, a, b = out_at + r * out_row + j, h_at + r * h_row + low * h_term, w_at + low * w_row + j
                if j + WIDE * lanes <= width:
                    _large(out, o, out_row, h, a, h_row, h_term, w, b, w_row, lanes, high - low, factor)
                else:
                    _narrow(out, o, out_row, h, a, h_row, h_term, w, b, w_row, lanes, high - low, factor)


@emitted(width=BYTES)
def _transpose(e, out, out_at, out_row, x, x_at, x_row):
    """Transpose a square of as many rows as a vector has lanes."""
    rows = [e.read(e.at(x, x_at, (r, x_row))) for r in range(e.strip.count)]
    for r, row in enumerate(e.transposed(rows)):
        e.write(row, e.at(out, out_at, (r, out_row)))


@helper()
def transpose(x, x_at, x_row, rows, width, out, out_at, out_row):
    """Write xᵀ (width, rows) to out, for x (rows, width); both sizes are multiples of the lanes of a vector."""
    lanes = BYTES // out.itemsize
    for r in range(0, rows, lanes):
        for j in range(0, width, lanes):
            _transpose(out, out_at + j * out_row + r, out_row, x, x_at + r * x_row + j, x_row)
