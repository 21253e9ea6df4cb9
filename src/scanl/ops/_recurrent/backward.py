"""The kernel of one layer of a recurrent module, backward: the gradients of all that the forward kernel reads.

Some steps at a time, from the last one: the errors of all gates, one step after another, and then the products of
these steps, while their numbers are in the cache.
"""

import functools

from scanl.ops._recurrent.cells import CELLS, CellCode
from scanl.ops._recurrent.forward import begins_anew, copy_rows, enter_rows, up
from scanl.ops._recurrent.products import (
    add_outer,
    by_panels,
    outer_tile,
    pack_rows,
    product,
    tile,
    tile_rows,
)
from scanl.ops._recurrent.slots import moved, work
from scanl.ops._recurrent.writer import DECLARATIONS, LANES, VECTOR, CodeValue, Function

WIDTHS = [4, 2, 1]  # vectors of a panel
PARTS = 4  # sums of rows that do not wait for one another
SHARED_SLOTS = (
    "steps batch inputs units x x_step x_batch y y_step y_batch dy dy_step dy_batch dx_step kept_step kept_units "
    "carries groups scratch scratch_size chunk"
)
DIRECTION_SLOTS = "w_input w_state h0 c0 kept dh dc dx dw_input dw_state db_input db_state dh0 dc0"
POINTERS = {"x", "y", "dy", "carries", "scratch", *DIRECTION_SLOTS.split()}
SIZES = "inputs units x_step x_batch y_step y_batch dy_step dy_batch dx_step kept_step kept_units chunk"


