"""The elementary functions of our own in C99, written from the Python that numba compiles.

A function is a row of assignments and a result. C has the same operations in the same order, so it has the same bits
where a compiler neither contracts a product with a sum nor changes their order.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from scanl.ops._cpu._elementary import FUNCTIONS

FLOAT, WHOLE, TRUTH = "float", "int64_t", "int"  # numba adds whole numbers of 32 bits in 64, and so does C here
BITS = """\
union bits_of_one {
    float number;
    int32_t bits;
};

static int64_t bits_of_float(float number)
{
    union bits_of_one one;
    one.number = number;
    return one.bits;
}

static float float_of_bits(int64_t bits)
{
    union bits_of_one one;
    one.bits = (int32_t)(uint32_t)bits;
    return one.number;
}"""
CALLS = {"float_of_bits": FLOAT, "bits_of_float": WHOLE, "float32": FLOAT, "int32": WHOLE, "floor": FLOAT, "abs": FLOAT}
NAMES = {"float32": f"({FLOAT})", "int32": f"({WHOLE})", "floor": "floorf", "abs": "fabsf"}  # others have their own
SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&",
    ast.BitOr: "|", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.USub: "-",
}  # fmt: skip


class CText(NamedTuple):
    """An expression in C, and its type."""

    text: str
    type: str


def definitions(names: Iterable[str]) -> Iterator[str]:
    """Yield the definitions of functions of float, and of what they call. The one of `exp` is `own_exp32`."""
    yield BITS
    made: dict[str, str] = {}
    for name in sorted(names):
        _define(FUNCTIONS[name].single, made)
    yield from made.values()


def _define(function: Any, made: dict[str, str]) -> str:
    """Add the definition of a function of one number, after those that it calls. Return its name."""
    name = f"own{function.py_func.__name__}"
    if name not in made:
        text = _FunctionWriter(function.py_func, made).text(name)
        made[name] = text
    return name


class _FunctionWriter:
    """Writes one function. made: the definitions so far, to which it adds those that are called."""

    def __init__(self, function: Callable[..., Any], made: dict[str, str]) -> None:
        (self._tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        self._names = {**function.__globals__, "float32": np.float32, "int32": int}
        self._made, self._types = made, dict[str, str]()

    def text(self, name: str) -> str:
        tree = self._tree
        assert isinstance(tree, ast.FunctionDef)
        arguments = [argument.arg for argument in tree.args.args]
        self._types = dict.fromkeys(arguments, FLOAT)
        lines = []
        for statement in tree.body:
            match statement:
                case ast.Expr(ast.Constant()):  # what is said about it
                    continue
                case ast.Assign([ast.Name(target)], value):
                    written = self._value(value)
                    new = target not in self._types
                    assert self._types.setdefault(target, written.type) == written.type
                    lines.append(f"{f'{written.type} ' if new else ''}{target} = {written.text};")
                case ast.Return(ast.expr() as value):
                    lines.append(f"return {self._value(value).text};")
                case _:
                    raise AssertionError(f"C has no {ast.unparse(statement)}")
        body = "\n".join("    " + line for line in lines)
        return f"static {FLOAT} {name}({', '.join(f'{FLOAT} {each}' for each in arguments)})\n{{\n{body}\n}}"

    def _value(self, node: ast.expr) -> CText:
        if not any(isinstance(part, ast.Name) and part.id in self._types for part in ast.walk(node)):
            return _constant(eval(compile(ast.Expression(node), "", "eval"), self._names))
        match node:
            case ast.Name(name):
                return CText(name, self._types[name])
            case ast.UnaryOp(sign, operand):
                value = self._value(operand)
                return CText(f"({SIGNS[type(sign)]}{value.text})", value.type)
            case ast.BinOp(one, sign, other):
                return self._pair(one, sign, other)
            case ast.Compare(one, [sign], [other]):
                return CText(self._pair(one, sign, other).text, TRUTH)
            case ast.IfExp(truth, one, other):
                return self._choice(self._value(truth).text, self._value(one), self._value(other))
            case ast.Call(ast.Name("min" | "max" as name), [one, other]):
                first, second = self._value(one), self._value(other)
                sign = "<" if name == "min" else ">"
                return self._choice(f"{second.text} {sign} {first.text}", second, first)  # as numba chooses beside NaN
            case ast.Call(ast.Name(name) | ast.Attribute(_, name), [argument]):
                return self._call(name, self._value(argument).text)
        raise AssertionError(f"C has no {ast.unparse(node)}")

    def _pair(self, one: ast.expr, sign: ast.AST, other: ast.expr) -> CText:
        first, second = self._value(one), self._value(other)
        kind = FLOAT if FLOAT in (first.type, second.type) else first.type
        return CText(f"({first.text} {SIGNS[type(sign)]} {second.text})", kind)

    def _choice(self, truth: str, one: CText, other: CText) -> CText:
        assert one.type == other.type
        return CText(f"({truth} ? {one.text} : {other.text})", one.type)

    def _call(self, name: str, argument: str) -> CText:
        if name in CALLS:
            return CText(f"{NAMES.get(name, name)}({argument})", CALLS[name])
        called = self._names[name]
        return CText(f"{_define(getattr(called, 'single', called), self._made)}({argument})", FLOAT)


def _constant(value: Any) -> CText:
    if isinstance(value, np.floating):
        assert value.dtype == np.float32, value
        if not np.isfinite(value):
            return CText("NAN" if value != value else "INFINITY" if value > 0 else "(-INFINITY)", FLOAT)
        text = f"{value:.8e}f"
        return CText(f"({text})" if value < 0 else text, FLOAT)
    return CText(str(int(value)), WHOLE)
