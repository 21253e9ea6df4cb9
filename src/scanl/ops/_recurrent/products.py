"""Products inside the kernels of recurrent layers, with their sums in registers.

`product`: rows by a packed weight. A panel of it has all terms of some vectors of columns, one term after another.
`product_by_terms`: few rows by a weight as it lies in memory, (columns, terms): a vector is adjacent terms of a column.
`add_outer`: sums over steps and rows of the batch, out += aᵀ x, for the gradients of weights.
"""

import itertools
from collections.abc import Callable

from scanl.ops._recurrent.writer import LANES, REGISTERS, VECTOR, CodeValue, Function

MAX_ROWS = 8  # rows of a tile
CHAINS = 8  # sums that must not wait for one another: a sum takes four cycles, and a cycle starts two
QUAD = 4  # columns of a tile by terms


def tile_rows(wide: int) -> int:
    """Return the rows of a tile of `wide` vectors: all its sums, a row of the weight and a factor are in registers."""
    return max(1, min(MAX_ROWS, (REGISTERS - 1 - wide) // wide))


def by_rows(code: Function, rows: CodeValue, most: int, write: Callable[[int, CodeValue], None]) -> None:
    """Write code for each tile of rows: `write(count, first)`. The last two tiles share what is left."""
    with code.strides(rows) as (first, advance):
        left = rows - first
        half = (left + 1) // 2
        count = code.choose(left.below(most + 1), left, code.choose(left.below(2 * most), half, most))
        for size in range(1, most + 1):
            with code.when(count.equals(size)):
                write(size, first)
        advance(count)


def tile(rows: int, wide: int) -> str:
    """Write rows of x by a panel of `wide` vectors: out = init + x w.

    width: columns of out that exist.
    """
    code = Function(f"tile_{rows}_{wide}", "w x init out", "x_row terms out_row width")
    parts = 8 if rows * wide == 1 else 4 if rows * wide <= 4 else 2 if rows * wide < CHAINS else 1
    x = [code.at(code.x, code.x_row * r) for r in range(rows)]
    sums = [[code.variable(VECTOR) for _ in range(rows * wide)] for _ in range(parts)]
    for part, r, c in itertools.product(range(parts), range(rows), range(wide)):
        start = code.read(code.at(code.init, c * LANES)) if part == 0 else code.same(0)
        code.set(sums[part][r * wide + c], start)

    def add(k: CodeValue, part: int) -> None:
        columns = [code.read(code.at(code.w, k * (wide * LANES), (part * wide + c) * LANES)) for c in range(wide)]
        for r in range(rows):
            factor = code.number_at(code.at(x[r], k, part))
            for c, column in enumerate(columns):
                place = sums[part][r * wide + c]
                code.set(place, code.fused(factor, column, code.get(place)))

    whole = code.terms - code.terms % parts
    with code.loop(0, whole, parts) as k:
        for part in range(parts):
            add(k, part)
    if parts > 1:
        with code.loop(whole, code.terms) as k:
            add(k, 0)
    totals = []
    for at in range(rows * wide):
        values = [code.get(part[at]) for part in sums]
        while len(values) > 1:
            values = [code.plus(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
        totals.append(values[0])
    whole_panel = code.index(wide * LANES - 1).below(code.width)
    with code.when(whole_panel):
        for r, c in itertools.product(range(rows), range(wide)):
            code.write(totals[r * wide + c], code.at(code.out, code.out_row * r, c * LANES))
    with code.otherwise(whole_panel):
        for c in range(wide):
            mask = code.mask(code.width - c * LANES)
            for r in range(rows):
                code.write(totals[r * wide + c], code.at(code.out, code.out_row * r, c * LANES), mask)
    return code.finished()


def product(wide: int) -> str:
    """Write any number of rows of x by a panel."""
    code = Function(f"product_{wide}", "w x init out", "x_row terms out_row width rows")

    def write(count: int, first: CodeValue) -> None:
        x, out = code.at(code.x, first * code.x_row), code.at(code.out, first * code.out_row)
        code.call(f"tile_{count}_{wide}", code.w, x, code.init, out, code.x_row, code.terms, code.out_row, code.width)

    by_rows(code, code.rows, tile_rows(wide), write)
    return code.finished()


def tile_by_terms(rows: int) -> str:
    """Write rows of x by QUAD rows of a weight, of which those after `last` are the last: out = init + x wᵀ."""
    code = Function(f"terms_{rows}", "w x init out", "w_row last x_row terms out_row")
    x = [code.at(code.x, code.x_row * r) for r in range(rows)]
    w = [code.at(code.w, code.least(code.last, c) * code.w_row) for c in range(QUAD)]
    parts = 2 if rows == 1 else 1
    sums = [[code.variable(VECTOR) for _ in range(rows * QUAD)] for _ in range(parts)]
    for part in sums:
        for place in part:
            code.set(place, code.same(0))

    def add(k: CodeValue, part: int, mask: CodeValue | None = None) -> None:
        columns = [code.read(code.at(each, k, part * LANES), mask) for each in w]
        for r in range(rows):
            factor = code.read(code.at(x[r], k, part * LANES), mask)
            for c, column in enumerate(columns):
                place = sums[part][r * QUAD + c]
                code.set(place, code.fused(factor, column, code.get(place)))

    whole, step = code.terms - code.terms % LANES, parts * LANES
    paired = code.terms - code.terms % step
    with code.loop(0, paired, step) as k:
        for part in range(parts):
            add(k, part)
    if parts > 1:
        with code.loop(paired, whole, LANES) as k:
            add(k, 0)
    with code.when(whole.below(code.terms)):
        add(whole, 0, code.mask(code.terms - whole))
    for r in range(rows):
        totals = []
        for c in range(QUAD):
            values = [code.get(part[r * QUAD + c]) for part in sums]
            totals.append(code.folded(code.plus(*values) if parts > 1 else values[0], QUAD))
        for _ in range(2):  # add neighbors: after two rounds a lane is the sum of a column
            pairs = []
            for a, b in zip(totals[::2], totals[1::2], strict=True):
                even, odd = (code.shuffle(a, b, [n, n + 2, n + 4, n + 6]) for n in (0, 1))
                pairs.append(code.plus(even, odd))
            totals = pairs
        start = code.new(f"load <{QUAD} x float>, ptr {code.init.text}, align 4", f"<{QUAD} x float>")
        code.write(code.plus(totals[0], start), code.at(code.out, code.out_row * r))
    return code.finished()


def product_by_terms(wide: int, gates: int) -> str:
    """Write rows of x by the columns of a panel, of a weight (gates · D, terms) that is not packed: out = init + x wᵀ.

    first: the unit with which the panel begins.   units: D.   A panel has a vector of each gate, or some of the one.
    """
    code = Function(f"product_by_terms_{wide}", "w x init out", "x_row terms out_row rows first units")

    def write(count: int, row: CodeValue) -> None:
        for c in range(wide):
            gate, begin = (c, 0) if gates > 1 else (0, c * LANES)
            for quad in range(0, LANES, QUAD):
                unit = code.first + (begin + quad)
                with code.when(unit.below(code.units)):
                    w = code.at(code.w, (unit + code.units * gate) * code.terms)
                    out = code.at(code.out, row * code.out_row, c * LANES + quad)
                    code.call(
                        f"terms_{count}", w, code.at(code.x, row * code.x_row), code.at(code.init, c * LANES + quad),
                        out, code.terms, code.units - unit - 1, code.x_row, code.terms, code.out_row,
                    )  # fmt: skip

    by_rows(code, code.rows, QUAD, write)
    return code.finished()


def pack_columns(wide: int, gates: int) -> str:
    """Write a panel of a weight (gates · D, terms), turned: out (terms, wide, LANES). Missing units are the last one.

    out has room for a multiple of LANES terms.
    """
    code = Function(f"pack_columns_{wide}", "w out", "terms first units")
    for c in range(wide):
        gate, begin = (c, 0) if gates > 1 else (0, c * LANES)
        rows = []
        for lane in range(LANES):
            unit = code.least(code.first + (begin + lane), code.units - 1)
            rows.append(code.at(code.w, (unit + code.units * gate) * code.terms))
        out = code.at(code.out, c * LANES)

        def square(k: CodeValue, mask: CodeValue | None, rows: list[CodeValue] = rows, out: CodeValue = out) -> None:
            for term, turned in enumerate(_turned(code, [code.read(code.at(row, k), mask) for row in rows])):
                code.write(turned, code.at(out, (k + term) * (wide * LANES)))

        whole = code.terms - code.terms % LANES
        with code.loop(0, whole, LANES) as k:
            square(k, None)
        with code.when(whole.below(code.terms)):
            square(whole, code.mask(code.terms - whole))
    return code.finished()


def _turned(code: Function, rows: list[CodeValue]) -> list[CodeValue]:
    """Turn a square of vectors in registers."""
    span = 1
    while span < LANES:  # exchange the squares of `span` rows beside the diagonal of each pair of squares
        upper = [lane if not lane & span else LANES + lane - span for lane in range(LANES)]
        lower = [lane + span if not lane & span else LANES + lane for lane in range(LANES)]
        for r in range(LANES):
            if not r & span:
                a, b = rows[r], rows[r + span]
                rows[r], rows[r + span] = code.shuffle(a, b, upper), code.shuffle(a, b, lower)
        span *= 2
    return rows


def pack_rows(wide: int) -> str:
    """Write a panel of a weight (terms, columns) as it lies: out (terms, wide, LANES), zero in missing columns.

    first: the column with which the panel begins.   skip: the term with which it begins; the terms go round.   row: the
    distance of two terms in memory.
    """
    code = Function(f"pack_rows_{wide}", "w out", "terms first columns skip row")
    masks = [code.mask(code.columns - code.first - c * LANES) for c in range(wide)]
    with code.loop(0, code.terms) as k:
        term = k + code.skip
        term = code.choose(term.below(code.terms), term, term - code.terms)
        row, out = code.at(code.w, term * code.row, code.first), code.at(code.out, k * (wide * LANES))
        for c, mask in enumerate(masks):
            code.write(code.read(code.at(row, c * LANES), mask), code.at(out, c * LANES))
    return code.finished()


def outer_tile(rows: int, wide: int) -> str:
    """Write out[r, j] += Σ a[·, r] x[·, j] over steps and rows of the batch, for `rows` adjacent numbers of a.

    fresh: 1 if out has no numbers yet, else 0.
    """
    code = Function(
        f"outer_{rows}_{wide}", "a x out", "a_step a_batch x_step x_batch steps batch out_row width fresh"
    )  # fmt: skip
    sums = [code.variable(VECTOR) for _ in range(rows * wide)]
    for place in sums:
        code.set(place, code.same(0))
    masks = [code.mask(code.width - c * LANES) for c in range(wide)]
    with code.loop(0, code.steps) as s, code.loop(0, code.batch) as b:
        a, x = code.at(code.a, s * code.a_step, b * code.a_batch), code.at(code.x, s * code.x_step, b * code.x_batch)
        columns = [code.read(code.at(x, c * LANES), mask) for c, mask in enumerate(masks)]
        for r in range(rows):
            factor = code.number_at(code.at(a, r))
            for c, column in enumerate(columns):
                place = sums[r * wide + c]
                code.set(place, code.fused(factor, column, code.get(place)))
    known = [code.mask((code.width - c * LANES) * (code.index(1) - code.fresh)) for c in range(wide)]
    for r, (c, mask) in itertools.product(range(rows), enumerate(masks)):
        place = code.at(code.out, code.out_row * r, c * LANES)
        code.write(code.plus(code.read(place, known[c]), code.get(sums[r * wide + c])), place, mask)
    return code.finished()


def add_outer(widths: list[int]) -> str:
    """Write out (rows, columns) += Σ aᵀ x for any number of rows and columns."""
    code = Function("add_outer", "a x out", "a_step a_batch x_step x_batch steps batch rows columns fresh")

    def panel(wide: int, first: CodeValue) -> None:
        def write(count: int, row: CodeValue) -> None:
            code.call(
                f"outer_{count}_{wide}", code.at(code.a, row), code.at(code.x, first),
                code.at(code.out, row * code.columns, first), code.a_step, code.a_batch, code.x_step, code.x_batch,
                code.steps, code.batch, code.columns, code.columns - first, code.fresh,
            )  # fmt: skip

        by_rows(code, code.rows, tile_rows(widths[0]), write)

    by_panels(code, code.columns, widths, panel)
    return code.finished()


def by_panels(code: Function, columns: CodeValue, widths: list[int], write: Callable[[int, CodeValue], None]) -> None:
    """Write code for each panel of so many columns: `write(wide, first)`.

    widths: vectors of a panel, the widest first; the narrower ones are for what is left after whole panels.
    """
    most = widths[0]
    vectors = (columns + (LANES - 1)) // LANES
    if most == 1:
        with code.loop(0, vectors) as n:
            write(1, n * LANES)
        return
    left = vectors % most
    narrow = [(wide, code.index(last).below(left)) for last, wide in _lefts(widths)]
    whole = vectors - left
    with code.loop(0, whole, most) as n:
        write(most, n * LANES)
    # What is left is one panel: the narrowest that has room for it.
    for (wide, more), upper in zip(narrow, [None, *(more for _, more in narrow)], strict=False):
        with code.when(more):
            if upper is None:
                write(wide, whole * LANES)
            else:
                with code.otherwise(upper):
                    write(wide, whole * LANES)


def _lefts(widths: list[int]) -> list[tuple[int, int]]:
    """Return, the widest first, the number of vectors that a panel must exceed to be needed, and its width."""
    return [(smaller, wide) for wide, smaller in zip(widths, [*widths[1:], 0], strict=True)]