def panels(columns: int) -> int:
    """Return the columns that whole panels have."""
    most = LANES * WIDTHS[0]
    return -(-columns // most) * most


def scratch_size(cell: CellCode, batch: int, inputs: int, units: int, chunk: int) -> int:
    """Return how many numbers a direction has for itself."""
    terms = cell.gates * units
    packed = terms * (panels(inputs) + panels(units))
    steps = chunk * batch * (up(cell.errors * units) + up(units))
    return packed + steps + (4 * batch + 1) * up(units) + panels(units)


def cell_gradient(cell: CellCode) -> str:
    """Write the errors of some rows in one step.

    through: the gradient of h that goes through the weight, from the step after this one.   beside: that beside it.
    """
    code = Function(
        "gradient", "dy through beside dc kept h c y errors",
        "rows units dy_row state_row kept_row size h_row c_row y_row errors_row",
    )  # fmt: skip
    with code.loop(0, code.units, LANES) as at:
        mask = code.mask(code.units - at)
        with code.loop(0, code.rows) as r:
            beside, dc_place = (code.at(each, r * code.state_row, at) for each in (code.beside, code.dc))
            dh = code.plus(
                code.read(code.at(code.dy, r * code.dy_row, at), mask),
                code.read(code.at(code.through, r * code.state_row, at)),
            )
            if cell.beside:
                dh = code.plus(dh, code.read(beside))
            kept = [code.read(code.at(code.kept, r * code.kept_row + code.size * n, at)) for n in range(cell.kept)]
            h = code.read(code.at(code.h, r * code.h_row, at), mask)
            y = code.read(code.at(code.y, r * code.y_row, at), mask)
            c = code.read(code.at(code.c, r * code.c_row, at), mask) if cell.memory else None
            errors, rest, dc = cell.gradient(code, dh, code.read(dc_place) if cell.memory else None, kept, h, y, c)
            for n, error in enumerate(errors):
                code.write(error, code.at(code.errors, r * code.errors_row + code.units * n, at), mask)
            if rest is not None:
                code.write(rest, beside)
            if dc is not None:
                code.write(dc, dc_place)
    return code.finished()


def add_rows() -> str:
    """Write out (columns) += the sum of rows; = if `fresh` is 1. out may be null."""
    code = Function("add_rows", "x out", "x_row rows columns fresh")
    with code.otherwise(code.none(code.out)), code.loop(0, code.columns, LANES) as at:
        mask = code.mask(code.columns - at)
        place, sums = code.at(code.out, at), [code.variable(VECTOR) for _ in range(PARTS)]
        code.set(sums[0], code.read(place, code.mask((code.columns - at) * (code.index(1) - code.fresh))))
        for total in sums[1:]:
            code.set(total, code.same(0))

        def add(r: CodeValue, total: str, at: CodeValue = at, mask: CodeValue = mask) -> None:
            code.set(total, code.plus(code.get(total), code.read(code.at(code.x, r * code.x_row, at), mask)))

        whole = code.rows - code.rows % PARTS
        with code.loop(0, whole, PARTS) as r:
            for n, total in enumerate(sums):
                add(r + n, total)
        with code.loop(whole, code.rows) as r:
            add(r, sums[0])
        first, second, third, last = map(code.get, sums)
        code.write(code.plus(code.plus(first, second), code.plus(third, last)), place, mask)
    return code.finished()


@functools.cache
def source(mode: str) -> str:
    """Return the text of a module with the kernel of a mode of torch."""
    cell = CELLS[mode]
    texts = [DECLARATIONS, copy_rows(), enter_rows(), cell_gradient(cell), add_rows(), add_outer(WIDTHS)]
    for wide in WIDTHS:
        texts += [tile(rows, wide) for rows in range(1, tile_rows(wide) + 1)]
        texts += [outer_tile(rows, wide) for rows in range(1, tile_rows(WIDTHS[0]) + 1)]
        texts += [product(wide), pack_rows(wide)]
    return "\n".join([*texts, _direction(cell), _kernel(cell)])


def _direction(cell: CellCode) -> str:
    """Write all steps in one direction."""
    gates = cell.gates
    code = Function("direction", f"x y dy carries {DIRECTION_SLOTS} scratch", f"steps batch all_rows {SIZES} reverse")
    most = LANES * WIDTHS[0]
    terms, batch, units = code.units * gates, code.batch, code.units
    row = (units + (LANES - 1)) // LANES * LANES
    error_row = (units * cell.errors + (LANES - 1)) // LANES * LANES
    input_panels = code.scratch
    state_panels = code.at(input_panels, (code.inputs + (most - 1)) // most * most * terms)
    through = code.at(state_panels, (units + (most - 1)) // most * most * terms)
    beside = code.at(through, row * batch)
    dc = code.at(beside, row * batch)
    zeros = code.at(dc, row * batch)
    bias = code.at(zeros, row)
    entering_c = code.at(bias, (units + (most - 1)) // most * most)
    entering = code.at(entering_c, row * batch)  # states before the steps of a chunk, zeros where they begin anew
    errors = code.at(entering, row * batch * code.chunk)
    null, reverse = CodeValue("null", "ptr", code), code.index(0).below(code.reverse)
    carried = code.none(code.carries)
    before = code.choose(reverse, code.y_step, code.index(0) - code.y_step)
    no_x = code.none(code.dx)

    def zero(out: CodeValue, out_row: CodeValue, rows: CodeValue | int) -> None:
        code.call("copy_rows", null, out, out_row, out_row, rows, out_row)

    zero(zeros, row, 1)
    zero(bias, (units + (most - 1)) // most * most, 1)
    for place, given in ((through, code.dh), (dc, code.dc)):
        zero(place, row, batch)
        code.call("copy_rows", given, place, units, row, batch, units)
    zero(beside, row, batch)
    no_weights = code.none(code.dw_input)
    goes_on = code.choose(code.none(code.dh0), 1, 0)  # the first steps whose states need no gradient

    def pack_state(wide: int, first: CodeValue) -> None:
        code.call(
            f"pack_rows_{wide}", code.w_state, code.at(state_panels, first * terms), terms, first, units, 0, units
        )

    def pack_input(wide: int, first: CodeValue) -> None:
        skip = units * cell.skip
        code.call(
            f"pack_rows_{wide}", code.w_input, code.at(input_panels, first * terms), terms, first, code.inputs, skip,
            code.inputs,
        )  # fmt: skip

    with code.when(goes_on.below(code.steps)):
        by_panels(code, units, WIDTHS, pack_state)
    with code.otherwise(no_x):
        by_panels(code, code.inputs, WIDTHS, pack_input)
    without_h, without_c = code.none(code.h0), code.none(code.c0)
    h0, h0_row = code.either(without_h, zeros, code.h0), code.choose(without_h, 0, units)
    c0, c0_row = code.either(without_c, zeros, code.c0), code.choose(without_c, 0, units)
    kept_row = code.kept_units * cell.kept
    by_state = units * (cell.errors - gates)  # where the errors of the state begin in a row
    with code.loop(0, code.steps, code.chunk) as end:  # steps that are done
        count = code.least(code.steps - end, code.chunk)
        lowest = code.choose(reverse, end, code.steps - end - count)
        with code.loop(0, count) as n:
            place = code.choose(reverse, n, count - n - 1)
            step, first = lowest + place, (end + n).equals(code.steps - 1)
            y, kept = code.at(code.y, step * code.y_step), code.at(code.kept, step * code.kept_step)
            back = code.choose(reverse, code.kept_step, code.index(0) - code.kept_step)
            c = code.at(kept, back, code.kept_units * (cell.kept - 1)) if cell.memory else zeros
            own = code.at(errors, place * batch * error_row)
            h, c = code.either(first, h0, code.at(y, before)), code.either(first, c0, c)
            h_row, c_row = code.choose(first, h0_row, code.y_batch), code.choose(first, c0_row, kept_row)
            h_own, carries = code.at(entering, place * batch * row), code.at(code.carries, step * code.all_rows)
            with code.otherwise(carried):
                code.call("enter_rows", h, h_own, carries, h_row, row, batch, units)
                if cell.memory:
                    code.call("enter_rows", c, entering_c, carries, c_row, row, batch, units)
            code.call(
                "gradient", code.at(code.dy, step * code.dy_step), through, beside, dc, kept,
                code.either(carried, h, h_own), code.either(carried, c, entering_c), y, own, batch, units,
                code.dy_batch, row, kept_row, code.kept_units, code.choose(carried, h_row, row),
                code.choose(carried, c_row, row), code.y_batch, error_row,
            )  # fmt: skip

            def back_through(wide: int, first: CodeValue, own: CodeValue = own) -> None:
                code.call(
                    f"product_{wide}", code.at(state_panels, first * terms), code.at(own, by_state), bias,
                    code.at(through, first), error_row, terms, row, units - first, batch,
                )  # fmt: skip

            with code.when((end + n).below(code.steps - goes_on)):
                by_panels(code, units, WIDTHS, back_through)
            with code.when(begins_anew(code, carries, code.choose(carried, 0, batch))):
                for given in [through, *[beside] * cell.beside, *[dc] * cell.memory]:
                    code.call("enter_rows", given, given, carries, row, row, batch, row)
        step_row = batch * error_row
        with code.otherwise(no_x):
            dx = code.at(code.dx, lowest * code.dx_step)
            flat = code.dx_step.equals(batch * code.inputs)  # whether the rows of all steps are one after another
            rows, repeated = code.choose(flat, count * batch, batch), code.choose(flat, 1, count)

            def of_inputs(wide: int, first: CodeValue, dx: CodeValue = dx) -> None:
                with code.loop(0, repeated) as n:
                    code.call(
                        f"product_{wide}", code.at(input_panels, first * terms), code.at(errors, n * step_row), bias,
                        code.at(dx, n * code.dx_step, first), error_row, terms, code.inputs, code.inputs - first, rows,
                    )  # fmt: skip

            by_panels(code, code.inputs, WIDTHS, of_inputs)
        fresh = code.choose(end.equals(0), 1, 0)  # whether the sums have no numbers yet
        with code.otherwise(no_weights):
            x = code.at(code.x, lowest * code.x_step)
            for gate in range(gates):
                source = (gate - cell.skip) % gates  # where the errors of the input have those of the gate
                code.call(
                    "add_outer", code.at(errors, units * source), x, code.at(code.dw_input, units * gate * code.inputs),
                    step_row, error_row, code.x_step, code.x_batch, count, batch, units, code.inputs, fresh,
                )  # fmt: skip
                none = code.none(code.db_input)
                at = code.either(none, null, code.at(code.db_input, units * gate))
                code.call("add_rows", code.at(errors, units * source), at, error_row, count * batch, units, fresh)
            code.call("add_rows", code.at(errors, by_state), code.db_state, error_row, count * batch, terms, fresh)
            with code.otherwise(carried):
                code.call(
                    "add_outer", code.at(errors, by_state), entering, code.dw_state, step_row, error_row, batch * row,
                    row, count, batch, terms, units, fresh,
                )  # fmt: skip
            with code.when(carried):
                # The step that is first in its direction has another state before it than an output.
                last = (end + count).equals(code.steps)
                others = code.choose(last, count - 1, count)
                skip = code.choose(reverse, 0, count - others)
                y = code.at(code.y, (lowest + skip) * code.y_step, before)
                code.call(
                    "add_outer", code.at(errors, skip * step_row + by_state), y, code.dw_state, step_row, error_row,
                    code.y_step, code.y_batch, others, batch, terms, units, fresh,
                )  # fmt: skip
                with code.otherwise(without_h), code.when(last):
                    place = code.choose(reverse, count - 1, 0)
                    code.call(
                        "add_outer", code.at(errors, place * step_row + by_state), code.h0, code.dw_state, 0,
                        error_row, 0, units, 1, batch, terms, units, 0,
                    )  # fmt: skip
    with code.otherwise(code.none(code.dh0)), code.loop(0, batch) as r, code.loop(0, units, LANES) as at:
        total = code.read(code.at(through, r * row, at))
        if cell.beside:
            total = code.plus(total, code.read(code.at(beside, r * row, at)))
        code.write(total, code.at(code.dh0, r * units, at), code.mask(units - at))
    with code.otherwise(code.none(code.dc0)):
        code.call("copy_rows", dc, code.dc0, row, units, batch, units)
    return code.finished()


def _kernel(cell: CellCode) -> str:
    """Write the kernel. Each unit has sums of its own for the gradients of the weights, one group after another."""
    code = Function("kernel", "slots")
    with work(code, SHARED_SLOTS.split(), DIRECTION_SLOTS.split(), POINTERS) as unit:
        shared = unit.shared
        of_states, of_gates = unit.first * shared["units"], unit.group * shared["units"] * cell.gates
        own = moved(
            code, unit.own,
            {
                **dict.fromkeys(("h0", "c0", "dh", "dc", "dh0", "dc0"), of_states), "dx": unit.first * shared["inputs"],
                "kept": (shared["kept_step"] // shared["batch"]) * unit.first, "db_input": of_gates,
                "db_state": of_gates, "dw_input": of_gates * shared["inputs"], "dw_state": of_gates * shared["units"],
            },
        )  # fmt: skip
        in_direction = unit.direction * shared["units"]
        code.call(
            "direction", code.at(shared["x"], unit.first * shared["x_batch"]),
            code.at(shared["y"], unit.first * shared["y_batch"], in_direction),
            code.at(shared["dy"], unit.first * shared["dy_batch"], in_direction),
            moved(code, shared, {"carries": unit.first})["carries"],
            *(own[name] for name in DIRECTION_SLOTS.split()),
            code.at(shared["scratch"], unit.unit * shared["scratch_size"]),
            shared["steps"], unit.rows, shared["batch"], *(shared[name] for name in SIZES.split()), unit.direction,
        )  # fmt: skip
    return code.finished().replace("define internal void @kernel", "define void @kernel")
