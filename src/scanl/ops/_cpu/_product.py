"""Multiply matrices inside a kernel: a few rows by a matrix, or matrices of whole tiles.

The code uses explicit vectors. The sums of a tile of rows and columns then stay in registers from the first term to the
last; from loops over arrays, the compiler does not achieve this. Each load of the matrix serves all rows of the tile.

A sum waits for the one before it, for about four cycles on a processor that starts two in each cycle. So a tile has
eight sums that do not wait for one another, of one register each. With AVX-512 a vector is one register: a tile is four
rows of two vectors, two of four, or one of eight. Where there are eight rows, a tile takes them all, which needs fewer
loads for each sum. Without it a vector takes two of sixteen registers, and tiles are half as wide: sums for which no
register is left would go through memory at every term.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from scanl.ops._cpu._helper import helper

BYTES = 64  # bytes of a vector
TERMS = 32  # terms summed in registers
LONG = 64  # the same for whole tiles: these rows of a panel of w stay in the first-level cache
ROWS, WIDE = (8, 2) if get_host_cpu_features().get("avx512f") else (4, 1)  # rows and vectors of a whole tile
WHOLE, LOWER, UPPER, BELOW = range(4)  # what `add_products` may leave out
NEXT = 1  # the stride of adjacent numbers
_FUSED = ("contract", "nsz")
_SIZE = ir.IntType(64)


def tile(count: int, wide: int) -> Any:
    """Build an intrinsic: out[r, j] = keep out[r, j] + Σ_k h[r, k] w[k, j] for `count` rows, columns of `wide` vectors.

    k takes `terms` values (at least one). The arrays are flat; for each, the arguments give the index at which the tile
    begins and the row stride. For h they also give the stride over k, so that h may be a transposed matrix; for w the
    distance of two vectors of a row.
    """

    @intrinsic
    def product(typingctx, out, out_at, out_row, h, h_at, h_row, h_term, w, w_at, w_row, w_next, terms, keep):
        bytes_each = out.dtype.bitwidth // 8
        lanes = BYTES // bytes_each
        vector = ir.VectorType(ir.FloatType() if out.dtype == types.float32 else ir.DoubleType(), lanes)
        nothing = ir.Constant(vector, ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)

        def codegen(context, builder, signature, args):
            _, out_at, out_row, _, h_at, h_row, h_term, _, w_at, w_row, w_next, terms, keep = args
            outs, hs, ws = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3, 7))

            def place(data, at, row, stride):
                return builder.gep(data, [builder.add(at, builder.mul(row, stride))])

            def vectors_of(data, at, row, stride, apart):
                starts = (builder.add(at, builder.mul(apart, _SIZE(i))) for i in range(wide))
                return [builder.bitcast(place(data, start, row, stride), vector.as_pointer()) for start in starts]

            def spread(number):
                return builder.shuffle_vector(
                    builder.insert_element(nothing, number, ir.IntType(32)(0)), nothing, first_lane
                )

            def with_term(sums, k):
                columns = [
                    builder.load(address, align=bytes_each) for address in vectors_of(ws, w_at, k, w_row, w_next)
                ]
                new, term = [], builder.add(h_at, builder.mul(k, h_term))
                for r in range(count):
                    factor = spread(builder.load(place(hs, term, _SIZE(r), h_row)))
                    for column, total in zip(columns, sums[r * wide : (r + 1) * wide], strict=True):
                        new.append(builder.fadd(total, builder.fmul(factor, column, flags=_FUSED), flags=_FUSED))
                return new

            scaled = builder.block
            loop, done = builder.append_basic_block("terms"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_SIZE)
            sums = [builder.phi(vector) for _ in range(count * wide)]
            new = with_term(sums, k)
            k_next = builder.add(k, _SIZE(1))
            builder.cbranch(builder.icmp_signed("<", k_next, terms), loop, done)
            k.add_incoming(_SIZE(0), scaled)
            k.add_incoming(k_next, loop)
            for total, later in zip(sums, new, strict=True):
                total.add_incoming(ir.Constant(vector, [0.0] * lanes), scaled)
                total.add_incoming(later, loop)
            builder.position_at_end(done)
            places = [
                address for r in range(count) for address in vectors_of(outs, out_at, _SIZE(r), out_row, _SIZE(lanes))
            ]
            factor = spread(keep)
            for address, total in zip(places, new, strict=True):
                scaled = builder.fmul(factor, builder.load(address, align=bytes_each), flags=_FUSED)
                builder.store(builder.fadd(scaled, total, flags=_FUSED), address, align=bytes_each)
            return context.get_dummy_value()

        integer = types.int64
        of_h = (h, integer, integer, integer)
        return types.void(out, integer, integer, *of_h, w, integer, integer, integer, integer, out.dtype), codegen

    return product


_large, _narrow = tile(ROWS, WIDE), tile(ROWS, 1)
_four, _two, _one = tile(4, WIDE), tile(2, 2 * WIDE), tile(1, 4 * WIDE)
_four_by_one, _one_by_one = tile(4, 1), tile(1, 1)


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
    for r in range(count):
        for j in range(width - full):
            total = out.dtype.type(0)
            for k in range(n):
                total += h[h_at + r * h_row + k] * w[tail + k * tail_row + j]
            out[out_at + r * out_row + full + j] += total


@helper(fastmath={"contract", "nsz"})
def add_products(out, out_at, out_row, rows, width, h, h_at, h_row, h_term, terms, w, w_at, w_row, region, keep):
    """Compute out = keep out + h w for matrices of whole tiles: `rows` in ROWS, `width` in vectors.

    h has strides of both axes.
    region: WHOLE; LOWER or UPPER if h is zero above or below its diagonal, where no product is then computed; BELOW if
    only out on and below its diagonal is computed. The others need a `keep` of 1.
    """
    lanes = BYTES // out.itemsize
    for first in range(0, terms, LONG):
        factor = keep if first == 0 else out.dtype.type(1)
        for j in range(0, width, WIDE * lanes):
            for r in range(0, rows, ROWS):
                low = max(first, r) if region == UPPER else first
                high = min(first + LONG, terms, r + ROWS) if region == LOWER else min(first + LONG, terms)
                if low >= high or (region == BELOW and j >= r + ROWS):
                    continue
                o, a, b = out_at + r * out_row + j, h_at + r * h_row + low * h_term, w_at + low * w_row + j
                if j + WIDE * lanes <= width:
                    _large(out, o, out_row, h, a, h_row, h_term, w, b, w_row, lanes, high - low, factor)
                else:
                    _narrow(out, o, out_row, h, a, h_row, h_term, w, b, w_row, lanes, high - low, factor)


@intrinsic
def _turn(typingctx, out, out_at, out_row, x, x_at, x_row):
    """Transpose a square of as many rows as a vector has lanes."""
    bytes_each = out.dtype.bitwidth // 8
    lanes = BYTES // bytes_each
    vector = ir.VectorType(ir.FloatType() if out.dtype == types.float32 else ir.DoubleType(), lanes)
    numbers = ir.VectorType(ir.IntType(32), lanes)

    def codegen(context, builder, signature, args):
        _, out_at, out_row, _, x_at, x_row = args
        outs, xs = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3))

        def place(data, at, row, r):
            address = builder.gep(data, [builder.add(at, builder.mul(row, _SIZE(r)))])
            return builder.bitcast(address, vector.as_pointer())

        rows = [builder.load(place(xs, x_at, x_row, r), align=bytes_each) for r in range(lanes)]
        span = 1
        while span < lanes:  # exchange the squares of `span` rows that lie beside the diagonal of each pair of squares
            upper = ir.Constant(numbers, [lane if not lane & span else lanes + lane - span for lane in range(lanes)])
            lower = ir.Constant(numbers, [lane + span if not lane & span else lanes + lane for lane in range(lanes)])
            for r in range(lanes):
                if not r & span:
                    pair = rows[r], rows[r + span]
                    rows[r], rows[r + span] = (builder.shuffle_vector(*pair, which) for which in (upper, lower))
            span *= 2
        for r, row in enumerate(rows):
            builder.store(row, place(outs, out_at, out_row, r), align=bytes_each)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(out, integer, integer, x, integer, integer), codegen


@helper()
def transpose(x, x_at, x_row, rows, width, out, out_at, out_row):
    """Write xᵀ (width, rows) to out, for x (rows, width); both sizes are multiples of the lanes of a vector."""
    lanes = BYTES // out.itemsize
    for r in range(0, rows, lanes):
        for j in range(0, width, lanes):
            _turn(out, out_at + j * out_row + r, out_row, x, x_at + r * x_row + j, x_row)
