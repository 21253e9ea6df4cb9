"""The loops of a kernel, in order: which of them become one, and where their results are.

Each loop is a function of pointers to views of memory. Functions of the same loops are one function.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from scanl.ops._compiler import print_llvm
from scanl.ops._compiler.expressions import (
    Constant,
    Expression,
    Load,
    Name,
    Operation,
    as_number,
    equal,
    expression,
    place,
    unequal,
    where,
)
from scanl.ops._compiler.loops import (
    Assign,
    KernelCall,
    LoopFunction,
    Statement,
    axes_of,
    nested,
    number_kind,
    reduction,
)
from scanl.ops._compiler.rules import Rule, UnsupportedOperation, same
from scanl.ops._compiler.views import Memory, Operand, View, merged

MIN_WEIGHT_NUMBERS = 1 << 10  # numbers of a weight: a product by it is a call of another kernel
MIN_COLUMNS = 8  # its least columns: COLUMNS of rows_by_weight.py at most, which imports numba
WHOLE_COLUMNS = 16  # a matrix of whole vectors of columns: BYTES of micro_kernel.py
MIN_ROWS = 4  # rows for which small products are calls
MAX_GROUPS = 16  # pairs of matrices, each of which is a call
# Kernels that a kernel calls, in their order in `in_team.py`; before them are those of the kinds of weights.
CALLEES = ("times", "times_quantized", "times_rows")
WEIGHTS = ("float32", "int8", "int4")
FIRST_CALLEE = 2 + len(WEIGHTS)  # its place in what `team` points to
MAX_SHORT_ROW = 64  # numbers: the compiler would sum several shorter rows at once, and gather numbers of each
MAX_LOOPS = 12  # elementwise loops that become one
MAX_WAITING_CALLS = 32  # calls that a later one may still be put among
PairRule = Callable[..., tuple[Expression, ...]]  # of pairs, to the parts of the result


class Schedule:
    """The functions of a kernel, the calls of them in order, and the scratch memory.

    portable: whether the bits are those of every machine. Products by weights of float32 are then loops of ours.
    """

    def __init__(self, portable: bool = False) -> None:
        self._portable = portable
        self.functions: dict[LoopFunction, str] = {}  # names
        self.calls: list[tuple[Any, list[View]]] = []  # the function, and what it gets pointers to
        self.scratch: dict[str, int] = {}  # numbers of the scratch memory, by kind
        self.called = set[str]()  # kernels, and kinds of weights whose kernels they call
        size = FIRST_CALLEE + len(CALLEES)
        self._team = View(Memory("team", size, "team"), 0, (size,), (1,), "real")
        self._open: list[list[_Statement | _Other]] = []  # the last calls; elementwise loops of a list become one

    def elementwise(self, out: View, args: Sequence[Operand], rule: Rule) -> None:
        """Add a loop. rule: of real numbers."""
        self.pairwise(out, args, _of_reals(rule))

    def pairwise(self, out: View, args: Sequence[Operand], rule: PairRule) -> None:
        """Add a loop. rule: of numbers that may be complex, and a result that may be."""
        if 0 in out.shape:
            return
        known = [_constant(arg) for arg in args]
        args = [arg.expanded(out.shape) if isinstance(arg, View) else arg for arg in known]
        statement = _Statement(out, args, rule)
        if not self._joins(statement):
            self._append(statement)

    def _append(self, call: "_Statement | _Other") -> None:
        self._open.append([call])
        self._settle(max(0, len(self._open) - MAX_WAITING_CALLS))

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

    def _write_together(self, statements: Sequence["_Statement"], at: int) -> tuple[str, list[View]]:
        """Make a function of the loops that become one, which are call number `at`.

        A number that is written and read in this loop alone needs no memory: it is a local variable.
        """
        views = [view for statement in statements for view in statement.views]
        local: dict[int, str] = {}
        one_kind = (
            len({number_kind(view.memory.kind) for view in views} - {""}) == 1
        )  # else a conversion would not round
        for number, statement in enumerate(statements if one_kind else ()):
            memory, first = statement.out.memory, statement.out
            alone = not memory.name and memory.first == memory.last == at and id(memory) not in local
            alike = [view for view in views if view.memory is memory]
            reads = sum(view.memory is memory for view in statement.views) - 1
            if alone and not reads and all(_same(view, first) for view in alike):
                local[id(memory)] = f"t{number}"
        body = _Body([statement.out for statement in statements if id(statement.out.memory) not in local])
        body.local = local
        shape = statements[0].out.shape
        wide = [_wide(view, shape) for view in views]
        order = _outer_first(wide)
        sizes, steps = merged([shape[axis] for axis in order], *([one[axis] for axis in order] for one in wide))
        names = [f"i{axis}" for axis in range(len(sizes))]
        lines: list[Statement] = []
        strides = iter(steps)
        for number, statement in enumerate(statements):
            target: Any = body.read(statement.out, names, next(strides))
            sources = [
                body.read(arg, names, next(strides)) if isinstance(arg, View) else _parts(arg) for arg in statement.args
            ]
            values = statement.rule(*sources)
            if len(values) == 1:
                lines.append(Assign(target[0], values[0]))
            else:  # an argument may be the result's memory: both parts are computed before one is written
                parts = [Name(f"r{number}{letter}") for letter in "ab"]
                lines += [Assign(part, value) for part, value in zip(parts, values, strict=True)]
                lines += [Assign(at, part) for at, part in zip(target, parts, strict=True)]
        return self._function(body, nested(axes_of(names, sizes), lines)), body.views

    def written(self, value: View) -> View:
        """Return a value with memory, for what reads numbers of other indices, or writes."""
        memory, constant = value.memory, value.memory.fill
        if constant is not None:
            memory.fill = None
            self.copy(View(memory, 0, (memory.size,), (1,), "real"), constant)
        return value

    def copy(self, out: View, source: Operand) -> None:
        """Copy numbers; a real one becomes a complex one."""
        if out.form != "complex":
            self.elementwise(out, [source], same)
        else:
            self.pairwise(out, [source], lambda pair: pair)

    def gather(self, out: View, source: View, axis: int, index: View) -> None:
        """Copy the numbers of a source at the indices of an axis; the source has the other axes of the result."""
        body, names = _Body([out]), [f"i{at}" for at in range(len(out.shape))]
        step, strides = source.strides[axis], list(source.strides)
        strides[axis] = 0
        value = body.number(source, names, strides, (body.number(index, names, index.strides), step))
        made = Assign(body.number(out, names, out.strides), value)
        self._add(body, nested(axes_of(names, out.shape), [made]))

    def read_at(self, out: View, source: View, places: Sequence[tuple[View, int, int]]) -> None:
        """Copy the numbers of a source at indices. source: with strides of 0 for the axes of the indices.

        places: the indices, in the shape of the result, and the stride and size of the axis that they count along;
        a negative one counts from its end.
        """
        if out.form == "complex":
            raise UnsupportedOperation("complex numbers at indices")
        body, names = _Body([out]), [f"i{at}" for at in range(len(out.shape))]
        number = body.number(source, names, source.strides)
        for index, step, size in places:
            at = body.number(index, names, index.strides)
            from_start = Operation("int", where(at < 0.0, at + float(size), at))
            number = Load(number.pointer, number.index + from_start * step)
        self._add(body, nested(axes_of(names, out.shape), [Assign(body.number(out, names, out.strides), number)]))

    def scatter(self, out: View, axis: int, index: View, source: Operand) -> None:
        """Write numbers at the indices of an axis; the last of several stays."""
        body, names = _Body([out]), [f"i{at}" for at in range(len(index.shape))]
        step, strides = out.strides[axis], list(out.strides)
        strides[axis] = 0
        at = body.number(index, names, index.strides), step
        value = body.number(source, names, source.strides) if isinstance(source, View) else _parts(source)[0]
        made = Assign(body.number(out, names, strides, at), value)
        self._add(body, nested(axes_of(names, index.shape), [made]))

    def reduce(self, out: View, source: View, axes: Sequence[int], kind: str) -> None:
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
            if self._sums_in_loop(out, total, [source], lambda x, y: x + y):
                if kind == "mean":
                    self.elementwise(out, [out, float(prod(source.shape[axis] for axis in axes))], lambda x, y: x / y)
                return
        axes = [axes[at] for at in _outer_first([[source.strides[axis] for axis in axes]])]
        sizes, (reading, target) = merged(
            [source.shape[axis] for axis in outer], [source.strides[axis] for axis in outer], out.strides
        )
        inner, (step,) = merged([source.shape[axis] for axis in axes], [source.strides[axis] for axis in axes])
        names, more = [f"i{axis}" for axis in range(len(sizes))], [f"j{axis}" for axis in range(len(inner))]
        body = _Body([out])
        item = body.number(source, [*names, *more], [*reading, *step])
        written = body.number(out, names, target)
        short = step == [1] and inner[0] <= MAX_SHORT_ROW and isinstance(item, Load)
        short = short and source.memory.kind == out.memory.kind == "float32"
        if kind in ("sum", "mean") and short and not self._portable:
            total = Operation("total", body.number(source, names, reading), inner[0])
            value = total / float(inner[0]) if kind == "mean" else total
            self._add(body, nested(axes_of(names, sizes), [Assign(written, value)]), sums=True)
            return
        # where a row of the result is one of the source, rows are added up
        along_rows = bool(reading) and reading[-1] == 1 and bool(step) and step[-1] != 1
        loops = axes_of(names, sizes), axes_of(more, inner)
        made = reduction(kind, *loops, item, written, float(prod(inner)), along_rows=along_rows)
        self._add(body, made, sums=kind in ("sum", "mean"))

    def count(self, out: View, start: float, step: float) -> None:
        """Write start, start + step, start + 2 step, ... to a vector."""
        body = _Body([out])
        number = Operation("real", Name("i0")) * float(step) + float(start)
        self._add(body, nested(axes_of(["i0"], out.shape), [Assign(body.number(out, ["i0"], out.strides), number)]))

    def place_of(self, out: View, source: View, axis: int, largest: bool) -> None:
        """Write the index of the first largest or smallest number along an axis, or of the first NaN."""
        body, names = _Body([out]), [f"i{at}" for at in range(len(source.shape))]
        outer = [at for at in range(len(source.shape)) if at != axis]
        x, best, place = Name("x"), Name("best"), Name("place")
        first = body.number(source, names, [0 if at == axis else step for at, step in enumerate(source.strides)])
        item = body.number(source, names, source.strides)
        better = (x > best if largest else x < best) | (unequal(x, x) & equal(best, best))
        step = [
            Assign(x, item),
            Assign(place, where(better, Operation("real", Name(names[axis])), place)),
            Assign(best, where(better, x, best)),
        ]
        inner = [Assign(best, first), Assign(place, Constant(0.0)), *nested([(names[axis], source.shape[axis])], step)]
        target = body.number(out, [names[at] for at in outer], out.strides)
        axes = axes_of([names[at] for at in outer], [source.shape[at] for at in outer])
        self._add(body, nested(axes, [*inner, Assign(target, place)]))

    def product(self, out: View, a: View, b: View, bias: View | None = None) -> None:
        """Add out = a b + bias, for a (..., n, k) and b (..., k, m)."""
        if out.form == "complex":
            raise UnsupportedOperation("a product of complex matrices")
        *groups, n, k = a.shape
        m = b.shape[-1]
        if k == 1:  # an outer product
            if bias is None:
                self.elementwise(out, [a, b], lambda x, y: x * y)
            else:
                self.elementwise(out, [a, b, bias], lambda x, y, z: x * y + z)
            return
        if n == 1 and b.strides[-1] == 1 and bias is None:
            column = a._replace(shape=(*groups, k, 1), strides=(*a.strides[:-2], a.strides[-1], 0))
            if self._sums_in_loop(out, out.expanded(b.shape), [column, b], lambda x, y, z: x + y * z):
                return
        if _adjacent(out, a) and not self._portable and self._called_product(out, a, b):
            if bias is not None:
                self.elementwise(out, [out, bias], lambda x, y: x + y)
            return
        body = _Body([out])
        axes = [f"g{axis}" for axis in range(len(groups))]
        added = None if bias is None else bias.expanded(out.shape)
        start = Constant(0.0) if added is None else body.number(added, [*axes, "i", "j"], added.strides)
        left = body.number(a, [*axes, "i", "l"], a.strides)
        right = body.number(b, [*axes, "l", "j"], b.strides)
        written = body.number(out, [*axes, "i", "j"], out.strides)
        total, factor = Name("total"), Name("factor")
        if b.strides[-2] == 1 or m == 1:
            adding = nested([("l", k)], [Assign(total, left * right, adds=True)])
            lines = nested([("i", n), ("j", m)], [Assign(total, start), *adding, Assign(written, total)])
        else:
            rows = nested([("j", m)], [Assign(written, factor * right, adds=True)])
            begun = nested([("j", m)], [Assign(written, start)])
            lines = nested([("i", n)], [*begun, *nested([("l", k)], [Assign(factor, left), *rows])])
        self._add(body, nested(axes_of(axes, groups), lines), sums=True)

    def _called_product(self, out: View, a: View, b: View) -> bool:
        """Add the call of another kernel for each pair of matrices, and return whether there is one for them."""
        *groups, n, k = a.shape
        m, count = b.shape[-1], prod(groups)
        few = count == 1 or (n >= MIN_ROWS and count <= MAX_GROUPS)
        if not few or k * m < MIN_WEIGHT_NUMBERS or b.memory.kind != "float32":
            return False
        if b.strides[-2] == 1 and m >= MIN_COLUMNS:
            name, strides = "times", [out.strides[-2], a.strides[-2], b.strides[-1]]
        elif b.strides[-2:] == (m, 1) and m % WHOLE_COLUMNS == 0 and n >= MIN_ROWS:
            name, strides = "times_rows", [out.strides[-2], a.strides[-2]]
        else:
            return False
        for at in range(count):
            views = out, a, b
            for size in reversed(groups):
                views = [view.at(-3, at % size, 1).without(-3) for view in views]
                at //= size
            places: list[Expression | int] = []
            for number, stride in enumerate(strides):
                places += [Name(f"p{number}"), stride]
            places += [Name("p2")] if len(strides) == 2 else []
            self._call_kernel(name, "float32", views, [*places, n, m, k])
        return True

    def _sums_in_loop(self, out: View, total: View, terms: Sequence[View], rule: Rule) -> bool:
        """Add a sum to the loop that writes the last of what is summed, and return whether there is one.

        A matrix that is a state is then read and written once, where it would come from memory again for its product.
        Each number of the result is summed in order. Partial sums in vectors need a loop that writes nothing else: the
        compiler lets addresses decide whether other loops run in vectors, and bits may not depend on addresses.
        total: the result in the shape of the loop.   rule: of the total so far, and what is summed.
        """
        waiting = self._open
        loops = [call.views[0].shape for group in waiting for call in group if terms[-1].memory in call.writes]
        if not loops:
            return False
        read = [_constant(term.expanded(total.shape)) for term in terms]
        args = [arg.divided(loops[-1]) if isinstance(arg, View) else arg for arg in (total, *read)]
        self._open = [*waiting, [_Statement(out, [0.0], lambda zero: (zero.re,))]]
        if self._joins(_Statement(total.divided(loops[-1]), args, _of_reals(rule), sums=True)):
            return True
        self._open = waiting
        return False

    def quantized(self, out: View, x: View, packed: View, scale: View, groups: View | None, bias: View | None) -> None:
        """Add out = x Wᵀ + bias, for x (M, K); W as `products.quantized_linear` has it."""
        x, bias = self._rowwise(x), None if bias is None else self._rowwise(bias)
        views = [out, x, packed, scale, *(view for view in (groups, bias) if view is not None)]
        optional = [
            0 if view is None else Operation("address", Name(f"p{views.index(view)}")) for view in (groups, bias)
        ]
        rows = [Name("p0"), out.strides[0], Name("p1"), x.strides[0], Name("p2"), Name("p3")]
        sizes = [x.shape[0], out.shape[1], x.shape[1]]
        self._call_kernel("times_quantized", "int8" if groups is None else "int4", views, [*rows, *optional, *sizes])

    def _rowwise(self, value: View) -> View:
        """Return a value whose rows have adjacent numbers: itself, or a copy."""
        if value.strides[-1] == 1:
            return value
        strides = [1]
        for size in reversed(value.shape[1:]):
            strides.insert(0, strides[0] * size)
        copied = View(Memory("", prod(value.shape), value.memory.kind), 0, value.shape, tuple(strides), "real")
        self.copy(copied, value)
        return copied

    def _call_kernel(self, name: str, weight: str, views: Sequence[View], args: Sequence[Expression | int]) -> None:
        """Add a call of the kernel for a kind of weight, which several threads may run. The first view is written."""
        body = _Body([views[0]])
        body.views += [*views[1:], self._team]
        self.called |= {name, weight}
        self._add(body, [KernelCall(name, (Name(f"p{len(views)}"), *map(expression, args)))])

    def _add(self, body: "_Body", statements: Sequence[Statement], *, sums: bool = False) -> None:
        writes = [view.memory for view in body.views[: body.written]]
        self._append(_Other(self._function(body, statements, sums=sums), body.views, writes))

    def _function(self, body: "_Body", statements: Sequence[Statement], *, sums: bool = False) -> str:
        """Return the name of the function with these statements."""
        pointers = tuple(f"p{at}" for at in range(len(body.views)))
        function = LoopFunction(pointers, tuple(view.memory.kind for view in body.views), tuple(statements), sums)
        return self.functions.setdefault(function, f"_loop{len(self.functions)}")

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

    def source(
        self,
        kinds: Mapping[str, str],
        rows: int = 0,
        of_row: Mapping[str, int] | None = None,
    ) -> print_llvm.KernelSource:
        """Return the text of the kernel. kinds: of the memory of its pointers, by name.

        rows: how many a unit has, and of_row: the numbers of a row, by name. The last unit begins early if too few rows
        are left for it: some rows are then computed twice, from the same numbers. 0: there is one unit.
        """
        places = [
            (name, [(value.memory.name, value.offset + value.memory.offset) for value in views])
            for name, views in self.calls
        ]
        callees = {name: FIRST_CALLEE + at for at, name in enumerate(CALLEES)}
        scratch = {f"scratch{kind[-2:]}": size for kind, size in self.scratch.items()} if rows else {}
        return print_llvm.source(
            self.functions, places, callees, kinds, rows, {**(of_row or {}), **scratch}, self._portable
        )


class _Call:
    """What a kernel does at a time: the views that it touches, and the memory that it writes."""

    views: list[View]
    writes: list[Memory]

    @functools.cached_property
    def touched(self) -> frozenset[Memory]:
        return frozenset(view.memory for view in self.views)

    @functools.cached_property
    def written(self) -> frozenset[Memory]:
        return frozenset(self.writes)


@dataclass
class _Statement(_Call):
    """An elementwise loop: the result, the arguments in its shape, and the rule.

    sums: numbers of the result are sums over indices; they are known after the loop.
    """

    out: View
    args: list[Any]
    rule: PairRule
    sums: bool = False

    @functools.cached_property
    def views(self) -> list[View]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [self.out, *(arg for arg in self.args if isinstance(arg, View))]

    @functools.cached_property
    def writes(self) -> list[Memory]:  # pyright: ignore[reportIncompatibleVariableOverride]
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
class _Other(_Call):
    """Another call: the function, what it gets pointers to, and the memory that it writes."""

    function: str
    views: list[View]
    writes: list[Memory]


def _depend(some: Sequence[_Statement | _Other], others: Sequence[_Statement | _Other]) -> bool:
    """Whether any of some calls writes what any of the others reads or writes, or reads what it writes."""
    return any(not (a.written.isdisjoint(b.touched) and b.written.isdisjoint(a.touched)) for a in some for b in others)


def _same(one: View, other: View) -> bool:
    """Whether two views of one memory are the same number at every index, besides axes of size 1."""
    return _steps(one) == _steps(other) and one.offset == other.offset and one.form != "complex"


def _adjacent(*values: View) -> bool:
    """Whether the numbers of a row are adjacent in all of these, which are float32."""
    return all(value.strides[-1] == 1 and value.memory.kind == "float32" for value in values)


def _sizes(value: View) -> list[int]:
    return [size for size in value.shape if size != 1]


def _steps(value: View) -> list[int]:
    return [stride for size, stride in zip(value.shape, value.strides, strict=True) if size != 1]


def _apart_or_same(one: View, other: View) -> bool:
    """Whether, at every index, two views of one memory are the same number, or parts of the same complex number."""
    parts = one.offset != other.offset or one.form != other.form
    even = all(stride % 2 == 0 for stride in _steps(one))
    return _steps(one) == _steps(other) and (not parts or (even and one.offset // 2 == other.offset // 2))


def _constant(arg: Operand) -> Operand:
    """Return the number that all of a value is, if it is known."""
    return arg.memory.fill if isinstance(arg, View) and arg.memory.fill is not None else arg


def _wide(view: View, shape: Sequence[int]) -> list[int]:
    """Return the strides of a view for a shape that has the same sizes, besides axes of size 1."""
    strides = iter(_steps(view))
    return [0 if size == 1 else next(strides) for size in shape]


def _outer_first(strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the axes in the order of loops that go through memory in the smallest steps. strides: of each view."""
    return sorted(range(len(strides[0])), key=lambda axis: -sum(abs(one[axis]) for one in strides))


