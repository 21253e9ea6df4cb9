"""Products of a few rows and a matrix, with sums in the order of a library's product of many rows.

A library multiplies a single row by other code than many rows, and the last bits differ. Here each sum adds its terms
in their order, fused, in parts of `part` terms; the parts are added in their order. Which part gives the library's bits
is found by trying: see `blocks.py`.

A matrix is stored as a linear layer has it, (N, K), and squares of it are transposed in registers; or it is (K, N).
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import torch

from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import itemsize, part, units
from scanl.ops._cpu._team import scratch
from scanl.ops.products.micro_kernel import BYTES, SIDE, SQUARE_BYTES, by_columns, by_columns_of_rows

UNIT_VECTORS = 4  # vectors of columns of a unit where rows of the matrix are adjacent
_unit = by_columns(1, UNIT_VECTORS)


@kernel("rows terms columns part blocks transposed x w bias y")
def _product(slots):
    rows, terms, columns, dtype = slots.rows, slots.terms, slots.columns, slots.dtype
    lanes, vector, one = SQUARE_BYTES // itemsize(dtype), BYTES // itemsize(dtype), dtype.type(1)
    width = SIDE * lanes if slots.transposed else UNIT_VECTORS * vector
    sums, totals = scratch(width, dtype), scratch(width, dtype)
    to_column, to_term = (terms, 1) if slots.transposed else (1, columns)
    for unit in units(slots):  # a unit is `width` columns of a matrix; the last overlaps the one before it
        matrix, wide = unit // slots.blocks, min(width, columns)
        column = min(unit % slots.blocks * width, columns - wide)
        x = part(slots.x, matrix * rows * terms, rows * terms, dtype)
        y = part(slots.y, matrix * rows * columns, rows * columns, dtype)
        w = part(slots.w, matrix * columns * terms, columns * terms, dtype)
        for r in range(rows):
            fill(totals, 0, width, dtype.type(0))
            for first in range(0, terms, slots.part):
                end, done, w_at = min(first + slots.part, terms), first, column * to_column + first * to_term
                fill(sums, 0, width, dtype.type(0))
                if wide == width and not slots.transposed:
                    _unit(sums, 0, 0, x, r * terms + first, 0, 1, w, w_at, columns, vector, end - first, one)
                    done = end
                elif wide == width and end - first >= lanes:
                    done = end - (end - first) % lanes
                    by_columns_of_rows(sums, x, r * terms + first, w, w_at, terms, done - first)
                for k in range(done, end):
                    for j in range(wide):
                        sums[j] += x[r * terms + k] * w[(column + j) * to_column + k * to_term]
                for j in range(wide):
                    totals[j] += sums[j]
            for j in range(wide):
                total = totals[j]
                if slots.bias != 0:
                    total += part(slots.bias, column + j, 1, dtype)[0]
                y[r * columns + column + j] = total


def multiply(x: torch.Tensor, w: torch.Tensor, transposed: bool, bias: torch.Tensor | None, terms: int) -> torch.Tensor:
    """Return x w + bias for x (..., K) and w (K, N), or for x (n, M, K) and w (n, K, N); all are contiguous.

    transposed: w is stored as (N, K), and given so.   terms: the terms of a part.
    """
    columns, size = w.shape[-2:] if transposed else (w.shape[-1], w.shape[-2])
    matrices = 1 if w.ndim == 2 else len(w)
    y = empty((*x.shape[:-1], columns), x.dtype)
    bytes_of_unit = SIDE * SQUARE_BYTES if transposed else UNIT_VECTORS * BYTES
    rows, blocks = x.numel() // (size * matrices), -(-columns * x.itemsize // bytes_of_unit)
    packed = _product.pack(
        rows=rows, terms=size, columns=columns, part=terms, blocks=blocks, transposed=int(transposed),
        x=x, w=w, bias=bias, y=y,
    )  # fmt: skip
    _product.run(x.dtype, packed, blocks * matrices, w.numel())
    return y
