"""Write loops over views of memory as the source of functions that a kernel calls.

Each function gets pointers that the compiler may take as not overlapping, so that it vectorises the loop. Functions of
the same text are one function.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from scanl.ops._compiler.rules import Unsupported
from scanl.ops._compiler.values import Memory, Operand, Value, merged, number, place

HEADER = '''"""A kernel of a recorded function."""

import math

import numpy as np

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._in_team import times, times_quantized
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._logarithm import expm1, log, log1p
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._pointers import address, at, pointer, separate
from scanl.ops._cpu._sigmoid import log_sigmoid, sigmoid, tanh
from scanl.ops._cpu._slots import units

erf, cos, sin, sqrt, atan2 = math.erf, math.cos, math.sin, math.sqrt, math.atan2
inf, nan = math.inf, math.nan
'''
LARGE = 1 << 10  # numbers of a weight: a product by it is a call of another kernel
MIN_COLUMNS = 6  # its least columns: COLUMNS of _rows_by_weight.py, which imports numba
CODES = {"float32": "32", "float64": "64", "int8": "08", "int64": "00"}  # of the kinds of memory, in the sources
CALLS = ("times", "times_quantized")  # functions of `_in_team.py`, in the order of their kernels
MAX_LOOPS = 12  # elementwise loops that become one
WAITING = 32  # calls that a later one may still be put among
FLAGS = '{"error_model": "numpy", "fastmath": {"contract", "nsz"}}'
SUMS = '{"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}'  # many partial sums, in vectors


class Loops:
    """The functions of a kernel, the calls of them in order, and the scratch memory."""

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}  # names by text
        self.calls: list[tuple[Any, list[Value]]] = []  # the function, and what it gets pointers to
        self.scratch: dict[str, int] = {}  # numbers of the scratch memory, by kind
        self.called = set[int]()  # numbers of the kernels that it calls, as `_in_team.py` has them
        self._team = Value(Memory("team", 2 + len(CALLS), "int64"), 0, (2 + len(CALLS),), (1,), "real")
        self._open: list[list[_Statement | _Other]] = []  # the last calls; elementwise loops of a list become one

    def elementwise(self, out: Value, args: Sequence[Operand], expressions: Sequence[str]) -> None:
        """Add a loop. expressions: of the real and the imaginary part; {0}, {1}, ... are the arguments.

        A complex argument n is {n.re} and {n.im} there, the truth of argument n {n:truth}; numbers are c(...).
        """
        known = [_constant(arg) for arg in args]
        args = [arg.expanded(out.shape) if isinstance(arg, Value) else arg for arg in known]
        statement = _Statement(out, args, expressions)
        if not self._joins(statement):
            self._append(statement)

    def _append(self, call: "_Statement | _Other") -> None:
        self._open.append([call])
        self._settle(max(0, len(self._open) - WAITING))

    def _joins(self, statement: "_Statement") -> bool:
        """Let a loop become one with earlier ones, and return whether it does.

        The calls between that it depends on then run before those, if they may, and the others after them.
        """
        for at, group in reversed(list(enumerate(self._open))):
            if len(group) == MAX_LOOPS or not all(statement.fits(other) for other in group):
                continue
            needed: list[list[_Statement | _Other]] = []
            others: list[list[_Statement | _Other]] = []
            for call in reversed(self._open[at + 1 :]):
                depends = any(_depend(call, later) for later in ([statement], *needed))
                (needed if depends else others).insert(0, call)
            if not any(_depend(call, group) for call in needed):
                self._open[at:] = [*needed, [*group, statement], *others]
                return True
        return False

    def uses(self, memory: Memory) -> bool:
        """Return whether a call so far reads or writes a memory."""
        waiting = [view for group in self._open for call in group for view in call.views]
        return memory.last >= 0 or any(view.memory is memory for view in waiting)

    def _settle(self, count: int) -> None:
        """Put the first open ones among the calls; `allocate` writes loops, when all that reads them is known."""
        groups, self._open = self._open[:count], self._open[count:]
        for group in groups:
            views = [view for call in group for view in call.views]
            for value in views:
                value.memory.first = min(value.memory.first, len(self.calls))
                value.memory.last = len(self.calls)
            self.calls.append((group[0].function if isinstance(group[0], _Other) else group, views))

    def _write_together(self, statements: Sequence["_Statement"], at: int) -> tuple[str, list[Value]]:
        """Write the loops that become one, which are call number `at`.

        A number that is written and read in this loop alone needs no memory: it is a local variable.
        """
        views = [view for statement in statements for view in statement.views]
        local: dict[int, str] = {}
        one_kind = len({view.memory.kind for view in views}) == 1  # else a conversion would not round
        for number_, statement in enumerate(statements if one_kind else ()):
            memory, first = statement.out.memory, statement.out
            alone = not memory.name and memory.first == memory.last == at and id(memory) not in local
            same = [view for view in views if view.memory is memory]
            reads = sum(view.memory is memory for view in statement.views) - 1
            if alone and not reads and all(_same(view, first) for view in same):
                local[id(memory)] = f"t{number_}"
        body = _Body([statement.out for statement in statements if id(statement.out.memory) not in local])
        body.local = local
        shape = statements[0].out.shape
        wide = [_wide(view, shape) for view in views]
        order = _outer_first(wide)
        sizes, steps = merged([shape[axis] for axis in order], *([one[axis] for axis in order] for one in wide))
        names = [f"i{axis}" for axis in range(len(sizes))]
        lines: list[str] = []
        pairs = iter(zip(views, steps, strict=True))
        for number_, statement in enumerate(statements):
            target = body.read(*_first(next(pairs), names))
            sources = [
                body.read(*_first(next(pairs), names)) if isinstance(arg, Value) else _Number(arg)
                for arg in statement.args
            ]
            values = [expression.format(*sources) for expression in statement.expressions]
            targets = [target.re, target.im][: len(values)]
            if len(values) == 1:
                lines.append(f"{targets[0]} = {values[0]}")
            else:  # an argument may be the result's memory: both parts are computed before one is written
                names_ = [f"r{number_}{letter}" for letter in "ab"]
                lines += [f"{name} = {value}" for name, value in zip(names_, values, strict=True)]
                lines += [f"{place_} = {name}" for place_, name in zip(targets, names_, strict=True)]
        return self._function(body, _nested(sizes, lines), FLAGS), body.views

    def fill(self, out: Value, value: float) -> None:
        """Set all numbers to a value."""
        for reals in (out.part(0), out.part(1)) if out.form == "complex" else (out,):
            self.elementwise(reals, [value], ["{0}"])
            value = 0.0

    def written(self, value: Value) -> Value:
        """Return a value with memory, for what reads numbers of other indices, or writes."""
        memory, constant = value.memory, value.memory.fill
        if constant is not None:
            memory.fill = None
            self.fill(Value(memory, 0, (memory.size,), (1,), "real"), constant)
        return value

    def copy(self, out: Value, source: Operand) -> None:
        """Copy numbers; a real one becomes a complex one."""
        if out.form != "complex":
            self.elementwise(out, [source], ["{0}"])
        elif isinstance(source, Value) and source.form == "complex":
            self.elementwise(out, [source], ["{0.re}", "{0.im}"])
        else:
            self.elementwise(out, [source], ["{0}", "c(0.0)"])

    def gather(self, out: Value, source: Value, axis: int, index: Value) -> None:
        """Copy the numbers of a source at the indices of an axis; the source has the other axes of the result."""
        body, names = _Body([out]), [f"i{at}" for at in range(len(out.shape))]
        step, strides = source.strides[axis], list(source.strides)
        strides[axis] = 0
        at = f"int({body.read(index, names, index.strides)})"
        number_ = str(body.read(source, names, strides))
        line = f"{body.read(out, names, out.strides)!s} = {number_[:-1]} + {at} * {step}]"
        self._add(body, _nested(out.shape, [line]), FLAGS)

    def scatter(self, out: Value, axis: int, index: Value, source: Operand) -> None:
        """Write numbers at the indices of an axis; the last of several stays."""
        body, names = _Body([out]), [f"i{at}" for at in range(len(index.shape))]
        step, strides = out.strides[axis], list(out.strides)
        strides[axis] = 0
        at = f"int({body.read(index, names, index.strides)})"
        value = body.read(source, names, source.strides) if isinstance(source, Value) else _Number(source)
        line = f"{str(body.read(out, names, strides))[:-1]} + {at} * {step}] = {value}"
        self._add(body, _nested(index.shape, [line]), FLAGS)

    def reduce(self, out: Value, source: Value, axes: Sequence[int], kind: str) -> None:
        """Add a reduction over axes. out: without the axes.   kind: "sum", "mean", "amax" or "amin"."""
        if out.form == "complex":
            self.reduce(out.part(0), source.part(0), axes, kind)
            self.reduce(out.part(1), source.part(1), axes, kind)
            return
        outer = [axis for axis in range(len(source.shape)) if axis not in axes]
        inner = [axis for axis in range(len(source.shape)) if source.shape[axis] > 1 and source.strides[axis] == 1]
        if kind in ("sum", "mean") and inner and inner[0] not in axes:
            steps = iter(out.strides)
            strides = [0 if axis in axes else next(steps) for axis in range(len(source.shape))]
            total = out._replace(shape=source.shape, strides=tuple(strides))
            if self._sums_in_loop(out, total, [source], "{0} + {1}"):
                if kind == "mean":
                    self.elementwise(out, [out, float(prod(source.shape[axis] for axis in axes))], ["{0} / {1}"])
                return
        axes = [axes[at] for at in _outer_first([[source.strides[axis] for axis in axes]])]
        sizes, (reading, target) = merged(
            [source.shape[axis] for axis in outer], [source.strides[axis] for axis in outer], out.strides
        )
        inner, (step,) = merged([source.shape[axis] for axis in axes], [source.strides[axis] for axis in axes])
        names, more = [f"i{axis}" for axis in range(len(sizes))], [f"j{axis}" for axis in range(len(inner))]
        body = _Body([out])
        count = 1
        for size in inner:
            count *= size
        item = str(body.read(source, [*names, *more], [*reading, *step]))
        written = str(body.read(out, names, target))
        first = str(body.read(source, names, reading))
        scale = f" / c({number(count)})" if kind == "mean" else ""
        if kind in ("sum", "mean"):
            rows = reading and reading[-1] == 1 and step and step[-1] != 1
            if rows:  # rows are added up: the loop over them is outer
                lines = [
                    *_nested(sizes, [f"{written} = c(0.0)"]),
                    *_nested(inner, _nested(sizes, [f"{written} += {item}"]), "j"),
                    *(_nested(sizes, [f"{written} = {written}{scale}"]) if scale else []),
                ]
            else:
                lines = _nested(
                    sizes,
                    ["total = c(0.0)", *_nested(inner, [f"total += {item}"], "j"), f"{written} = total{scale}"],
                )
            self._add(body, lines, SUMS)
            return
        sign = ">" if kind == "amax" else "<"
        test = f"    x = {item}", f"    best = x if (x {sign} best) | (x != x) else best"
        lines = _nested(
            sizes, [f"best = {first}", *_nested(inner, [t.strip() for t in test], "j"), f"{written} = best"]
        )
        self._add(body, lines, FLAGS)

    def product(self, out: Value, a: Value, b: Value, bias: Value | None = None) -> None:
        """Add out = a b + bias, for a (..., n, k) and b (..., k, m)."""
        if out.form == "complex":
            raise Unsupported("a product of complex matrices")
        *groups, n, k = a.shape
        m = b.shape[-1]
        if k == 1:  # an outer product
            self.elementwise(
                out,
                [a, b, *([] if bias is None else [bias])],
                ["{0} * {1}" + ("" if bias is None else " + {2}")],
            )
            return
        if n == 1 and b.strides[-1] == 1 and bias is None:
            column = a._replace(shape=(*groups, k, 1), strides=(*a.strides[:-2], a.strides[-1], 0))
            if self._sums_in_loop(out, out.expanded(b.shape), [column, b], "{0} + {1} * {2}"):
                return
        one = not any(size > 1 for size in groups) and _adjacent(out, a)
        if one and b.strides[-2] == 1 and k * m >= LARGE and m >= MIN_COLUMNS:
            rows = out.strides[-2], a.strides[-2], b.strides[-1]
            pairs = ", ".join(f"p{at}, {row}" for at, row in enumerate(rows))
            self._call_kernel("times", [out, a, b], f"{pairs}, {n}, {m}, {k}")
            if bias is not None:
                self.elementwise(out, [out, bias], ["{0} + {1}"])
            return
        body = _Body([out])
        axes = [f"g{axis}" for axis in range(len(groups))]
        added = None if bias is None else bias.expanded(out.shape)
        start = "c(0.0)" if added is None else str(body.read(added, [*axes, "i", "j"], added.strides))
        factor = str(body.read(a, [*axes, "i", "l"], a.strides))
        other = str(body.read(b, [*axes, "l", "j"], b.strides))
        written = str(body.read(out, [*axes, "i", "j"], out.strides))
        if b.strides[-2] == 1 or m == 1:
            lines = [
                f"for i in range({n}):",
                f"    for j in range({m}):",
                f"        total = {start}",
                f"        for l in range({k}):",
                f"            total += {factor} * {other}",
                f"        {written} = total",
            ]
        else:
            lines = [
                f"for i in range({n}):",
                f"    for j in range({m}):",
                f"        {written} = {start}",
                f"    for l in range({k}):",
                f"        factor = {factor}",
                f"        for j in range({m}):",
                f"            {written} += factor * {other}",
            ]
        for axis, size in zip(reversed(axes), reversed(groups), strict=True):
            lines = [f"for {axis} in range({size}):", *(f"    {line}" for line in lines)]
        self._add(body, lines, SUMS)

    def _sums_in_loop(self, out: Value, total: Value, terms: Sequence[Value], expression: str) -> bool:
        """Add a sum to the loop that writes the last of what is summed, and return whether there is one.

        A matrix that is a state is then read and written once, where it would come from memory again for its product.
        Each number of the result is summed in order. Partial sums in vectors need a loop that writes nothing else: the
        compiler lets addresses decide whether other loops run in vectors, and bits may not depend on addresses.
        total: the result in the shape of the loop.   expression: of the total so far, {0}, and what is summed.
        """
        waiting = self._open
        if not any(terms[-1].memory in call.writes for group in waiting for call in group):
            return False
        args = [total, *(_constant(term.expanded(total.shape)) for term in terms)]
        self._open = [*waiting, [_Statement(out, [0.0], ["{0}"])]]
        if self._joins(_Statement(total, args, [expression], sums=True)):
            return True
        self._open = waiting
        return False

    def quantized(
        self, out: Value, x: Value, packed: Value, scale: Value, groups: Value | None, bias: Value | None
    ) -> None:
        """Add out = x Wᵀ + bias, for x (M, K); W as `ops.fused.quantized_linear` has it."""
        x, bias = self._rowwise(x), None if bias is None else self._rowwise(bias)
        views = [out, x, packed, scale, *(view for view in (groups, bias) if view is not None)]
        optional = [0 if view is None else f"address(p{views.index(view)})" for view in (groups, bias)]
        rows = f"p0, {out.strides[0]}, p1, {x.strides[0]}, p2, p3, {optional[0]}, {optional[1]}"
        self._call_kernel("times_quantized", views, f"{rows}, {x.shape[0]}, {out.shape[1]}, {x.shape[1]}")

    def _rowwise(self, value: Value) -> Value:
        """Return a value whose rows have adjacent numbers: itself, or a copy."""
        if value.strides[-1] == 1:
            return value
        strides = [1]
        for size in reversed(value.shape[1:]):
            strides.insert(0, strides[0] * size)
        copied = Value(Memory("", prod(value.shape), value.memory.kind), 0, value.shape, tuple(strides), "real")
        self.copy(copied, value)
        return copied

    def _call_kernel(self, name: str, views: Sequence[Value], arguments: str) -> None:
        """Add a call of another kernel, which several threads may run. The first view is written."""
        body = _Body([views[0]])
        body.views += [*views[1:], self._team]
        self.called.add(CALLS.index(name))
        self._add(body, [f"{name}(p{len(views)}, {arguments})"], FLAGS)

    def _add(self, body: "_Body", lines: Sequence[str], flags: str) -> None:
        writes = [view.memory for view in body.views[: body.written]]
        self._append(_Other(self._function(body, lines, flags), body.views, writes))

    def _function(self, body: "_Body", lines: Sequence[str], flags: str) -> str:
        """Return the name of the function with these lines."""
        text = "\n".join(f"    {line}" for line in lines)
        constants = sorted(set(re.findall(r"\bc\(([^()]*)\)", text)))
        named = {constant: f"c{at}" for at, constant in enumerate(constants)}
        text = re.sub(r"\bc\(([^()]*)\)", lambda match: named[match[1]], text)
        kind = "float64" if any(value.memory.kind == "float64" for value in body.views) else "float32"
        head = [f"    {name} = np.{kind}({constant})" for constant, name in named.items()]
        pointers = [f"p{at}" for at in range(len(body.views))]
        types = "".join(CODES[value.memory.kind] for value in body.views)
        source = "\n".join([f"({', '.join(pointers)}):  # {types}", "    separate()", *head, text, ""])
        return self.functions.setdefault(f"@helper(**{flags})\ndef NAME{source}", f"_loop{len(self.functions)}")

    # --- scratch memory

    def allocate(self) -> dict[str, int]:
        """Give memory without a name an offset in the scratch memory; what is read no more is used again.

        Return the numbers of each kind of scratch memory.
        """
        self._settle(len(self._open))
        for at, (function, _) in enumerate(self.calls):
            if not isinstance(function, str):
                self.calls[at] = self._write_together(function, at)
        first: dict[int, list[Memory]] = {}
        for at, (_, views) in enumerate(self.calls):
            for value in views:
                if not value.memory.name:
                    value.memory.name = f"scratch{value.memory.kind[-2:]}"
                    first.setdefault(at, []).append(value.memory)
        ending: dict[int, list[Memory]] = {}
        free: dict[tuple[str, int], list[int]] = {}
        sizes = self.scratch = {"float32": 0, "float64": 0}
        for at in range(len(self.calls)):
            for memory in first.get(at, []):
                key = memory.kind, -(-memory.size // 16) * 16  # whole cache lines
                if free.get(key):
                    memory.offset = free[key].pop()
                else:
                    memory.offset = sizes[memory.kind]
                    sizes[memory.kind] += key[1]
                ending.setdefault(memory.last, []).append(memory)
            for memory in ending.get(at, []):
                free.setdefault((memory.kind, -(-memory.size // 16) * 16), []).append(memory.offset)
        return sizes

    def source(self, kinds: Mapping[str, str], rows: int = 0, of_row: Mapping[str, int] | None = None) -> str:
        """Return the text of the kernel. kinds: of the memory of its pointers, by name.

        rows: how many a unit has, and of_row: the numbers of a row, by name. The last unit begins early if too few rows
        are left for it: some rows are then computed twice, from the same numbers. 0: there is one unit.
        """
        functions = [text.replace("NAME", name, 1) for text, name in self.functions.items()]
        pointers = []
        for name, kind in kinds.items():
            pointer = f"pointer(slots.{name}, np.{kind})"
            if rows and name.startswith("scratch"):
                pointer = f"at({pointer}, unit * {self.scratch[kind]})"
            elif rows and of_row and name in of_row:
                pointer = f"at({pointer}, row * {of_row[name]})"
            pointers.append(f"        {name} = {pointer}")
        if rows:
            pointers.insert(0, f"        row = min(unit * {rows}, slots.rows - {rows})")
        calls = [f"        {name}({', '.join(map(_address, views))})" for name, views in self.calls]
        return "\n\n".join([
            HEADER,
            *functions,
            "\n".join([
                f'@kernel("{" ".join([*kinds, *(["rows"] if rows else [])])}")',
                "def run(slots):",
                f"    for {'unit' if rows else '_'} in units(slots):",
                *pointers,
                *calls,
                "",
            ]),
        ])  # fmt: skip


@dataclass
class _Statement:
    """An elementwise loop: the result, the arguments in its shape, and the expressions of its parts.

    sums: numbers of the result are sums over indices; they are known after the loop.
    """

    out: Value
    args: list[Any]
    expressions: Sequence[str]
    sums: bool = False

    @property
    def views(self) -> list[Value]:
        return [self.out, *(arg for arg in self.args if isinstance(arg, Value))]

    @property
    def writes(self) -> list[Memory]:
        return [self.out.memory]

    def fits(self, earlier: "_Statement | _Other") -> bool:
        """Whether it may run index by index with an earlier one: neither touches what the other writes elsewhere."""
        if isinstance(earlier, _Other) or _sizes(self.out) != _sizes(earlier.out):
            return False
        for one, other in ((self, earlier), (earlier, self)):
            if one.sums and any(view.memory is one.out.memory for view in other.views):
                return False
        pairs = [(earlier.out, view) for view in self.views] + [(self.out, view) for view in earlier.views]
        return all(one.memory is not other.memory or _apart_or_same(one, other) for one, other in pairs)


@dataclass
class _Other:
    """Another call: the function, what it gets pointers to, and the memory that it writes."""

    function: str
    views: list[Value]
    writes: list[Memory]


def _depend(some: Sequence[_Statement | _Other], others: Sequence[_Statement | _Other]) -> bool:
    """Whether any of some calls writes what any of the others reads or writes, or reads what it writes."""
    return any(
        view.memory in one.writes
        for a in some
        for b in others
        for one, other in ((a, b), (b, a))
        for view in other.views
    )


def _same(one: Value, other: Value) -> bool:
    """Whether two views of one memory are the same number at every index, besides axes of size 1."""
    steps = [
        [stride for size, stride in zip(value.shape, value.strides, strict=True) if size != 1] for value in (one, other)
    ]
    return steps[0] == steps[1] and one.offset == other.offset and one.form != "complex"


def _adjacent(*values: Value) -> bool:
    """Whether the numbers of a row are adjacent in all of these, which are float32."""
    return all(value.strides[-1] == 1 and value.memory.kind == "float32" for value in values)


def _sizes(value: Value) -> list[int]:
    return [size for size in value.shape if size != 1]


def _apart_or_same(one: Value, other: Value) -> bool:
    """Whether, at every index, two views of one memory are the same number, or parts of the same complex number."""
    steps = [
        [stride for size, stride in zip(value.shape, value.strides, strict=True) if size != 1] for value in (one, other)
    ]
    parts = one.offset != other.offset or one.form != other.form
    even = all(stride % 2 == 0 for stride in steps[0])
    return steps[0] == steps[1] and (not parts or (even and one.offset // 2 == other.offset // 2))


def _constant(arg: Operand) -> Operand:
    """Return the number that all of a value is, if it is known."""
    return arg.memory.fill if isinstance(arg, Value) and arg.memory.fill is not None else arg


def _wide(view: Value, shape: Sequence[int]) -> list[int]:
    """Return the strides of a view for a shape that has the same sizes, besides axes of size 1."""
    strides = iter(stride for size, stride in zip(view.shape, view.strides, strict=True) if size != 1)
    return [0 if size == 1 else next(strides) for size in shape]


def _outer_first(strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the axes in the order of loops that go through memory in the smallest steps. strides: of each view."""
    return sorted(range(len(strides[0])), key=lambda axis: -sum(abs(one[axis]) for one in strides))


