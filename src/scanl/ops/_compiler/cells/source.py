"""Write a plan as the source of numba kernels.

A file has two kernels, `forward` and `backward`, in the form that `scanl.ops._cpu._team` runs. Each loop of the plan is
a function of its own, whose pointers the compiler may take as not overlapping, so that it vectorises the loop. The
scratch memory of a sequence holds the state before and after the step, by turns, then the values that the plan stores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scanl.ops._compiler import print_numba
from scanl.ops._compiler.cells.plan import Reduce, StepLoop, StepPlan, squeezed
from scanl.ops._compiler.cells.trace import Ref, TraceNode, contiguous
from scanl.ops._compiler.expressions import (  # fmt: skip
    Constant,
    Expression,
    Load,
    Name,
    Operation,
    as_number,
    as_truth,
    place,
)
from scanl.ops._compiler.loops import Assign, Loop, LoopAxes, LoopFunction, Statement, axes_of, nested, parts, reduction
from scanl.ops._compiler.views import merged

IMPORTS = """\
from scanl.ops._cpu._cells import (
    add_up, advance, apart, clear, copy, entering, in_window, lane_steps, multiply, of_step, rewind, sequence_of
)
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._pointers import at, pointer, separate
from scanl.ops._cpu._team import scratch

expm1, log, log1p = math.expm1, math.log, math.log1p"""
FLUSH = 256  # steps of a partial sum; adding partial sums keeps long sums exact


@dataclass
class KernelLayout:
    """Where the kernels find their operands, by name.

    timed, results: inputs and results with a row for every step, and the numbers of a row.   passing: results with a
    row for every step of one window.   sums: sums over time, and their sizes.   state: the numbers of the state.
    """

    timed: Mapping[str, int]
    results: Mapping[str, int]
    passing: Mapping[str, int]
    sums: Mapping[str, int]
    state: int


class NumbaWriter:
    """Writes one kernel: `which` is "forward" or "backward"."""

    def __init__(self, which: str, plan: StepPlan, layout: KernelLayout, nodes: Sequence[TraceNode], keeps_state: bool):
        self.which, self.plan, self.layout = which, plan, layout
        self.kept, self.keeps_state = nodes, keeps_state
        self.axes = list(plan.traced.axes.traced)
        self.size = plan.traced.axes.expression
        self.functions: dict[LoopFunction, str] = {}
        self.matrices = {node: f"w{node.index}" for node in plan.lefts}

    # --- loops

    def call(self, item: StepLoop | Reduce) -> "RowCall":
        """Return the call of a function of one row; equal loops have one function."""
        row = _Row(self)
        body = row.reduce(item.node) if isinstance(item, Reduce) else row.loop(item)
        sums = isinstance(item, Reduce) and item.node.what[0] in ("sum", "mean")
        every = list(parts(body))
        known = {part.name for part in every if isinstance(part, Name)}
        sizes = [name for name in (*self.axes, "low", "high") if name in known]
        if any(isinstance(part, Constant) and isinstance(part.value, float) for part in every) or any(
            isinstance(part, Operation) and part.name == "real" for part in every
        ):
            sizes.append("dtype")
        function = LoopFunction(tuple(row.pointers.values()), (), body, sums, tuple(sizes))
        name = self.functions.setdefault(function, f"_row_{len(self.functions)}")
        addresses = [_after(f"at_{buffer}", self.size(offset)) for buffer, offset in row.pointers]
        return RowCall(f"{name}({', '.join([*addresses, *sizes])})", {buffer for buffer, _ in row.pointers})

    # --- the kernel

    def declaration(self) -> str:
        timed = [f"in_{name}" for name in self.layout.timed]
        numbers = [
            "pieces count begins lanes steps size blocks lane reverse state kept history pitch panels",
            *self.axes,
        ]
        numbers += [f"v{node.index}" for node in self.plan.values] + list(self.matrices.values())
        numbers += [f"out_{name}" for name in (*self.layout.results, *self.layout.passing)]
        if self.which == "backward":
            numbers += ["carry", "sums", "begin", "window"]
        return f'@kernel("{" ".join(numbers)}", rows="{" ".join(timed)}")'

    def kernel(self, functions: dict[LoopFunction, str]) -> str:
        """Return the kernel, and add the functions that it calls to these: names by text."""
        self.functions = functions
        back = self.which == "backward"
        plan, size = self.plan, self.size
        state = size(self.layout.state)
        head = [
            self.declaration(),
            f"def {self.which}(slots):",
            "    dtype = slots.dtype",
            "    pieces = array(slots.pieces, 4 * slots.count, np.int64)",
            "    begins = array(slots.begins, slots.lanes + 1, np.int64)",
            "    steps, size, reverse = slots.steps, slots.size, slots.reverse",
            "    cursors = np.empty(3 * size, np.int64)",
            *[f"    {axis} = slots.{axis}" for axis in self.axes],
            "    state, kept = pointer(slots.state, dtype), pointer(slots.kept, dtype)",
            *[f"    at_v{node.index} = pointer(slots.v{node.index}, dtype)" for node in plan.values],
            *[f"    in_{name} = slots.in_{name}" for name in self.layout.timed],
            *[f"    out_{name} = pointer(slots.out_{name}, dtype)" for name in self.layout.results],
            *[f"    out_{name} = pointer(slots.out_{name}, dtype)" for name in self.layout.passing],
            f"    whole = {state}",
            *self._one_by_one({f"o{node.index}": node.size for node in plan.scratch}, "2 * whole", "width"),
        ]
        head += [f"    {name} = pointer(slots.{name}, dtype)" for name in self.matrices.values()]
        node_sizes = {f"e{node.index}": node.size for node in self.kept}
        sums = {f"a_{name}": numbers for name, numbers in self.layout.sums.items()}
        head += [
            *self._one_by_one(node_sizes, "whole" if self.keeps_state else "0", "stored"),
            *self._one_by_one(sums, "0", "added"),
            "    row_width = apart(width, dtype)",
            "    memory = scratch(size * row_width + added, dtype)",
        ]
        if back:
            head += [
                "    history, carry = pointer(slots.history, dtype), pointer(slots.carry, dtype)",
                "    sums = pointer(slots.sums, dtype)",
            ]
        carried, turned = ("carry", "1 - reverse") if back else ("state", "reverse")
        flush = "add_up(at(sums, unit * added), recent, added)"
        body = [
            "    for unit in units(slots):",
            # in the loop: numba frees an array after its last use
            "        base = pointer(memory.ctypes.data, dtype)",
            "        first = unit // slots.blocks * size",
            "        members = min(size, slots.lanes - first)",
            *self._block(),
        ]
        if self.layout.sums:
            body.append("        recent = at(base, size * row_width)")
            body += [f"        at_{name} = at(recent, a_{name})" for name in self.layout.sums]
        body += [
            "        for r in range(members):",
            "            rewind(cursors, r, begins, first + r)",
            "        old, new = 0, whole",
            "        for i in range(lane_steps(pieces, begins, first, members)):",
            "            for r in range(members):",
            f"                if advance(cursors, r, pieces, begins[first + r + 1], steps, {turned}):",
            f"                    source = at({carried}, sequence_of(cursors, r, pieces) * whole)",
            "                    copy(source, at(base, r * row_width + old), whole)",
        ]
        for level, segment in enumerate(plan.segments):
            calls = [self.call(item) for item in segment.items]
            last = level == len(plan.segments) - 1
            zeroed = segment.products
            ending = [*self._ending(), *self._leaving(carried)] if last else []
            if calls or zeroed or ending:
                body += [
                    "            for r in range(members):",
                    "                row = cursors[3 * r + 2]",
                    "                if row < 0:",
                    "                    continue",
                    "                here = at(base, r * row_width)",
                    *["                " + line for line in self._places(calls)],
                    *["                " + call.text for call in calls],
                ]
                for node in zeroed:
                    body.append(f"                clear(at(here, o{node.index}), {size(node.size)})")
                body += ["                " + line for line in ending]
            for node in segment.products:
                body += ["            " + line for line in self._multiply(node)]
        body += ["            old, new = new, old"]
        if self.layout.sums:
            body += [f"            if i % {FLUSH} == {FLUSH - 1}:", f"                {flush}"]
        if self.layout.sums:
            body.append(f"        {flush}")
        return "\n".join([*head, *body, ""])

    def _one_by_one(self, sizes: Mapping[str, int], begin: str, end: str) -> list[str]:
        """Return lines that say where each of some values begins, one after the other, and where the last ends."""
        lines, at = [], begin
        for name, numbers in sizes.items():
            lines.append(f"    {name} = {at}")
            at = f"{name} + {self.size(numbers)}"
        return [*lines, f"    {end} = {at}"]

    def _places(self, calls: "Sequence[RowCall]") -> list[str]:
        """Return lines that compute the addresses which the calls use."""
        buffers = set[str]().union(*(call.buffers for call in calls))
        used = buffers.__contains__
        lines = []
        timed = [name for name in self.layout.timed if used(name)]
        passing = {name: numbers for name, numbers in self.layout.passing.items() if used(name)}
        lines += [f"at_{n} = of_step(in_{n}, row, steps, dtype)" for n in timed]
        for name, numbers in self.layout.results.items():
            if used(name):
                lines.append(f"at_{name} = at(out_{name}, row * ({self.size(numbers)}))")
        if passing:
            lines.append("place = in_window(row, steps, slots.begin, slots.window)")
        lines += [f"at_{n} = at(out_{n}, place * ({self.size(numbers)}))" for n, numbers in passing.items()]
        if self.which == "backward":
            if used("state"):
                arguments = "cursors, r, pieces, row, reverse, state, whole, history, slots.pitch"
                lines.append(f"at_state = entering({arguments})")
            if used("dlast"):
                lines.append("at_dlast = at(here, old)")
            if used("dstate"):
                lines.append("at_dstate = at(here, new)")
        else:
            if used("state"):
                lines.append("at_state = at(here, old)")
            if used("last"):
                lines.append("at_last = at(here, new)")
        for node in self.plan.scratch:
            if used(f"s{node.index}"):
                lines.append(f"at_s{node.index} = at(here, o{node.index})")
        for node in self.kept:
            if used(f"k{node.index}"):
                lines.append(f"at_k{node.index} = at(kept, row * stored + e{node.index})")
        return lines

    def _ending(self) -> list[str]:
        """Return lines that keep the state and the products of a step."""
        if self.which == "backward" or not (self.kept or self.keeps_state):
            return []
        lines = ["if slots.kept != 0:"]
        if self.keeps_state:
            lines += ["    " + line for line in self._copied("at(here, new)", "at(kept, row * stored)")]
        for node in self.kept:
            target = f"at(kept, row * stored + e{node.index})"
            lines.append(f"    copy(at(here, o{node.index}), {target}, {self.size(node.size)})")
        return lines

    def _leaving(self, carried: str) -> list[str]:
        """Return lines that copy the state after the last step of a sequence."""
        lines = ["if cursors[3 * r + 1] == 0:", f"    target = at({carried}, sequence_of(cursors, r, pieces) * whole)"]
        return [*lines, *["    " + line for line in self._copied("at(here, new)", "target")]]

    def _block(self) -> list[str]:
        """Return lines that say which channels a unit computes, if channels are divided."""
        if not self.plan.lanes:
            return []
        return [
            "        low = unit % slots.blocks * slots.lane",
            f"        high = min(low + slots.lane, {self.size(self.plan.lanes)})",
        ]

    def _copied(self, source: str, target: str) -> list[str]:
        """Return lines that copy a unit's part of a state from scratch memory to an array."""
        if not self.plan.lanes:
            return [f"copy({source}, {target}, whole)"]
        return [
            f"for a in range(0, whole, {self.size(self.plan.lanes)}):",
            f"    copy(at({source}, a + low), at({target}, a + low), high - low)",
        ]

    def _multiply(self, node: TraceNode) -> list[str]:
        lhs, rhs, result = self.plan.lefts[node], node.args[1], node.what
        source = {"state": "old", "dlast": "old"}.get(lhs.node.what, f"o{lhs.node.index}")
        if result.strides[-1] != 1:
            raise AssertionError("a product's result is contiguous")
        terms, columns = (self.size(axis_size) for axis_size in rhs.shape[-2:])
        grouped = len(rhs.shape) == 3
        at_out, at_left, at_right = [f"o{node.index}"], [source], []
        if lhs.offset:
            at_left.append(f"{self.size(lhs.offset)}")
        lines, indent = [], ""
        axes = list(range(len(lhs.shape) - 1))
        for axis in (axis for axis in axes if lhs.shape[axis] != 1):
            index = f"g{axis}"
            lines.append(f"{indent}for {index} in range({self.size(lhs.shape[axis])}):")
            indent += "    "
            at_left.append(f"{index} * ({self.size(lhs.strides[axis])})")
            at_out.append(f"{index} * ({self.size(result.strides[axis])})")
            if grouped and axis == 0:
                at_right.append(f"{index} * ({self.size(rhs.shape[1] * rhs.shape[2])})")
        out, left_rows = f"at(base, {' + '.join(at_out)})", f"at(base, {' + '.join(at_left)})"
        matrix = f"at({self.matrices[node]}, {' + '.join(at_right)})" if at_right else self.matrices[node]
        panels = "slots.panels, members"
        lines.append(
            f"{indent}multiply({out}, row_width, {columns}, {left_rows}, row_width, {terms}, {matrix}, {panels})"
        )
        return lines


