"""Products of many pairs of matrices by the micro-kernel, in half the time of torch's library.

A unit of work is a block of rows of one pair. Where the terms of the second matrix are adjacent in memory, and not its
columns, the unit turns as many terms as are summed in registers.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from typing import Any

import torch
from torch import Tensor

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch
from scanl.ops.products.matrices import LONG_ROWS, ROWS, WIDE, transpose
from scanl.ops.products.micro_kernel import BYTES, by_columns

BLOCK = 256  # rows of a unit
LANES = BYTES // 4  # float32 numbers of a vector

_whole, _narrow, _row = (by_columns(*size, fresh=True) for size in ((ROWS, WIDE), (ROWS, 1), (1, 1)))


@helper(fastmath={"contract", "nsz"})
def _add_strip(y, rows, width, a, a_at, a_row, a_term, b, b_at, b_row, terms, keep):
    """Compute y = keep y + a b for y (rows, width), contiguous; the width is in vectors. a has strides of both axes."""
    lanes, tiled = BYTES // y.itemsize, rows - rows % ROWS
    for j in range(0, width, WIDE * lanes):
        wide = j + WIDE * lanes <= width
        for r in range(0, tiled, ROWS):
            at = a_at + r * a_row
            if wide:
                _whole(y, r * width + j, width, a, at, a_row, a_term, b, b_at + j, b_row, lanes, terms, keep)
            else:
                _narrow(y, r * width + j, width, a, at, a_row, a_term, b, b_at + j, b_row, lanes, terms, keep)
        for i in range(j, min(j + WIDE * lanes, width), lanes):
            for r in range(tiled, rows):
                _row(
                    y, r * width + i, width, a, a_at + r * a_row, a_row, a_term, b, b_at + i, b_row, lanes, terms, keep
                )


@kernel("y a a_outer a_pair a_row a_term b b_outer b_pair b_row b_column pairs rows terms columns blocks")
def _product(slots):
    """Compute y (outer, pairs, rows, columns), contiguous, of operands with strides of four axes."""
    dtype, rows, terms, columns = slots.dtype, slots.rows, slots.terms, slots.columns
    a_row, a_term, b_row, b_column = slots.a_row, slots.a_term, slots.b_row, slots.b_column
    turned = scratch(LONG_ROWS * columns if b_column != 1 else 0, dtype)
    for unit in units(slots):
        pair, first = unit // slots.blocks, unit % slots.blocks * BLOCK
        count = min(BLOCK, rows - first)
        a_at = pair // slots.pairs * slots.a_outer + pair % slots.pairs * slots.a_pair + first * a_row
        b_at = pair // slots.pairs * slots.b_outer + pair % slots.pairs * slots.b_pair
        a = part(slots.a, a_at, (count - 1) * a_row + (terms - 1) * a_term + 1, dtype)
        b = part(slots.b, b_at, (terms - 1) * b_row + (columns - 1) * b_column + 1, dtype)
        y = part(slots.y, (pair * rows + first) * columns, count * columns, dtype)
        for k in range(0, terms, LONG_ROWS):
            some = min(LONG_ROWS, terms - k)
            strip, at, row = b, k * b_row, b_row
            if b_column != 1:
                full = some - some % LANES
                transpose(b, k, b_column, columns, full, turned, 0, columns)
                for t in range(full, some):
                    for j in range(columns):
                        turned[t * columns + j] = b[j * b_column + k + t]
                strip, at, row = turned, 0, columns
            _add_strip(y, count, columns, a, k * a_term, a_row, a_term, strip, at, row, some, dtype.type(k > 0))


def _readable(b: Tensor) -> Tensor:
    """Return b with adjacent rows or columns."""
    return b if 1 in b.stride()[2:] else b.contiguous()


def _by_kernel(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for a (n, m, M, K) and b (n, m, K, N), of which M or N is in vectors."""
    if b.shape[3] % LANES:
        return _by_kernel(b.mT, a.mT).mT
    b = _readable(b)
    outer, pairs, rows, terms = a.shape
    columns, blocks = b.shape[3], -(-rows // BLOCK)
    y = empty((outer, pairs, rows, columns), a.dtype)
    strides = [tensor.stride() for tensor in (a, b)]
    packed = _product.pack(
        y=y, a=a, a_outer=strides[0][0], a_pair=strides[0][1], a_row=strides[0][2], a_term=strides[0][3],
        b=b, b_outer=strides[1][0], b_pair=strides[1][1], b_row=strides[1][2], b_column=strides[1][3],
        pairs=pairs, rows=rows, terms=terms, columns=columns, blocks=blocks,
    )  # fmt: skip
    _product.run(a.dtype, packed, outer * pairs * blocks, y.numel() * terms)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a, b):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _by_kernel(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        times = torch.matmul if torch.is_grad_enabled() else _times  # the gradient may be differentiated
        dy = _readable(dy)
        return tuple(
            times(left, right) if needed else None
            for needed, left, right in zip(ctx.needs_input_grad, (dy, a.mT), (b.mT, dy), strict=True)
        )


def _times(a: Tensor, b: Tensor) -> Tensor:
    return _by_kernel(a, b) if a.shape[2] % LANES == 0 or b.shape[3] % LANES == 0 else torch.matmul(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for a (..., M, K) and b (..., K, N), whose other axes are the same or can be expanded."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    four = lead if len(lead) == 2 else (lead[:-1].numel(), lead[-1])
    a, b = (tensor.expand(*lead, *tensor.shape[-2:]).reshape(*four, *tensor.shape[-2:]) for tensor in (a, b))
    learned = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    y: Any = _Product.apply(a, b) if learned else _by_kernel(a, b)
    return y.reshape(*lead, *y.shape[-2:])
