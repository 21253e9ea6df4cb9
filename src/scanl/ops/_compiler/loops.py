"""The form between a computation and its source in a language: functions of loops over numbers in memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scanl.ops._compiler.expressions import Constant, Expression, Load, Name, expression, unequal, where


@dataclass(frozen=True)
class Loop:
    """name: of the index.   bounds: the end of its range, which begins at 0, or both bounds."""

    name: str
    bounds: tuple[Expression, ...]
    body: tuple["Statement", ...]


@dataclass(frozen=True)
class Assign:
    """adds: add the value to what is there."""

    target: Load | Name
    value: Expression
    adds: bool = False


@dataclass(frozen=True)
class KernelCall:
    """A call of another kernel, by its name."""

    name: str
    args: tuple[Expression, ...]


Statement = Loop | Assign | KernelCall
LoopAxes = Sequence[tuple[str, Expression | int]]  # names of indices, and sizes


@dataclass(frozen=True)
class LoopFunction:
    """A function of pointers, which the compiler may take as not overlapping, so that it vectorises the loops.

    pointers: their names.   kinds: of their memory, for each; none where all have that of the kernel.
    sums: it may add many partial sums, in vectors.   sizes: its other arguments.
    """

    pointers: tuple[str, ...]
    kinds: tuple[str, ...]
    body: tuple[Statement, ...]
    sums: bool = False
    sizes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of its numbers; "" for that of the kernel."""
        return max([*set(map(number_kind, self.kinds)) & {"float32", "float64"}, ""])


def number_kind(kind: str) -> str:
    """Return the kind of numbers that memory of a kind is read as; "" for what is no number."""
    return {"int64": "float64", "int8": "float32", "team": ""}.get(kind, kind)


def axes_of(names: Sequence[str], sizes: Sequence[Expression | int]) -> LoopAxes:
    return list(zip(names, sizes, strict=True))


def nested(axes: LoopAxes, body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return statements within loops."""
    inner = tuple(body)
    for name, size in reversed(axes):
        inner = (Loop(name, (expression(size),), inner),)
    return inner


def reduction(
    kind: str,
    outer: LoopAxes,
    inner: LoopAxes,
    source: Expression,
    target: Load,
    count: Expression | float,
    *,
    along_rows: bool,
) -> tuple[Statement, ...]:
    """Return the loops of a reduction over the inner axes.

    kind: "sum", "mean", "amax", "amin", or "cumsum", whose target has the inner axis, too.   source: what is read.
    count: the numbers of a mean.   along_rows: add rows one by one, so that the compiler's vectors run along a row,
    which the last outer axis is.
    """
    total, one = Name("total"), Name("x")
    if kind in ("sum", "mean") and along_rows:
        rows, row = outer[:-1], outer[-1:]
        lines = nested(row, [Assign(target, Constant(0.0))])
        lines += nested([*inner, *row], [Assign(target, source, adds=True)])
        lines += nested(row, [Assign(target, target / count)]) if kind == "mean" else ()
        return nested(rows, lines)
    better = {"amax": one > total, "amin": one < total}.get(kind)
    start = {"amax": -math.inf, "amin": math.inf}.get(kind, 0.0)
    step = [Assign(total, source, adds=True)]
    if better is not None:
        step = [Assign(one, source), Assign(total, where(better | unequal(one, one), one, total))]
    result = Assign(target, total / count if kind == "mean" else total)
    running = kind == "cumsum"
    loops = nested(inner, [*step, result] if running else step)
    return nested(outer, [Assign(total, Constant(start)), *loops, *([] if running else [result])])


def parts(body: Sequence[Statement]) -> Iterator[Expression]:
    """Yield all expressions of some statements, and all that they are made of."""
    for statement in body:
        match statement:
            case Loop(_, values, inner):
                yield from parts(inner)
            case Assign(target, value):
                values = target, value
            case KernelCall(_, values):
                pass
        for value in values:
            yield from value.parts()