class RowCall(NamedTuple):
    """A call of a function of one row. buffers: whose addresses it has."""

    text: str
    buffers: set[str]


class _Row:
    """A function of one row: its pointers are collected while it is made."""

    def __init__(self, writer: NumbaWriter):
        self.plan, self.size = writer.plan, writer.size
        self.pointers: dict[tuple[str, int], str] = {}

    def axes(self, shape: Sequence[int]) -> LoopAxes:
        return axes_of([f"j{axis}" for axis in range(len(shape))], [self.size(size) for size in shape])

    def number(self, buffer: str, offset: int, strides: Sequence[int]) -> Load:
        """Return a number of a buffer, at the indices j0, j1, ..."""
        pointer = self.pointers.setdefault((buffer, offset), f"p{len(self.pointers)}")
        names = [f"j{axis}" for axis in range(len(strides))]
        return Load(pointer, place(names, [self.size(stride) for stride in strides]))

    def loop(self, loop: StepLoop) -> tuple[Statement, ...]:
        """Return a loop. Axes that every array walks through without a jump become one."""
        views = [store.strides for store in loop.stores]
        for node in loop.nodes:
            args = (squeezed(arg, node.whole.shape) for arg in node.args if isinstance(arg, Ref))
            views += [arg.strides for arg in args if arg.node.kind != "literal" and not loop.holds(arg)]
        values = [store.value for store in loop.stores if isinstance(store.value, Ref)]
        views += [value.strides for value in values if value.node.kind != "literal" and not loop.holds(value)]
        whole = len(loop.shape) - bool(self.plan.lanes)  # channels that are divided stay an axis of their own
        shape, steps = merged(loop.shape[:whole], *(view[:whole] for view in views))
        strides = {view: (*step, *view[whole:]) for view, step in zip(views, steps, strict=True)}
        body: list[Statement] = []
        loads: dict[tuple, Name] = {}
        names: dict[TraceNode, Name] = {}

        def read(value: "Ref | float") -> Expression:
            if not isinstance(value, Ref) or value.node.kind == "literal":
                return Constant(float(value.node.what if isinstance(value, Ref) else value))
            if loop.holds(value):
                return names[value.node]
            key = self.plan.buffer(value.node), value.offset, strides[value.strides]
            if key not in loads:
                loads[key] = Name(f"x{len(loads)}", value.node.truth)
                loaded = self.number(*key)
                body.append(Assign(loads[key], as_truth(loaded) if value.node.truth else loaded))
            return loads[key]

        for node in loop.nodes:
            args = [read(squeezed(arg, node.whole.shape) if isinstance(arg, Ref) else arg) for arg in node.args]
            names[node] = Name(f"t{len(names)}", node.truth)
            body.append(Assign(names[node], value_of(node, args)))
        for store in loop.stores:
            value = as_number(read(store.value))
            target = self.number(store.buffer, store.offset, strides[store.strides])
            body.append(Assign(target, value, store.adds))
        if self.plan.lanes:
            body = [Loop(f"j{len(shape)}", (Name("low"), Name("high")), tuple(body))]
        return nested(self.axes(shape), body)

    def reduce(self, node: TraceNode) -> tuple[Statement, ...]:
        """Return a reduction: the axes that it runs over come last in its argument."""
        (source,), (name, inner, *layout) = node.args, node.what
        outer = len(source.shape) - inner
        value: Expression = self.number(self.plan.buffer(source.node), source.offset, source.strides)
        value = as_number(as_truth(value)) if source.node.truth else value
        target = self.number(self.plan.buffer(node), 0, layout[0] if layout else contiguous(source.shape[:outer]))
        axes = self.axes(source.shape)
        count = Operation("real", self.size(math.prod(source.shape[outer:])))
        along_rows = outer > 0 and source.strides[outer - 1] == 1 != source.strides[-1]
        return reduction(name, axes[:outer], axes[outer:], value, target, count, along_rows=along_rows)


def value_of(node: TraceNode, args: Sequence[Expression]) -> Expression:
    """Return the value of a node for values of its arguments."""
    value = node.what(*args)
    return as_truth(value) if node.truth else as_number(value)


def _after(first: str, count: Expression) -> str:
    return first if count == Constant(0) else f"at({first}, {count})"


def source(name: str, forward: NumbaWriter, backward: NumbaWriter) -> str:
    """Return the source of both kernels. Equal loops are one function, which numba compiles once."""
    functions: dict[LoopFunction, str] = {}
    kernels = [writer.kernel(functions) for writer in (forward, backward)]
    texts = [print_numba.function(called, function) for function, called in functions.items()]
    header = print_numba.header(f"Kernels of the cell {name}, generated from its step.", IMPORTS)
    return "\n\n".join([header, *texts, *kernels])
