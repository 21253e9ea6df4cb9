"""Products of a few rows and a matrix, with sums in the order of a library's product of many rows.

A library multiplies a single row by other code than many rows, and the last bits differ. Here each sum adds its terms
in their order, fused, in parts of `part` terms; the parts are added in their order. Which part gives the library's bits
is found by trying: see `_products.py`.

A matrix is stored as a linear layer has it, (N, K), and squares of it are transposed in registers; or it is (K, N).
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import itemsize, part, units
from scanl.ops._cpu._team import scratch

BYTES = 32  # bytes of a vector: more would not leave registers for the square
SIDE = 2  # vectors side by side: each sum waits for the one before it, so two that do not wait for one another
UNIT_COLUMNS = 64  # columns of a unit where rows of the matrix are adjacent
_FUSED = ("contract", "nsz")
_SIZE = ir.IntType(64)


@intrinsic
def _add_terms(typingctx, sums, sums_at, x, x_at, w, w_at, w_row, terms):
    """Compute sums[j] += Σ_k x[k] w[j, k] for SIDE vectors of j. `terms` is a multiple of a vector, above 0."""
    bytes_each = sums.dtype.bitwidth // 8
    lanes = BYTES // bytes_each
    vector = ir.VectorType(ir.FloatType() if sums.dtype == types.float32 else ir.DoubleType(), lanes)
    numbers = ir.VectorType(ir.IntType(32), lanes)
    nothing = ir.Constant(vector, ir.Undefined)

    def codegen(context, builder, signature, args):
        _, sums_at, _, x_at, _, w_at, w_row, terms = args
        totals, xs, ws = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2, 4))

        def place(data, *offsets):
            for offset in offsets:
                data = builder.gep(data, [offset])
            return data

        def vector_at(*where):
            return builder.bitcast(place(*where), vector.as_pointer())

        def spread(number):
            one = builder.insert_element(nothing, number, ir.IntType(32)(0))
            return builder.shuffle_vector(one, nothing, ir.Constant(numbers, [0] * lanes))

        def turned(rows):
            """Transpose: exchange the squares of `span` rows beside the diagonal of each pair of squares."""
            span = 1
            while span < lanes:
                upper = [lane if not lane & span else lanes + lane - span for lane in range(lanes)]
                lower = [lane + span if not lane & span else lanes + lane for lane in range(lanes)]
                for r in range(lanes):
                    if not r & span:
                        pair = rows[r], rows[r + span]
                        rows[r], rows[r + span] = (
                            builder.shuffle_vector(*pair, ir.Constant(numbers, which)) for which in (upper, lower)
                        )
                span *= 2
            return rows

        places = [vector_at(totals, sums_at, _SIZE(side * lanes)) for side in range(SIDE)]
        starts = [builder.load(address, align=bytes_each) for address in places]
        entry, loop, done = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_SIZE)
        sums = [builder.phi(vector) for _ in range(SIDE)]
        new = list(sums)
        columns = []
        for side in range(SIDE):
            rows = [builder.mul(w_row, _SIZE(side * lanes + r)) for r in range(lanes)]
            columns.append(turned([builder.load(vector_at(ws, w_at, row, k), align=bytes_each) for row in rows]))
        for term in range(lanes):
            factor = spread(builder.load(place(xs, x_at, k, _SIZE(term))))
            for side in range(SIDE):
                product = builder.fmul(factor, columns[side][term], flags=_FUSED)
                new[side] = builder.fadd(new[side], product, flags=_FUSED)
        k_next = builder.add(k, _SIZE(lanes))
        builder.cbranch(builder.icmp_signed("<", k_next, terms), loop, done)
        k.add_incoming(_SIZE(0), entry)
        k.add_incoming(k_next, loop)
        for total, start, later in zip(sums, starts, new, strict=True):
            total.add_incoming(start, entry)
            total.add_incoming(later, loop)
        builder.position_at_end(done)
        for address, total in zip(places, new, strict=True):
            builder.store(total, address, align=bytes_each)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(sums, integer, x, integer, w, integer, integer, integer), codegen


@kernel("rows terms columns part blocks x w bias y")
def _by_columns(slots):
    rows, terms, columns, dtype = slots.rows, slots.terms, slots.columns, slots.dtype
    lanes = BYTES // itemsize(dtype)
    side = SIDE * lanes
    sums, totals = scratch(side, dtype), scratch(side, dtype)
    for unit in units(slots):  # a unit is `side` columns of a matrix; the last overlaps the one before it
        matrix = unit // slots.blocks
        x = part(slots.x, matrix * rows * terms, rows * terms, dtype)
        y = part(slots.y, matrix * rows * columns, rows * columns, dtype)
        w = part(slots.w, matrix * columns * terms, columns * terms, dtype)
        wide = min(side, columns)
        column = min(unit % slots.blocks * side, columns - wide)
        for r in range(rows):
            fill(totals, 0, side, y.dtype.type(0))
            for first in range(0, terms, slots.part):
                end, done = min(first + slots.part, terms), first
                fill(sums, 0, side, y.dtype.type(0))
                if wide == side and end - first >= lanes:
                    done = end - (end - first) % lanes
                    _add_terms(sums, 0, x, r * terms + first, w, column * terms + first, terms, done - first)
                for k in range(done, end):
                    for j in range(wide):
                        sums[j] += x[r * terms + k] * w[(column + j) * terms + k]
                for j in range(wide):
                    totals[j] += sums[j]
            for j in range(wide):
                total = totals[j]
                if slots.bias != 0:
                    total += part(slots.bias, column + j, 1, dtype)[0]
                y[r * columns + column + j] = total


@kernel("rows terms columns part blocks x w y")
def _by_terms(slots):
    rows, terms, columns, dtype = slots.rows, slots.terms, slots.columns, slots.dtype
    sums = scratch(UNIT_COLUMNS, dtype)
    for unit in units(slots):  # a unit is UNIT_COLUMNS columns of a matrix
        matrix, column = unit // slots.blocks, unit % slots.blocks * UNIT_COLUMNS
        wide = min(UNIT_COLUMNS, columns - column)
        for r in range(matrix * rows, matrix * rows + rows):
            x, y = part(slots.x, r * terms, terms, dtype), part(slots.y, r * columns + column, wide, dtype)
            fill(y, 0, wide, y.dtype.type(0))
            for first in range(0, terms, slots.part):
                fill(sums, 0, wide, y.dtype.type(0))
                for k in range(first, min(first + slots.part, terms)):
                    w = part(slots.w, (matrix * terms + k) * columns + column, wide, dtype)
                    for j in range(wide):
                        sums[j] += x[k] * w[j]
                for j in range(wide):
                    y[j] += sums[j]


def multiply(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, terms: int) -> torch.Tensor:
    """Return x wᵀ + bias for x (..., K) and w (N, K), or for x (n, M, K) and w (n, N, K); all are contiguous.

    terms: the terms of a part.
    """
    columns, size = w.shape[-2:]
    matrices = 1 if w.ndim == 2 else len(w)
    y = empty((*x.shape[:-1], columns), x.dtype)
    rows, blocks = x.numel() // (size * matrices), -(-columns * x.itemsize // (SIDE * BYTES))
    packed = _by_columns.pack(
        rows=rows, terms=size, columns=columns, part=terms, blocks=blocks, x=x, w=w, bias=bias, y=y
    )
    _by_columns.run(x.dtype, packed, blocks * matrices, w.numel())
    return y


def multiply_by_terms(x: torch.Tensor, w: torch.Tensor, terms: int) -> torch.Tensor:
    """Return x w for x (..., K) and w (K, N), or for x (n, M, K) and w (n, K, N). The rest is as in `multiply`."""
    size, columns = w.shape[-2:]
    matrices = 1 if w.ndim == 2 else len(w)
    y = empty((*x.shape[:-1], columns), x.dtype)
    rows, blocks = x.numel() // (size * matrices), -(-columns // UNIT_COLUMNS)
    packed = _by_terms.pack(rows=rows, terms=size, columns=columns, part=terms, blocks=blocks, x=x, w=w, y=y)
    _by_terms.run(x.dtype, packed, blocks * matrices, w.numel())
    return y
