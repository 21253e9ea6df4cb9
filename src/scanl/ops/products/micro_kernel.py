"""The micro-kernel of all products: some rows of x by some columns of a weight, with the sums in registers.

The code uses explicit vectors. The sums then stay in registers from the first term to the last; from loops over arrays,
the compiler does not achieve this. Each load of the weight serves all rows of the tile, and each load of x all columns.

The order of a sum is a part of the tile. `by_columns`: a vector is a term of adjacent columns, and each sum has its
terms in their order. `by_columns_of_rows`: the same for a transposed weight, whose squares are transposed in registers.
`floats_by_terms` and `numbers_by_terms`: a vector is adjacent terms of a column, and the lanes are added at the end.

A sum waits for the one before it, for about four cycles on a processor that starts two in each cycle. So a tile has
eight sums or more that do not wait for one another.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.cgutils import get_or_insert_function

from scanl.ops._cpu._vectors import SIZE, Emitter, emitted

BYTES = 64  # bytes of a vector of columns
SQUARE_BYTES = 32  # of a vector of a transposed square: more would not leave registers for it
SIDE = 2  # squares side by side: each sum waits for the one before it
WIDE_REGISTERS = bool(get_host_cpu_features().get("avx512f"))
LANES = 16  # whole numbers of a vector
GROUP = 2 * LANES  # terms of a group of a weight of 4 bits: one byte for each pair of terms LANES apart
WIDTHS = {types.float32: 8 if WIDE_REGISTERS else 6, types.int8: 4, types.uint8: 4}  # columns of a tile of one row
PREFETCH_DISTANCE = 3072  # bytes: a weight is asked for so long before it is multiplied
_BYTES, _SHORTS, _PRODUCTS = (ir.VectorType(ir.IntType(bits), LANES) for bits in (8, 16, 32))
_PAIRS, _WIDE_PAIRS = (ir.VectorType(ir.IntType(bits), LANES // 2) for bits in (32, 64))


def _add(e: Emitter, sums: Sequence[Any], terms: Iterable[tuple[Sequence[Any], Iterable[Any]]], add: Any) -> None:
    """Add products to the sums of a tile. terms: for each, the vectors of the columns and the factors of the rows."""
    for columns, factors in terms:
        for r, factor in enumerate(factors):
            for total, column in zip(sums[r * len(columns) :], columns, strict=False):
                e.builder.store(add(e.builder.load(total), factor, column), total)


def by_columns(rows: int, wide: int, *, fresh: bool = False) -> Any:
    """Build an intrinsic: out[r, j] = keep out[r, j] + Σ_k x[r, k] w[k, j] for `rows` rows, columns of `wide` vectors.

    k takes `terms` values. The arrays are flat; for each, the arguments give the index at which the tile begins and the
    stride of rows. For x they also give the stride over k, so that x may be a transposed matrix; for w the distance of
    two vectors of a row.
    fresh: `out` may hold anything where keep is 0.
    """

    @emitted(width=BYTES)
    def product(e, out, out_at, out_row, x, x_at, x_row, x_term, w, w_at, w_row, w_next, terms, keep):
        sums = e.sums(rows * wide)
        with e.rows(terms) as k:
            columns = [e.read(e.at(w, w_at, (c, w_next), (k, w_row))) for c in range(wide)]
            _add(
                e, sums, [(columns, (e.number_at(e.at(x, x_at, (k, x_term), (r, x_row))) for r in range(rows)))], e.add
            )
        empty = e.builder.fcmp_ordered("==", keep, ir.Constant(keep.type, 0)) if fresh else None
        keep = e.spread(keep)
        for n, total in enumerate(sums):
            place = e.at(out, out_at, (n // wide, out_row), n % wide * e.strip.count)
            added = e.add(e.builder.load(total), keep, e.read(place))
            e.write(added if empty is None else e.builder.select(empty, e.builder.load(total), added), place)

    return product


@emitted(width=BYTES)
def by_panel(e, sums, at, apart, w, w_at, w_row, panel, panel_at, terms, keep):
    """Compute sums[c] = keep sums[c] + Σ_k w[c, k] panel[k] for a tile's rows of w and a panel, whose rows are vectors.

    `apart` is the distance of two rows of sums. They may hold anything where keep is 0.
    """
    wide, lanes = WIDTHS[types.float32], e.strip.count
    totals = e.sums(wide)

    def products(k):
        row = e.read(e.at(panel, panel_at, (k, lanes)))
        yield [row], [e.number_at(e.at(w, w_at, (c, w_row), k)) for c in range(wide)]

    full = e.builder.and_(terms, SIZE(-lanes))
    with e.rows(full, lanes) as first:
        for c in range(wide):
            e.prefetch(e.at(w, w_at, (c, w_row), first, PREFETCH_DISTANCE // e.item))
        for term in range(lanes):
            _add(e, totals, products(e.builder.add(first, SIZE(term))), e.add)
    with e.rows(e.builder.sub(terms, full)) as k:
        _add(e, totals, products(e.builder.add(full, k)), e.add)
    empty = e.builder.fcmp_ordered("==", keep, ir.Constant(keep.type, 0))
    keep = e.spread(keep)
    for c, total in enumerate(totals):
        place, value = e.at(sums, at, (c, apart)), e.builder.load(total)
        e.write(e.builder.select(empty, value, e.add(value, keep, e.read(place))), place)


@emitted(width=BYTES)
def turn(e, out, out_at, out_row, x, x_at, count):
    """Write the transpose of a square of adjacent rows, as many as a vector has lanes; the first `count` columns."""
    rows, mask = [e.read(e.at(x, x_at, r * e.strip.count)) for r in range(e.strip.count)], e.some(SIZE(0), count)
    for r, row in enumerate(e.transposed(rows)):
        e.write_some(row, e.at(out, out_at, (r, out_row)), mask)


def by_some_columns(rows: int) -> Any:
    """Build an intrinsic: out[r, j] += Σ_k x[r, k] w[k, j] for `rows` rows and the first `columns` of a vector.

    The other arguments are those of `by_columns`; the terms of x are adjacent.
    """

    @emitted(width=BYTES)
    def product(e, out, out_at, out_row, x, x_at, x_row, w, w_at, w_row, terms, columns):
        sums, mask = e.sums(rows), e.some(SIZE(0), columns)
        with e.rows(terms) as k:
            column = e.read_some(e.at(w, w_at, (k, w_row)), mask)
            _add(e, sums, [([column], (e.number_at(e.at(x, x_at, k, (r, x_row))) for r in range(rows)))], e.add)
        for r, total in enumerate(sums):
            place = e.at(out, out_at, (r, out_row))
            e.write_some(e.add(e.read_some(place, mask), e.builder.load(total)), place, mask)

    return product


@emitted(width=SQUARE_BYTES)
def by_columns_of_rows(e, sums, x, x_at, w, w_at, w_row, terms):
    """Compute sums[j] += Σ_k x[k] w[j, k] for SIDE vectors of j. `terms` is a multiple of a vector."""
    lanes = e.strip.count
    totals = e.sums(SIDE, lambda side: e.at(sums, side * lanes))

    def products(k):
        rows = [e.read(e.at(w, w_at, (r, w_row), k)) for r in range(SIDE * lanes)]
        squares = [e.transposed(rows[first : first + lanes]) for first in range(0, len(rows), lanes)]
        for term in range(lanes):
            yield [square[term] for square in squares], [e.number_at(e.at(x, x_at, k, term))]

    with e.rows(terms, lanes) as k:
        _add(e, totals, products(k), e.add)
    for side, total in enumerate(totals):
        e.keep(total, e.at(sums, side * lanes))


def columns_of_tile(kind: Any, rows: int) -> int:
    """Return the columns of a tile by terms, by the element type of the weight."""
    return WIDTHS[kind] // (2 if rows > 1 else 1)


def floats_by_terms(rows: int) -> Any:
    """Build an intrinsic: y[r, c] = Σ_k x[r, k] w[c, k] for `rows` rows of x and a tile's rows of w, of float32.

    The arguments are those of `by_columns`; for y they also give the distance of two columns. What is left after whole
    vectors is read by a mask.
    """
    wide = columns_of_tile(types.float32, rows)

    @emitted(width=BYTES if rows > 1 else 2 * BYTES if WIDE_REGISTERS else BYTES)
    def product(e, y, y_at, y_row, y_next, x, x_at, x_row, w, w_at, w_row, terms):
        sums, lanes = e.sums(rows * wide), e.strip.count

        def products(k, read=e.read):
            places = [e.at(w, w_at, (c, w_row), k) for c in range(wide)]
            if rows > 1 and read is e.read:
                for place in places:
                    e.prefetch(e.at(place, PREFETCH_DISTANCE // e.item))
            columns = list(map(read, places))
            yield columns, (read(e.at(x, x_at, (r, x_row), k)) for r in range(rows))

        full = e.builder.and_(terms, SIZE(-lanes))
        with e.rows(full, lanes) as k:
            _add(e, sums, products(k), e.add)
        with e.builder.if_then(e.builder.icmp_signed("<", full, terms)):
            mask = e.some(full, terms)
            _add(e, sums, products(full, lambda place: e.read_some(place, mask)), e.add)
        for first in range(0, len(sums), 4):
            four = e.totals([e.folded(e.builder.load(total), 4) for total in (sums * 2)[first : first + 4]])
            for n in range(first, min(first + 4, len(sums))):
                total = e.builder.extract_element(four, ir.Constant(ir.IntType(32), n - first))
                e.builder.store(total, e.at(y, y_at, (n // wide, y_row), (n % wide, y_next)))

    return product


@emitted(width=BYTES)
def clear(e, totals):
    """Set BYTES bytes of totals to zero: as many as `numbers_by_terms` may write."""
    e.write(ir.Constant(e.strip, None), totals)


def numbers_by_terms(rows: int) -> Any:
    """Build an intrinsic: totals[r, c] += Σ_k x[r, k] w[c, k] for `rows` rows of x and a tile's rows of w.

    The element type of w says the kind of weight: int8, or uint8 for pairs of 4 bits. x is int16; `terms` is a multiple
    of GROUP.
    """

    @emitted(width=BYTES)
    def product(e, totals, x, x_at, x_row, w, w_at, w_row, groups, group_at, group_row, terms):
        kind = e.kinds[4].dtype
        add = {types.int8: _numbers, types.uint8: _grouped_numbers}[kind]
        wide = columns_of_tile(kind, rows)
        add(e, totals, rows, wide, (x, x_at, x_row), (w, w_at, w_row), (groups, group_at, group_row), terms)

    return product


def _numbers(e, totals, rows, wide, x, w, groups, terms):
    """Add the products by a weight of int8. A vector of 16 products is one instruction, which also adds neighbors."""

    def products(k):
        columns = [e.builder.sext(e.read(e.at(w[0], w[1], (c, w[2]), k), _BYTES), _SHORTS) for c in range(wide)]
        yield columns, (e.read(e.at(x[0], x[1], (r, x[2]), k), _SHORTS) for r in range(rows))

    _add_numbers(e, totals, rows * wide, products, LANES, terms)


def _grouped_numbers(e, totals, rows, wide, x, w, groups, terms):
    """Add the products by a weight of 4 bits; each number is the factor of its group times the number of 4 bits."""

    def numbers(c, k):
        half, group = e.builder.lshr(k, SIZE(1)), e.builder.udiv(k, SIZE(GROUP))
        pairs = e.builder.zext(e.read(e.at(w[0], w[1], (c, w[2]), half), _BYTES), _SHORTS)
        factor = e.builder.load(e.at(groups[0], groups[1], (c, groups[2]), group))
        factor = e.spread(e.builder.sext(factor, ir.IntType(16)), LANES)
        all_of = [ir.Constant(_SHORTS, [n] * LANES) for n in (15, 4, 8)]
        fours = e.builder.and_(pairs, all_of[0]), e.builder.lshr(pairs, all_of[1])
        return [e.builder.mul(factor, e.builder.sub(four, all_of[2])) for four in fours]

    def products(k):
        columns = [numbers(c, k) for c in range(wide)]
        for half in range(2):
            of_rows = (e.read(e.at(x[0], x[1], (r, x[2]), k, half * LANES), _SHORTS) for r in range(rows))
            yield [column[half] for column in columns], of_rows

    _add_numbers(e, totals, rows * wide, products, GROUP, terms)


def _add_numbers(e, totals, count, products, step, terms):
    """Add sums of products of whole numbers, in lanes of 32 bits, to totals of 64 bits."""
    sums, halves = e.sums(count, kind=_PAIRS), [ir.Constant(_PAIRS, list(range(first, LANES, 2))) for first in (0, 1)]

    def add(total, a, b):
        product = e.builder.mul(e.builder.sext(a, _PRODUCTS), e.builder.sext(b, _PRODUCTS))
        return e.builder.add(total, e.builder.add(*(e.builder.shuffle_vector(product, product, n) for n in halves)))

    with e.rows(terms, step) as k:
        _add(e, sums, products(k), add)
    add_up = f"llvm.vector.reduce.add.v{LANES // 2}i64"
    add_up = get_or_insert_function(e.builder.module, ir.FunctionType(SIZE, [_WIDE_PAIRS]), add_up)
    for n, total in enumerate(sums):
        place, added = e.at(totals, n), e.builder.call(add_up, [e.builder.sext(e.builder.load(total), _WIDE_PAIRS)])
        e.builder.store(e.builder.add(e.builder.load(place), added), place)
