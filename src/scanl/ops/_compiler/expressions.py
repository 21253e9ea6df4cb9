"""Expressions of one number, as values. The rules make them, and a printer writes them for each language.

A constant that is whole, an `int`, is part of an index or a size. Other constants have the element type of the kernel.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# How tightly operators bind in Python; their operands are in parentheses where they bind less.
LEVELS = {"where": 0, "not": 1, "<": 2, "<=": 2, ">": 2, ">=": 2, "==": 2, "!=": 2, "|": 3, "&": 4,
          "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "neg": 7, "**": 8}  # fmt: skip
TRUTHS = {"not", "<", "<=", ">", ">=", "==", "!=", "|", "&"}  # operators whose result is a truth
CONDITIONS = {"where": 1, "not": 1, "|": 2, "&": 2}  # operators whose first operands are truths, and how many


_WHOLE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "neg": operator.neg}


def _operator(sign: str, *, turned: bool = False) -> Callable[[Any, "Expression | float"], "Operation"]:
    """Return the method of an operator; turned: of that whose first operand is another value."""
    return lambda self, other: Operation(sign, *((other, self) if turned else (self, other)))


class Expression:
    """Python's operators make larger expressions, but for `==` and `!=`: these are `equal` and `unequal`.

    A truth counts as 0 or 1 where an operator takes numbers. A number is a truth, where it takes one, if it is not 0.
    """

    truth: bool = False  # whether it is a truth, not a number

    def parts(self) -> Iterator["Expression"]:
        """Yield the expression, and all that it is made of."""
        yield self
        members = self.args if isinstance(self, Operation) else (self.index,) if isinstance(self, Load) else ()
        for member in members:
            yield from member.parts()

    def __str__(self) -> str:
        return Printer().text(self)

    __add__, __radd__ = _operator("+"), _operator("+", turned=True)
    __sub__, __rsub__ = _operator("-"), _operator("-", turned=True)
    __mul__, __rmul__ = _operator("*"), _operator("*", turned=True)
    __truediv__, __rtruediv__ = _operator("/"), _operator("/", turned=True)
    __floordiv__, __pow__ = _operator("//"), _operator("**")
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("<", "<=", ">", ">="))
    __and__, __or__ = _operator("&"), _operator("|")

    def __neg__(self) -> "Operation":
        return Operation("neg", self)

    def __invert__(self) -> "Operation":
        return Operation("not", self)


@dataclass(frozen=True, eq=False)
class Constant(Expression):
    value: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self.value) == repr(other.value)  # 0 is neither 0.0 nor -0.0

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True)
class Name(Expression):
    """A variable, an index, the size of an axis, or a pointer."""

    name: str
    truth: bool = False


@dataclass(frozen=True)
class Load(Expression):
    """A number in memory. pointer: its name."""

    pointer: str
    index: Expression


@dataclass(frozen=True, init=False)
class Operation(Expression):
    """An operator, by its sign in `LEVELS`, or a function, by its name."""

    name: str
    args: tuple[Expression, ...]
    truth: bool

    def __init__(self, name: str, *args: "Expression | float") -> None:
        count, values = CONDITIONS.get(name, 0), tuple(map(expression, args))
        conditions, others = tuple(map(as_truth, values[:count])), values[count:]
        of_truths = name == "where" and all(value.truth for value in others)
        others = others if of_truths else tuple(map(as_number, others))
        vars(self).update(name=name, args=conditions + others, truth=of_truths or name in TRUTHS)


def expression(value: "Expression | float") -> Expression:
    """Return the constant that a number is; an expression is itself."""
    return value if isinstance(value, Expression) else Constant(value)


def equal(one: Expression, other: "Expression | float") -> Operation:
    return Operation("==", one, other)


def unequal(one: Expression, other: "Expression | float") -> Operation:
    return Operation("!=", one, other)


def where(truth: Expression, one: "Expression | float", other: "Expression | float") -> Operation:
    return Operation("where", truth, one, other)


def as_number(value: Expression) -> Expression:
    """Return the number that a truth is in memory; a number is itself."""
    return where(value, 1.0, 0.0) if value.truth else value


def as_truth(value: Expression) -> Expression:
    return value if value.truth else unequal(value, 0.0)


def value(size: Expression, names: Mapping[str, Any]) -> Any:
    """Return the number that an expression of whole numbers is. names: the numbers that names stand for."""
    match size:
        case Constant(number):
            return number
        case Name(name):
            return names[name]
        case Operation(name, args):
            return _WHOLE[name](*(value(arg, names) for arg in args))
    raise AssertionError(f"{size!r} is no size")


def place(names: Sequence[str], strides: Sequence["Expression | int"], offset: int = 0) -> Expression:
    """Return an index into memory: the sum of the named indices times their strides, and an offset."""
    pairs = [(Name(name), expression(stride)) for name, stride in zip(names, strides, strict=True)]
    terms = [name if by == Constant(1) else name * by for name, by in pairs if by != Constant(0)]
    terms += [Constant(offset)] if offset or not terms else []
    return functools.reduce(operator.add, terms)


class Printer:
    """Writes expressions as Python. The printer of a language has its constants, and what it writes in another way."""

    def text(self, expression: Expression, around: int = 0) -> str:
        """Return the text. around: the level of the operator that the expression is an operand of."""
        match expression:
            case Constant(value):
                return repr(value) if isinstance(value, int) else self.constant(value)
            case Name(name):
                return name
            case Load(pointer, index):
                return f"{pointer}[{self.text(index)}]"
            case Operation(name, args):
                text = self.operation(name, args)
                return f"({text})" if self.loose(name, around) else text
        raise AssertionError(f"no text for {expression!r}")

    def loose(self, name: str, around: int) -> bool:
        """Whether an operation is in parentheses there."""
        return name == "where" or LEVELS.get(name, 9) < around

    def constant(self, value: float) -> str:
        return repr(value)

    def operation(self, name: str, args: tuple[Expression, ...]) -> str:
        level = LEVELS.get(name)
        if level is None:
            return f"{name}({', '.join(map(self.text, args))})"
        if name == "where":
            truth, one, other = args
            return f"{self.text(one, 1)} if {self.text(truth, 1)} else {self.text(other)}"
        if len(args) == 1:
            return f"{'-' if name == 'neg' else 'not '}{self.text(args[0], level)}"
        return f"{self.text(args[0], level + (level == 2))} {name} {self.text(args[1], level + 1)}"
