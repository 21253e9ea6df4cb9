"""Write a plan as the source of numba kernels.

A file has two kernels, `forward` and `backward`, in the form that `scanl.ops._cpu._team` runs. Each loop of the plan is
a function of its own, whose pointers the compiler may take as not overlapping, so that it vectorises the loop. The
scratch memory of a sequence holds the state before and after the step, by turns, then the values that the plan stores.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scanl.ops._compiler.cells.plan import Loop, Reduce, StepPlan, squeezed
from scanl.ops._compiler.cells.trace import Ref, TraceNode, contiguous
from scanl.ops._compiler.rules import CHOICES

HEADER = '''"""Kernels of the cell {name}, generated from its step."""

import math

import numpy as np

from scanl.ops._cpu._cells import (
    add_up, apart, clear, copy, in_window, length, longest, multiply, of_step, row_at, state_before
)
from scanl.ops._cpu._sigmoid import log_sigmoid, sigmoid, tanh
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._pointers import at, pointer, separate
from scanl.ops._cpu._slots import units
from scanl.ops._cpu._team import array, scratch

erf, expm1, log, log1p, cos, sin, sqrt = (
    math.erf, math.expm1, math.log, math.log1p, math.cos, math.sin, math.sqrt
)
_FLAGS = {{"error_model": "numpy", "fastmath": {{"contract", "nsz"}}}}
_SUM = {{"error_model": "numpy", "fastmath": {{"contract", "nsz", "reassoc"}}}}  # many partial sums, in vectors
'''
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
        self.functions: dict[str, str] = {}
        self.matrices = {node: f"w{node.index}" for node in plan.lefts}

    # --- loops

    def row_function(self, body: Callable[["_Body"], list[str]], flags: str = "_FLAGS") -> str:
        """Add a function for one row, unless the source has it; return the call."""
        function = _Body(self)
        lines = body(function)
        constants = [f"    {function.constants[value]} = dtype.type({value})" for value in function.constants]
        text = "\n".join(["    separate()", *constants, *_renumbered(lines), ""])
        sizes = [name for name in (*self.axes, "low", "high", "dtype") if re.search(rf"\b{name}\b", text)]
        text = f"({', '.join([*function.pointers.values(), *sizes])}):\n{text}"
        name = self.functions.setdefault(f"@helper(**{flags})\ndef NAME{text}", f"_row_{len(self.functions)}")
        return f"{name}({', '.join([*(self.address(*key) for key in function.pointers), *sizes])})"

    def address(self, buffer: str, offset: int) -> str:
        return _after(f"at_{buffer}", self.size(offset))

    def loop(self, loop: Loop) -> str:
        return self.row_function(lambda body: body.loop(loop))

    def reduce(self, item: Reduce) -> str:
        flags = "_SUM" if item.node.what[0] in ("sum", "mean") else "_FLAGS"
        return self.row_function(lambda body: body.reduce(item.node), flags)

    # --- the kernel

    def declaration(self) -> str:
        timed = [f"in_{name}" for name in self.layout.timed]
        numbers = ["ranges sequences steps size blocks lane reverse state kept history pitch panels", *self.axes]
        numbers += [f"v{node.index}" for node in self.plan.values] + list(self.matrices.values())
        numbers += [f"out_{name}" for name in (*self.layout.results, *self.layout.passing)]
        if self.which == "backward":
            numbers += ["carry", "sums", "begin", "window"]
        return f'@kernel("{" ".join(numbers)}", rows="{" ".join(timed)}")'

    def kernel(self, functions: dict[str, str]) -> str:
        """Return the kernel, and add the functions that it calls to these: names by text."""
        self.functions = functions
        back = self.which == "backward"
        plan, size = self.plan, self.size
        state = size(self.layout.state)
        head = [
            self.declaration(),
            f"def {self.which}(slots):",
            "    dtype = slots.dtype",
            "    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)",
            "    count, steps, size, reverse = slots.sequences, slots.steps, slots.size, slots.reverse",
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
        carried = "carry" if back else "state"
        flush = "add_up(at(sums, unit * added), recent, added)"
        body = [
            "    for unit in units(slots):",
            # in the loop: numba frees an array after its last use
            "        base = pointer(memory.ctypes.data, dtype)",
            "        first = unit // slots.blocks * size",
            "        members = min(size, count - first)",
            *self._block(),
        ]
        if self.layout.sums:
            body.append("        recent = at(base, size * row_width)")
            body += [f"        at_{name} = at(recent, a_{name})" for name in self.layout.sums]
        body += [
            "        for r in range(members):",
            f"            copy(at({carried}, (first + r) * whole), at(base, r * row_width), whole)",
            "        old, new = 0, whole",
            "        for i in range(longest(ranges, first, members)):",
        ]
        turned = "1 - reverse" if back else "reverse"
        for number, segment in enumerate(plan.segments):
            calls = [self.loop(item) if isinstance(item, Loop) else self.reduce(item) for item in segment.items]
            last = number == len(plan.segments) - 1
            zeroed = segment.products
            ending = self._ending() if last else []
            if calls or zeroed or ending:
                body += [
                    "            for r in range(members):",
                    f"                row = row_at(ranges, first + r, i, steps, {turned})",
                    "                if row < 0:",
                    "                    continue",
                    "                here = at(base, r * row_width)",
                    *["                " + line for line in self._places(calls, ending)],
                    *["                " + call for call in calls],
                ]
                for node in zeroed:
                    body.append(f"                clear(at(here, o{node.index}), {size(node.size)})")
                body += ["                " + line for line in ending]
            for node in segment.products:
                body += ["            " + line for line in self._multiply(node)]
        body += ["            old, new = new, old"]
        if self.layout.sums:
            body += [f"            if i % {FLUSH} == {FLUSH - 1}:", f"                {flush}"]
        body += [
            "        for r in range(members):",
            "            last = at(base, r * row_width + length(ranges, first + r) % 2 * whole)",
            f"            target = at({carried}, (first + r) * whole)",
            *["            " + line for line in self._copied("last", "target")],
        ]
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

    def _places(self, calls: Sequence[str], ending: Sequence[str]) -> list[str]:
        """Return lines that compute the addresses which the calls use."""
        text = " ".join([*calls, *ending])
        lines = []

        def used(name: str) -> bool:
            return re.search(rf"\bat_{name}\b", text) is not None

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
                arguments = "ranges, first + r, i, row, reverse, state, whole, history, slots.pitch"
                lines.append(f"at_state = state_before({arguments})")
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
        matrix = _after(self.matrices[node], " + ".join(at_right) or "0")
        panels = "slots.panels, members"
        lines.append(
            f"{indent}multiply({out}, row_width, {columns}, {left_rows}, row_width, {terms}, {matrix}, {panels})"
        )
        return lines


class _Body:
    """The body of a function of one row: its pointers and constants are collected while it is written."""

    def __init__(self, writer: NumbaWriter):
        self.writer = writer
        self.pointers: dict[tuple[str, int], str] = {}
        self.constants: dict[str, str] = {}
        self.loads: dict[tuple, str] = {}

    def pointer(self, buffer: str, offset: int) -> str:
        return self.pointers.setdefault((buffer, offset), f"p{len(self.pointers)}")

    def typed(self, text: str) -> str:
        """Replace c(number) by a constant of the element type."""

        def name(match: re.Match[str]) -> str:
            return self.constants.setdefault(match.group(1), f"c{len(self.constants)}")

        return re.sub(r"\bc\(([^()]*)\)", name, text)

    def index(self, strides: Sequence[int]) -> str:
        terms = []
        for axis, stride in enumerate(strides):
            if stride == 1:
                terms.append(f"j{axis}")
            elif stride:
                terms.append(f"j{axis} * ({self.writer.size(stride)})")
        return " + ".join(terms) or "0"

    def loop(self, loop: Loop) -> list[str]:
        """Write a loop. Axes that every array walks through without a jump become one."""
        views: list[tuple[int, ...]] = [store.strides for store in loop.stores]
        for node in loop.nodes:
            args = (squeezed(arg, node.whole.shape) for arg in node.args if isinstance(arg, Ref))
            views += [arg.strides for arg in args if arg.node.kind != "literal" and not loop.holds(arg)]
        values = [store.value for store in loop.stores if isinstance(store.value, Ref)]
        views += [value.strides for value in values if value.node.kind != "literal" and not loop.holds(value)]
        shape = list(loop.shape)
        keep = list(range(len(shape)))
        for axis in range(len(shape) - 2, -1, -1):
            after = keep[keep.index(axis) + 1]
            if self.writer.plan.lanes and after == len(shape) - 1:
                continue
            if all(view[axis] == view[after] * shape[after] for view in views):
                shape[after] *= shape[axis]
                keep.remove(axis)
        merged = {"keep": keep}
        lines, indent = [], "    "
        for number, axis in enumerate(keep):
            divided = self.writer.plan.lanes and axis == len(shape) - 1
            bounds = "low, high" if divided else self.writer.size(shape[axis])
            lines.append(f"{indent}for j{number} in range({bounds}):")
            indent += "    "
        names: dict[TraceNode, str] = {}
        body: list[str] = []

        def read(value: "Ref | float") -> str:
            if not isinstance(value, Ref):
                return _number(value)
            if value.node.kind == "literal":
                return _number(value.node.what)
            if loop.holds(value):
                return names[value.node]
            strides = tuple(value.strides[axis] for axis in merged["keep"])
            key = (self.writer.plan.buffer(value.node), value.offset, strides)
            if key not in self.loads:
                self.loads[key] = f"x{len(self.loads)}"
                loaded = f"{self.pointer(*key[:2])}[{self.index(strides)}]"
                loaded = f"{loaded} != c(0)" if value.node.truth else loaded
                body.append(f"{indent}{self.loads[key]} = {loaded}")
            return self.loads[key]

        for node in loop.nodes:
            args = [squeezed(arg, node.whole.shape) if isinstance(arg, Ref) else arg for arg in node.args]
            texts = [read(arg) for arg in args]
            for i, arg in enumerate(args):
                if isinstance(arg, Ref) and arg.node.truth and not node.truth and i != CHOICES.get(node.what):
                    texts[i] = f"(c(1) if {texts[i]} else c(0))"
            names[node] = f"t{node.index}"
            body.append(f"{indent}{names[node]} = {node.what.format(*texts)}")
        for store in loop.stores:
            value = read(store.value)
            if isinstance(store.value, Ref) and store.value.node.truth:
                value = f"(c(1) if {value} else c(0))"
            strides = tuple(store.strides[axis] for axis in keep)
            sign = "+=" if store.adds else "="
            body.append(f"{indent}{self.pointer(store.buffer, store.offset)}[{self.index(strides)}] {sign} {value}")
        return [self.typed(line) for line in [*lines, *body]]

    def reduce(self, node: TraceNode) -> list[str]:
        """Write a reduction: the axes that it runs over come last in its argument."""
        (source,), name = node.args, node.what[0]
        inner = node.what[1]
        outer = len(source.shape) - inner
        place = self.pointer(self.writer.plan.buffer(source.node), source.offset)
        target = self.pointer(self.writer.plan.buffer(node), 0)
        lines, indent = [], "    "
        value = f"{place}[{self.index(source.strides)}]"
        if source.node.truth:
            value = f"(c(1) if {value} != c(0) else c(0))"
        running = name == "cumsum"
        strides = node.what[2] if running else contiguous(source.shape[:outer])
        for axis in range(outer):
            lines.append(f"{indent}for j{axis} in range({self.writer.size(source.shape[axis])}):")
            indent += "    "
        mean = ""
        if name == "mean":
            numbers = self.writer.size(math.prod(source.shape[outer:]))
            mean = f" / dtype.type({numbers})"
        if name in ("sum", "mean") and outer and source.strides[outer - 1] == 1 != source.strides[-1]:
            return [self.typed(line) for line in [*lines[:-1], *self._columns(source, outer, value, target, mean)]]
        start = {"amax": "c(-np.inf)", "amin": "c(np.inf)"}.get(name, "c(0)")
        lines.append(f"{indent}total = {start}")
        deep = indent
        for axis in range(outer, len(source.shape)):
            lines.append(f"{deep}for j{axis} in range({self.writer.size(source.shape[axis])}):")
            deep += "    "
        lines.append(f"{deep}x0 = {value}")
        step = {
            "amax": "total = x0 if (x0 > total) | (x0 != x0) else total",
            "amin": "total = x0 if (x0 < total) | (x0 != x0) else total",
        }.get(name, "total += x0")
        lines.append(deep + step)
        if running:
            lines.append(f"{deep}{target}[{self.index(strides)}] = total")
        else:
            lines.append(f"{indent}{target}[{self.index(strides)}] = total{mean}")
        return [self.typed(line) for line in lines]

    def _columns(self, source: Ref, outer: int, value: str, target: str, mean: str) -> list[str]:
        """Write sums of columns: rows are added one by one, so that the compiler's vectors run along a row."""
        indent, last = "    " * outer, outer - 1
        across = f"for j{last} in range({self.writer.size(source.shape[last])}):"
        place = f"{target}[{self.index(contiguous(source.shape[:outer]))}]"
        lines, deep = [f"{indent}{across}", f"{indent}    {place} = c(0)"], indent
        for axis in range(outer, len(source.shape)):
            lines.append(f"{deep}for j{axis} in range({self.writer.size(source.shape[axis])}):")
            deep += "    "
        lines += [f"{deep}{across}", f"{deep}    {place} += {value}"]
        return [*lines, f"{indent}{across}", f"{indent}    {place} = {place}{mean}"] if mean else lines


def _after(first: str, count: str) -> str:
    return first if count == "0" else f"at({first}, {count})"


def _number(value: float) -> str:
    text = repr(float(value))
    return f"c({text})" if math.isfinite(value) else f"c({text.replace('inf', 'np.inf').replace('nan', 'np.nan')})"


def _renumbered(lines: Sequence[str]) -> list[str]:
    """Number the values in the order in which they appear, so that equal loops have equal text."""
    numbers: dict[str, int] = {}
    return [re.sub(r"\bt\d+\b", lambda match: f"t{numbers.setdefault(match[0], len(numbers))}", line) for line in lines]


def source(name: str, forward: NumbaWriter, backward: NumbaWriter) -> str:
    """Return the source of both kernels. Equal loops are one function, which numba compiles once."""
    functions: dict[str, str] = {}
    kernels = [writer.kernel(functions) for writer in (forward, backward)]
    function_texts = [text.replace("NAME", name, 1) for text, name in functions.items()]
    return "\n\n".join([HEADER.format(name=name), *function_texts, *kernels])