def _first(pair: tuple[Value, Sequence[int]], names: Sequence[str]) -> tuple[Value, Sequence[str], Sequence[int]]:
    return pair[0], names, pair[1]


class _Operand:
    """An argument of an expression, or what is written: the sources of its parts."""

    re: str
    im: str = "c(0.0)"

    def __str__(self) -> str:
        return self.re

    def __format__(self, spec: str) -> str:
        return f"({self.re} != c(0.0))" if spec == "truth" else self.re


class _Number(_Operand):
    """A number."""

    def __init__(self, value: complex | float) -> None:
        self.re, self.im = f"c({number(complex(value).real)})", f"c({number(complex(value).imag)})"


class _Variable(_Operand):
    """A local variable."""

    def __init__(self, name: str) -> None:
        self.re = name


class _Read(_Operand):
    """A number in memory."""

    def __init__(self, pointer: str, names: Sequence[str], strides: Sequence[int], offset: int, pair: bool) -> None:
        self.re = f"{pointer}[{place(names, strides, offset)}]"
        if pair:
            self.im = f"{pointer}[{place(names, strides, offset + 1)}]"


class _Body:
    """The pointers of a function: one for all views of each memory that is written, and one for every other view."""

    def __init__(self, written: Sequence[Value]) -> None:
        self.views: list[Value] = []
        self.local: dict[int, str] = {}  # variables in the place of memories
        for value in written:
            if value.memory.fill is not None:
                raise AssertionError("memory is written before it exists")
            if all(value.memory is not other.memory for other in self.views):
                self.views.append(value)
        self.written = len(self.views)

    def read(self, value: Value, names: Sequence[str], strides: Sequence[int]) -> Any:
        """Return a number of a view. strides: of the axes with these names."""
        if value.memory.fill is not None:
            return _Number(value.memory.fill)
        if id(value.memory) in self.local:
            return _Variable(self.local[id(value.memory)])
        pair = value.form == "complex"
        for at, other in enumerate(self.views):
            if other.memory is value.memory and (at < self.written or other.offset == value.offset):
                return _Read(f"p{at}", names, strides, value.offset - other.offset, pair)
        self.views.append(value)
        return _Read(f"p{len(self.views) - 1}", names, strides, 0, pair)


def _nested(sizes: Sequence[int], lines: Sequence[str], letter: str = "i") -> list[str]:
    """Return lines within loops."""
    lines = list(lines)
    for axis in reversed(range(len(sizes))):
        lines = [f"for {letter}{axis} in range({sizes[axis]}):", *(f"    {line}" for line in lines)]
    return lines


def _address(value: Value) -> str:
    offset = value.offset + value.memory.offset
    return f"at({value.memory.name}, {offset})" if offset else value.memory.name
