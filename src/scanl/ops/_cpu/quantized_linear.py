"""Products of rows and a weight of whole numbers of 8 or 4 bits.

A row of x becomes whole numbers too, of 16 bits for a weight of 8 and of 13 for one of 4. Sums of products of whole
numbers have no rounding, so neither their order nor the other rows, the tile or the thread change a bit of a result.

A vector of 16 products is one instruction on most processors, which also adds neighbors. A row alone takes four rows of
the weight at a time; of several rows, tiles of four by two keep eight sums in registers. The rows of the weight that a
tile takes are far apart: each of a few streams through memory is in order, which processors read ahead. Four rows next
to one another were seen to come from memory at a third of the rate.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch

LANES = 16  # whole numbers of a vector
GROUP = 2 * LANES  # terms of a group of a weight of 4 bits: one byte for each pair of terms LANES apart
TERMS = 128 * GROUP  # terms of which a lane of 32 bits has the sum of an eighth
MAX_INPUT = 32767  # largest whole number of x beside 8 bits: 127 · 32767 · TERMS / 8 < 2³¹
MOST_BY_GROUPS = 4095  # the same beside 4 bits: a number is at most 8 · 127
ROWS = 16  # rows of a unit: they stay in the first-level cache
MIN_UNIT_COLUMNS = 64  # columns of a unit, at least
_SIZE = ir.IntType(64)
_BYTES, _SHORTS, _PRODUCTS = (ir.VectorType(ir.IntType(bits), LANES) for bits in (8, 16, 32))
_SUMS = ir.VectorType(ir.IntType(32), LANES // 2)
_TOTALS = ir.VectorType(_SIZE, LANES // 2)
_ADD_UP = f"llvm.vector.reduce.add.v{LANES // 2}i64"


def _tile(count: int, wide: int, grouped: bool) -> Any:
    """Build an intrinsic: totals[r, c] += Σ_k x[r, k] w[c, k] for `count` rows of x and `wide` rows of w.

    The arrays are flat; for each, the arguments give the index at which the tile begins and the stride of rows. `terms`
    is a multiple of GROUP, above 0.
    """

    @intrinsic
    def tile(typingctx, totals, x, x_at, x_row, w, w_at, w_row, group, group_at, group_row, terms):
        def codegen(context, builder, signature, args):
            _, _, x_at, x_row, _, w_at, w_row, _, group_at, group_row, terms = args
            totals, xs, ws, groups = (
                context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 1, 4, 7)
            )

            def load(data, at, kind):
                address = builder.gep(data, [at])
                return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)

            def row(at, stride, number):
                return builder.add(at, builder.mul(stride, _SIZE(number)))

            def all_of(number):
                return ir.Constant(_SHORTS, [number] * LANES)

            def spread(number):
                one = builder.insert_element(ir.Constant(_SHORTS, ir.Undefined), number, ir.IntType(32)(0))
                lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                return builder.shuffle_vector(one, ir.Constant(_SHORTS, ir.Undefined), lanes)

            def sums_of_neighbors(a, b):
                products = builder.mul(builder.sext(a, _PRODUCTS), builder.sext(b, _PRODUCTS))
                halves = (ir.Constant(_SUMS, list(range(first, LANES, 2))) for first in (0, 1))
                return builder.add(*(builder.shuffle_vector(products, products, half) for half in halves))

            def numbers(c, k):
                """Return vectors of row c of the weight, from term k on."""
                if not grouped:
                    return [builder.sext(load(ws, builder.add(row(w_at, w_row, c), k), _BYTES), _SHORTS)]
                half, number = builder.lshr(k, _SIZE(1)), builder.udiv(k, _SIZE(GROUP))
                pairs = builder.zext(load(ws, builder.add(row(w_at, w_row, c), half), _BYTES), _SHORTS)
                scale = builder.load(builder.gep(groups, [builder.add(row(group_at, group_row, c), number)]))
                scale = spread(builder.sext(scale, ir.IntType(16)))
                lower, upper = builder.and_(pairs, all_of(15)), builder.lshr(pairs, all_of(4))
                return [builder.mul(scale, builder.sub(four, all_of(8))) for four in (lower, upper)]

            entry, loop, done = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_SIZE)
            sums = [builder.phi(_SUMS) for _ in range(count * wide)]
            new = list(sums)
            weights = [numbers(c, k) for c in range(wide)]
            for half in range(2 if grouped else 1):
                for r in range(count):
                    at = builder.add(row(x_at, x_row, r), builder.add(k, _SIZE(half * LANES)))
                    of_x = load(xs, at, _SHORTS)
                    for c in range(wide):
                        new[r * wide + c] = builder.add(new[r * wide + c], sums_of_neighbors(of_x, weights[c][half]))
            k_next = builder.add(k, _SIZE(GROUP if grouped else LANES))
            builder.cbranch(builder.icmp_signed("<", k_next, terms), loop, done)
            k.add_incoming(_SIZE(0), entry)
            k.add_incoming(k_next, loop)
            for total, later in zip(sums, new, strict=True):
                total.add_incoming(ir.Constant(_SUMS, [0] * (LANES // 2)), entry)
                total.add_incoming(later, loop)
            builder.position_at_end(done)
            add_up = get_or_insert_function(builder.module, ir.FunctionType(_SIZE, [_TOTALS]), _ADD_UP)
            for number, total in enumerate(new):
                address = builder.gep(totals, [_SIZE(number)])
                added = builder.call(add_up, [builder.sext(total, _TOTALS)])
                builder.store(builder.add(builder.load(address), added), address)
            return context.get_dummy_value()

        integer = types.int64
        places = integer, integer
        return types.void(totals, x, *places, w, *places, group, *places, integer), codegen

    return tile


_four, _one = _tile(4, 2, False), _tile(1, 4, False)
_four_by_groups, _one_by_groups = _tile(4, 2, True), _tile(1, 4, True)


@helper(error_model="numpy")
def _as_whole(out, first, x, bits, limit):
    """Write x as whole numbers of at most `limit`; return the factor that makes x of them, NaN if x is not finite.

    bits: the same memory as whole numbers, which are in the order of the absolute values but for the sign.
    """
    largest = np.int32(0)
    for k in range(x.size):
        largest = max(largest, np.int32(bits[k] & np.int32(0x7FFFFFFF)))
    peak = np.int32(largest).view(np.float32)
    by = np.float32(limit) / peak
    if not peak < np.inf:
        return np.float32(np.nan)
    if not by < np.inf:  # all are 0, or next to it
        fill(out, first, x.size, 0)
        return np.float32(0)
    for k in range(x.size):
        out[first + k] = np.int16(np.rint(x[k] * by))
    return peak / np.float32(limit)


@helper()
def _add_products(totals, count, x, x_at, terms, w, column, apart, group, grouped):
    """Write the products of a tile to the totals: of four rows and two columns, or of one and four.

    apart: the distance of the columns.
    """
    fill(totals, 0, totals.size, 0)
    row, groups = terms // 2 if grouped else terms, terms // GROUP
    w_row, group_row = apart * row, apart * groups
    for first in range(0, terms, TERMS):
        end = min(TERMS, terms - first)
        w_at = column * row + (first // 2 if grouped else first)
        group_at = column * groups + first // GROUP
        if grouped and count == 4:
            _four_by_groups(totals, x, x_at + first, terms, w, w_at, w_row, group, group_at, group_row, end)
        elif grouped:
            _one_by_groups(totals, x, x_at + first, terms, w, w_at, w_row, group, group_at, group_row, end)
        elif count == 4:
            _four(totals, x, x_at + first, terms, w, w_at, w_row, group, group_at, group_row, end)
        else:
            _one(totals, x, x_at + first, terms, w, w_at, w_row, group, group_at, group_row, end)


@helper()
def division(columns, threads):
    """Return how many columns a unit has, and how many units the columns are."""
    blocks = max(1, min(columns // MIN_UNIT_COLUMNS, 2 * threads if threads > 1 else 1))
    width = (columns + 4 * blocks - 1) // (4 * blocks) * 4
    return width, (columns + width - 1) // width


@helper(forceinline=True)
def _write(slots, row, column, total, factor, scale):
    y = np.float32(total) * (factor * scale[column])
    if slots.bias != 0:
        y += part(slots.bias, column, 1, np.float32)[0]
    part(slots.y, row * slots.y_row + column, 1, np.float32)[0] = y


@kernel("x x_row packed scale groups bias y y_row rows columns terms width blocks")
def product(slots):
    rows, columns, terms, grouped = slots.rows, slots.columns, slots.terms, slots.groups != 0
    w = part(slots.packed, 0, columns * (terms // 2 if grouped else terms), np.int8)
    group = part(slots.groups, 0, columns * (terms // GROUP) if grouped else 0, np.int8)
    scale, limit = part(slots.scale, 0, columns, np.float32), MOST_BY_GROUPS if grouped else MAX_INPUT
    numbers, factors = scratch(min(rows, ROWS) * terms, np.int16), scratch(ROWS, np.float32)
    totals, ready = scratch(8, np.int64), -1
    for unit in units(slots):  # a unit is some rows and `width` columns
        first, begin = unit // slots.blocks * ROWS, unit % slots.blocks * slots.width
        count, end = min(ROWS, rows - first), min(begin + slots.width, columns)
        if ready != first:
            for r in range(count):
                at = (first + r) * slots.x_row
                x, bits = part(slots.x, at, terms, np.float32), part(slots.x, at, terms, np.int32)
                factors[r] = _as_whole(numbers, r * terms, x, bits, limit)
            ready = first
        half, quarter = (end - begin) // 2, (end - begin) // 4
        for r in range(0, count - count % 4, 4):
            for j in range(half + (end - begin) % 2):
                column, apart = (begin + j, half) if j < half else (end - 2, 1)
                _add_products(totals, 4, numbers, r * terms, terms, w, column, apart, group, grouped)
                for i in range(8):
                    at = first + r + i // 2
                    _write(slots, at, column + i % 2 * apart, totals[i], factors[r + i // 2], scale)
        for r in range(count - count % 4, count):
            for j in range(quarter + ((end - begin) % 4 > 0)):
                column, apart = (begin + j, quarter) if j < quarter else (end - 4, 1)
                _add_products(totals, 1, numbers, r * terms, terms, w, column, apart, group, grouped)
                for i in range(4):
                    _write(slots, first + r, column + i * apart, totals[i], factors[r], scale)


def multiply(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x Wᵀ + bias for x (M, K), float32; W is as in `scanl.ops.fused.quantized_linear`. All are contiguous."""
    (rows, terms), columns = x.shape, packed.shape[0]
    y = empty((rows, columns), x.dtype)
    width, blocks = division.py_func(columns, torch.get_num_threads())
    slots = product.pack(
        x=x, x_row=terms, packed=packed, scale=scale, groups=groups, bias=bias, y=y, y_row=columns,
        rows=rows, columns=columns, terms=terms, width=width, blocks=blocks,
    )  # fmt: skip
    product.run(x.dtype, slots, -(-rows // ROWS) * blocks, rows * columns * terms)
    return y
