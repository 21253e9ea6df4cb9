"""The kernel of one layer of a recurrent module, forward: all steps, in one or both directions.

The weights are packed once a call, if there are enough rows; then some steps at a time: what the inputs give all gates,
by one product, and the steps one after another.
"""

import functools

from scanl.ops._recurrent.cells import CELLS, CellCode
from scanl.ops._recurrent.products import (
    QUAD,
    by_panels,
    pack_columns,
    product,
    product_by_terms,
    tile,
    tile_by_terms,
    tile_rows,
)
from scanl.ops._recurrent.slots import moved, work
from scanl.ops._recurrent.writer import DECLARATIONS, LANES, CodeValue, Function

# The slots of a kernel after the counter of units and their number; those of a direction are there twice.
SHARED_SLOTS = (
    "steps batch inputs units x x_step x_batch y y_step y_batch kept_step carries groups scratch scratch_size chunk "
    "few_inputs few_states"
)
DIRECTION_SLOTS = "w_input w_state b_input b_state h0 c0 h c kept"
POINTERS = {"x", "y", "carries", "scratch", *DIRECTION_SLOTS.split()}
SIZES = "inputs units x_step x_batch y_step y_batch kept_step few_inputs few_states chunk"


def scratch_size(cell: CellCode, batch: int, inputs: int, units: int, chunk: int) -> int:
    """Return how many numbers a unit of work has for itself."""
    columns = padded(cell, units) * cell.gates
    return columns * (up(inputs) + up(units) + 2 + batch) + chunk * batch * columns + (1 + batch) * up(units)


