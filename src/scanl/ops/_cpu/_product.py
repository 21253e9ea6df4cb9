"""Multiply a few rows by a matrix inside a kernel.

The code uses explicit vectors. The sums of a tile of rows and columns then stay in registers from the first term to the
last; from loops over arrays, the compiler does not achieve this. Each load of the matrix serves all rows of the tile.

A sum waits for the one before it, for about four cycles on a processor that starts two in each cycle. So a tile has
eight sums that do not wait for one another: four rows of two vectors, or one row of eight.
"""

from typing import Any

from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from scanl.ops._cpu._helper import helper

BYTES = 64  # bytes of a vector
TERMS = 32  # terms summed in registers
_FUSED = ("contract", "nsz")
_SIZE = ir.IntType(64)


def _tile(count: int, wide: int) -> Any:
    """Build an intrinsic: out[r, j] += Σ_k h[r, k] w[k, j] for `count` rows and the columns of `wide` vectors.

    k takes `terms` values (at least one). The arrays are flat; for each, the arguments give the index at which the tile
    begins and the row stride.
    """

    @intrinsic
    def tile(typingctx, out, out_at, out_row, h, h_at, h_row, w, w_at, w_row, terms):
        bytes_each = out.dtype.bitwidth // 8
        lanes = BYTES // bytes_each
        vector = ir.VectorType(ir.FloatType() if out.dtype == types.float32 else ir.DoubleType(), lanes)
        nothing = ir.Constant(vector, ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)

        def codegen(context, builder, signature, args):
            _, out_at, out_row, _, h_at, h_row, _, w_at, w_row, terms = args
            outs, hs, ws = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3, 6))

            def place(data, at, row, stride):
                return builder.gep(data, [builder.add(at, builder.mul(row, stride))])

            def vectors_of(data, at, row, stride):
                starts = (builder.add(at, _SIZE(lanes * i)) for i in range(wide))
                return [builder.bitcast(place(data, start, row, stride), vector.as_pointer()) for start in starts]

            def with_term(sums, k):
                columns = [builder.load(each, align=bytes_each) for each in vectors_of(ws, w_at, k, w_row)]
                new = []
                for r in range(count):
                    factor = builder.load(place(hs, builder.add(h_at, k), _SIZE(r), h_row))
                    spread = builder.insert_element(nothing, factor, ir.IntType(32)(0))
                    spread = builder.shuffle_vector(spread, nothing, first_lane)
                    for column, total in zip(columns, sums[r * wide : (r + 1) * wide], strict=True):
                        new.append(builder.fadd(total, builder.fmul(spread, column, flags=_FUSED), flags=_FUSED))
                return new

            before = builder.block
            loop, done = builder.append_basic_block("terms"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_SIZE)
            sums = [builder.phi(vector) for _ in range(count * wide)]
            new = with_term(sums, k)
            k_next = builder.add(k, _SIZE(1))
            builder.cbranch(builder.icmp_signed("<", k_next, terms), loop, done)
            k.add_incoming(_SIZE(0), before)
            k.add_incoming(k_next, loop)
            for total, later in zip(sums, new, strict=True):
                total.add_incoming(ir.Constant(vector, [0.0] * lanes), before)
                total.add_incoming(later, loop)
            builder.position_at_end(done)
            places = [each for r in range(count) for each in vectors_of(outs, out_at, _SIZE(r), out_row)]
            for each, total in zip(places, new, strict=True):
                builder.store(builder.fadd(builder.load(each, align=bytes_each), total), each, align=bytes_each)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(out, integer, integer, h, integer, integer, w, integer, integer, integer), codegen

    return tile


_four_by_two, _four, _one_by_eight, _one = _tile(4, 2), _tile(4, 1), _tile(1, 8), _tile(1, 1)


@helper(forceinline=True, fastmath={"contract", "nsz"})
def add_part_products(out, out_at, out_row, width, h, h_at, h_row, n, w, w_at, w_row, count):
    """Compute out += h w for `count` rows: out (count, width), h (count, n), w (n, width).

    Each is a part of a flat array, given by its start index (_at) and its row stride (_row).

    TERMS terms at a time are summed from zero and then added, so rounding errors of long sums stay small.
    """
    lanes = BYTES // out.itemsize
    whole = width - width % lanes
    for k in range(0, n, TERMS):
        terms = min(TERMS, n - k)
        term, row = h_at + k, w_at + k * w_row
        for j in range(0, whole - lanes, 2 * lanes):
            for r in range(0, count - 3, 4):
                o = out_at + r * out_row + j
                _four_by_two(out, o, out_row, h, term + r * h_row, h_row, w, row + j, w_row, terms)
        for j in range(whole - whole % (2 * lanes), whole, lanes):
            for r in range(0, count - 3, 4):
                _four(out, out_at + r * out_row + j, out_row, h, term + r * h_row, h_row, w, row + j, w_row, terms)
        for r in range(count - count % 4, count):
            for j in range(0, whole - 7 * lanes, 8 * lanes):
                o = out_at + r * out_row + j
                _one_by_eight(out, o, out_row, h, term + r * h_row, h_row, w, row + j, w_row, terms)
            for j in range(whole - whole % (8 * lanes), whole, lanes):
                _one(out, out_at + r * out_row + j, out_row, h, term + r * h_row, h_row, w, row + j, w_row, terms)
    for r in range(count):
        for j in range(whole, width):
            total = out.dtype.type(0)
            for k in range(n):
                total += h[h_at + r * h_row + k] * w[w_at + k * w_row + j]
            out[out_at + r * out_row + j] += total