def _of_reals(rule: Rule) -> PairRule:
    return lambda *pairs: (as_number(rule(*(pair.re for pair in pairs))),)


class ComplexPair(NamedTuple):
    """The real and the imaginary part of a number."""

    re: Expression
    im: Expression


def _parts(value: complex) -> ComplexPair:
    """Return the constants of a number."""
    return ComplexPair(Constant(complex(value).real), Constant(complex(value).imag))


class _Body:
    """The pointers of a function: one for all views of each memory that is written, and one for every other view."""

    def __init__(self, written: Sequence[View]) -> None:
        self.views: list[View] = []
        self.local: dict[int, str] = {}  # variables in the place of memories
        for value in written:
            if value.memory.fill is not None:
                raise AssertionError("memory is written before it exists")
            if all(value.memory is not other.memory for other in self.views):
                self.views.append(value)
        self.written = len(self.views)

    def read(
        self, value: View, names: Sequence[str], strides: Sequence[int], beside: tuple[Expression, int] | None = None
    ) -> ComplexPair:
        """Return a number of a view. strides: of the axes with these names.

        beside: a number in memory that is another index, and its stride.
        """
        if value.memory.fill is not None:
            return _parts(value.memory.fill)
        if id(value.memory) in self.local:
            return ComplexPair(Name(self.local[id(value.memory)]), Constant(0.0))
        offset = 0
        for at, other in enumerate(self.views):
            if other.memory is value.memory and (at < self.written or other.offset == value.offset):
                offset = value.offset - other.offset
                break
        else:
            at = len(self.views)
            self.views.append(value)
        parts = [place(names, strides, offset + part) for part in range(1 + (value.form == "complex"))]
        if beside is not None:
            parts = [part + Operation("int", beside[0]) * beside[1] for part in parts]
        loads = [Load(f"p{at}", part) for part in parts]
        return ComplexPair(loads[0], loads[1] if len(loads) == 2 else Constant(0.0))

    def number(self, *args: Any) -> Any:
        """Return a real number of a view, as `read` has it."""
        return self.read(*args)[0]