def up(number: int) -> int:
    """Return the next multiple of LANES."""
    return -(-number // LANES) * LANES


def padded(cell: CellCode, units: int) -> int:
    """Return the units that whole panels have."""
    return -(-units // (LANES * cell.widths[0])) * LANES * cell.widths[0]


def pack_bias(cell: CellCode) -> str:
    """Write the biases of a panel as vectors: of the input with that of the state where they may be added up, and of
    the state. A bias may be missing."""
    code = Function("pack_bias", "b_input b_state by_input by_state", "first units")
    masks = [code.mask(code.units - code.first - c * LANES) for c in range(cell.widths[0])]
    for gate in range(cell.gates):
        for c, mask in enumerate(masks):
            at, to = code.units * gate + code.first + c * LANES, (gate + c) * LANES
            with code.when(code.none(code.b_input)):
                for out in (code.by_input, code.by_state):
                    code.write(code.same(0), code.at(out, to))
            with code.otherwise(code.none(code.b_input)):
                a, b = (code.read(code.at(bias, at), mask) for bias in (code.b_input, code.b_state))
                summed = cell.sums_biases or gate < cell.gates - 1
                code.write(code.plus(a, b) if summed else a, code.at(code.by_input, to))
                code.write(code.same(0) if summed else b, code.at(code.by_state, to))
    return code.finished()


def cell_step(cell: CellCode, wide: int) -> str:
    """Write the step of some rows, for `wide` vectors of units.

    kept, if it is not null, gets `size` numbers for each of its vectors in a row.
    """
    code = Function(
        f"cell_{wide}", "by_input by_state h c y kept",
        "rows input_row state_row h_row c_row y_row kept_row size left",
    )  # fmt: skip
    masks = [code.mask(code.left - c * LANES) for c in range(wide)]
    with code.loop(0, code.rows) as r:
        for w, mask in enumerate(masks):
            at, row = w * LANES, [(gate if cell.gates > 1 else w) * LANES for gate in range(cell.gates)]
            a = [code.read(code.at(code.by_input, r * code.input_row, place)) for place in row]
            b = [code.read(code.at(code.by_state, r * code.state_row, place)) for place in row]
            h = code.read(code.at(code.h, r * code.h_row, at), mask)
            c_place = code.at(code.c, r * code.c_row, at)
            c = code.read(c_place, mask) if cell.memory else None
            h, c, kept = cell.step(code, a, b, h, c)
            code.write(h, code.at(code.y, r * code.y_row, at), mask)
            if c is not None:
                code.write(c, c_place, mask)
            if kept:
                with code.otherwise(code.none(code.kept)):
                    for n, value in enumerate(kept):
                        code.write(value, code.at(code.kept, r * code.kept_row + code.size * n, at))
    return code.finished()


def copy_rows() -> str:
    """Copy rows; zeros if `x` is null."""
    code = Function("copy_rows", "x out", "x_row out_row rows width")
    with code.loop(0, code.rows) as r, code.loop(0, code.width, LANES) as at:
        mask = code.mask(code.width - at)
        place, none = code.at(code.out, r * code.out_row, at), code.none(code.x)
        with code.when(none):
            code.write(code.same(0), place, mask)
        with code.otherwise(none):
            code.write(code.read(code.at(code.x, r * code.x_row, at), mask), place, mask)
    return code.finished()


def enter_rows() -> str:
    """Copy the rows whose entry of `carries` is 1; zeros for those whose entry is 0. out may be x."""
    code = Function("enter_rows", "x out carries", "x_row out_row rows width")
    with code.loop(0, code.rows) as r:
        carried = code.word_at(code.at(code.carries, r))
        with code.loop(0, code.width, LANES) as at:
            left = code.width - at
            row = code.read(code.at(code.x, r * code.x_row, at), code.mask(left * carried))
            code.write(row, code.at(code.out, r * code.out_row, at), code.mask(left))
    return code.finished()


def begins_anew(code: Function, carries: CodeValue, rows: CodeValue) -> CodeValue:
    """Return whether the entry of `carries` of any row is 0."""
    total = code.variable("i64")
    code.set(total, code.index(0))
    with code.loop(0, rows) as r:
        code.set(total, code.get(total, "i64") + code.word_at(code.at(carries, r)))
    return code.get(total, "i64").below(rows)


@functools.cache
def source(mode: str) -> str:
    """Return the text of a module with the kernel of a mode of torch."""
    cell = CELLS[mode]
    wides = [wide * cell.gates for wide in cell.widths]
    texts = [DECLARATIONS, copy_rows(), enter_rows(), pack_bias(cell)]
    for wide in wides:
        texts += [tile(rows, wide) for rows in range(1, tile_rows(wide) + 1)]
        texts += [product(wide), product_by_terms(wide, cell.gates), pack_columns(wide, cell.gates)]
    texts += [tile_by_terms(rows) for rows in range(1, QUAD + 1)]
    texts += [cell_step(cell, wide) for wide in cell.widths]
    return "\n".join([*texts, _direction(cell), _kernel()])


def _direction(cell: CellCode) -> str:
    """Write all steps of some rows of the batch in one direction. Strides of steps say which."""
    gates = cell.gates
    code = Function(
        "direction", f"x y carries {DIRECTION_SLOTS} scratch",
        f"steps batch all_rows {SIZES} reverse",
    )  # fmt: skip
    up_inputs, up_units = ((value + (LANES - 1)) // LANES * LANES for value in (code.inputs, code.units))
    panel = LANES * cell.widths[0]
    columns = (code.units + (panel - 1)) // panel * panel * gates
    input_panels = code.scratch
    state_panels = code.at(input_panels, columns * up_inputs)
    input_bias = code.at(state_panels, columns * up_units)
    state_bias = code.at(input_bias, columns)
    by_state = code.at(state_bias, columns)
    zeros = code.at(by_state, columns * code.batch)
    entering = code.at(zeros, up_units)
    by_input = code.at(entering, up_units * code.batch)
    few_inputs, few_states, reverse = (
        code.index(0).below(flag) for flag in (code.few_inputs, code.few_states, code.reverse)
    )
    before = code.choose(reverse, code.y_step, code.index(0) - code.y_step)

    def pack(wide: int, first: CodeValue) -> None:
        name = f"pack_columns_{wide * gates}"
        with code.otherwise(few_inputs):
            code.call(
                name, code.w_input, code.at(input_panels, first * gates * up_inputs), code.inputs, first, code.units
            )
        with code.otherwise(few_states):
            code.call(
                name, code.w_state, code.at(state_panels, first * gates * up_units), code.units, first, code.units
            )
        code.call(
            "pack_bias", code.b_input, code.b_state, code.at(input_bias, first * gates),
            code.at(state_bias, first * gates), first, code.units,
        )  # fmt: skip

    def multiply(few, w, panels, terms, up_terms, bias, x, x_row, out, out_row, rows, wide, first):
        """Write the product for a panel, packed or not."""
        width = wide * gates
        bias = code.at(bias, first * gates)
        with code.when(few):
            code.call(f"product_by_terms_{width}", w, x, bias, out, x_row, terms, out_row, rows, first, code.units)
        with code.otherwise(few):
            code.call(
                f"product_{width}", code.at(panels, first * gates * up_terms), x, bias, out, x_row, terms, out_row,
                width * LANES, rows,
            )  # fmt: skip

    by_panels(code, code.units, cell.widths, pack)
    null, marked = CodeValue("null", "ptr", code), code.choose(code.none(code.carries), 0, code.batch)
    code.call("copy_rows", null, zeros, code.units, code.units, 1, code.units)
    without = code.none(code.h0)
    h0, h0_row = code.either(without, zeros, code.h0), code.choose(without, 0, code.units)
    if cell.memory:
        code.call("copy_rows", code.c0, code.c, code.units, code.units, code.batch, code.units)
    flat = code.x_step.equals(code.x_batch * code.batch)
    with code.loop(0, code.steps, code.chunk) as begin:
        count = code.least(code.steps - begin, code.chunk)
        lowest = code.choose(reverse, code.steps - begin - count, begin)
        x = code.at(code.x, lowest * code.x_step)

        def inputs(wide: int, first: CodeValue, x: CodeValue = x, count: CodeValue = count) -> None:
            out = code.at(by_input, first * gates)

            def rows(x: CodeValue, x_row: CodeValue, out: CodeValue, out_row: CodeValue, number: CodeValue) -> None:
                multiply(
                    few_inputs, code.w_input, input_panels, code.inputs, up_inputs, input_bias, x, x_row, out, out_row,
                    number, wide, first,
                )  # fmt: skip

            with code.when(flat):
                rows(x, code.x_batch, out, columns, count * code.batch)
            with code.otherwise(flat):
                # The longer of both axes is the inner one.
                long = code.batch.below(count)
                outer, inner = code.choose(long, code.batch, count), code.choose(long, count, code.batch)
                x_outer = code.choose(long, code.x_batch, code.x_step)
                x_inner = code.choose(long, code.x_step, code.x_batch)
                out_outer = code.choose(long, columns, columns * code.batch)
                out_inner = code.choose(long, columns * code.batch, columns)
                with code.loop(0, outer) as n:
                    rows(code.at(x, n * x_outer), x_inner, code.at(out, n * out_outer), out_inner, inner)

        by_panels(code, code.units, cell.widths, inputs)
        with code.loop(0, count) as n:
            place = code.choose(reverse, count - n - 1, n)
            step, start = lowest + place, (begin + n).equals(0)
            y = code.at(code.y, step * code.y_step)
            h = code.either(start, h0, code.at(y, before))
            h_row = code.choose(start, h0_row, code.y_batch)
            terms = code.choose(start, code.choose(without, 0, code.units), code.units)  # a state of zeros gives none
            carries = code.at(code.carries, step * code.all_rows)
            begins = begins_anew(code, carries, marked)
            with code.when(begins):
                code.call("enter_rows", h, entering, carries, h_row, up_units, code.batch, code.units)
                if cell.memory:
                    code.call("enter_rows", code.c, code.c, carries, code.units, code.units, code.batch, code.units)
            h, h_row = code.either(begins, entering, h), code.choose(begins, up_units, h_row)
            none = code.none(code.kept)
            kept = code.either(none, null, code.at(code.kept, step * code.kept_step))

            def advance(
                wide: int, first: CodeValue, place: CodeValue = place, y: CodeValue = y, h: CodeValue = h,
                h_row: CodeValue = h_row, none: CodeValue = none, kept: CodeValue = kept, terms: CodeValue = terms,
            ) -> None:  # fmt: skip
                width = wide * gates * LANES
                multiply(
                    few_states, code.w_state, state_panels, terms, up_units, state_bias, h, h_row, by_state,
                    code.index(width), code.batch, wide, first,
                )  # fmt: skip
                code.call(
                    f"cell_{wide}", code.at(by_input, place * code.batch * columns, first * gates), by_state,
                    code.at(h, first), code.at(code.c, first), code.at(y, first),
                    code.either(none, null, code.at(kept, first)), code.batch, columns, width, h_row, code.units,
                    code.y_batch, (columns // gates) * cell.kept, columns // gates, code.units - first,
                )  # fmt: skip

            by_panels(code, code.units, cell.widths, advance)
    y = code.at(code.y, code.choose(reverse, 0, code.steps - 1) * code.y_step)
    code.call("copy_rows", y, code.h, code.y_batch, code.units, code.batch, code.units)
    return code.finished()


def _kernel() -> str:
    """Write the kernel."""
    code = Function("kernel", "slots")
    with work(code, SHARED_SLOTS.split(), DIRECTION_SLOTS.split(), POINTERS) as unit:
        shared, of_states = unit.shared, unit.first * unit.shared["units"]
        kept = (shared["kept_step"] // shared["batch"]) * unit.first
        own = moved(
            code, unit.own, {"h0": of_states, "c0": of_states, "h": of_states, "c": of_states, "kept": kept}
        )  # fmt: skip
        code.call(
            "direction", code.at(shared["x"], unit.first * shared["x_batch"]),
            code.at(shared["y"], unit.first * shared["y_batch"], unit.direction * shared["units"]),
            moved(code, shared, {"carries": unit.first})["carries"], *(own[name] for name in DIRECTION_SLOTS.split()),
            code.at(shared["scratch"], unit.unit * shared["scratch_size"]),
            shared["steps"], unit.rows, shared["batch"], *(shared[name] for name in SIZES.split()), unit.direction,
        )  # fmt: skip
    return code.finished().replace("define internal void @kernel", "define void @kernel")
