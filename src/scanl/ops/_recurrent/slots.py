"""The numbers that a kernel of a recurrent layer gets, and how its work is divided."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from scanl.ops._recurrent.writer import CodeValue, Function

COMMON_SLOTS = 2  # slots before those of the kernel: the counter of units, and their number


class WorkUnit(NamedTuple):
    """What one unit of work has: some rows of the batch in one direction.

    shared: the slots of both directions.   own: those of this one.   first: the first row.   rows: their number.
    """

    shared: Mapping[str, CodeValue]
    own: Mapping[str, CodeValue]
    direction: CodeValue
    group: CodeValue
    first: CodeValue
    rows: CodeValue
    unit: CodeValue


@contextmanager
def work(code: Function, shared: Sequence[str], own: Sequence[str], pointers: set[str]) -> Iterator[WorkUnit]:
    """A loop over units until none is left. `own` are there once for each direction, after the shared ones."""
    values = read_slots(code, shared, pointers, code.index(COMMON_SLOTS))
    with taken_units(code) as unit:
        direction, group = unit // values["groups"], unit % values["groups"]
        mine = read_slots(code, own, pointers, direction * len(own) + (COMMON_SLOTS + len(shared)))
        size = (values["batch"] + values["groups"] - 1) // values["groups"]
        first = code.least(group * size, values["batch"])
        rows = code.least(values["batch"] - first, size)
        yield WorkUnit(values, mine, direction, group, first, rows, unit)


@contextmanager
def taken_units(code: Function) -> Iterator[CodeValue]:
    """A loop over units until none is left. The context yields the number of the unit."""
    own_counter = CodeValue(code.variable("i64"), "ptr", code)  # where no other thread takes units
    code.write(code.index(0), own_counter)
    counter = code.new("load ptr, ptr %slots", "ptr")
    counter = code.either(code.none(counter), own_counter, counter)
    count = code.new(f"load i64, ptr {_place(code, code.index(1)).text}", "i64")
    with code.strides(count) as (_, advance):
        unit = code.new(f"atomicrmw add ptr {counter.text}, i64 1 monotonic", "i64")
        with code.when(unit.below(count)):
            yield unit
        advance(1)


def _place(code: Function, index: CodeValue) -> CodeValue:
    return code.new(f"getelementptr i64, ptr %slots, i64 {index.text}", "ptr")


def read_slots(code: Function, names: Sequence[str], pointers: set[str], base: CodeValue) -> dict[str, CodeValue]:
    """Return the slots of these names, of which the first is number `base`."""
    values = {}
    for at, name in enumerate(names):
        kind = "ptr" if name in pointers else "i64"
        values[name] = code.new(f"load {kind}, ptr {_place(code, base + at).text}", kind)
    return values


def moved(code: Function, values: Mapping[str, CodeValue], distances: Mapping[str, Any]) -> dict[str, CodeValue]:
    """Return pointers with some moved. What is null stays null."""
    found = dict(values)
    for name, distance in distances.items():
        null = CodeValue("null", "ptr", code)
        found[name] = code.either(code.none(values[name]), null, code.at(values[name], distance))
    return found
