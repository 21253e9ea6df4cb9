"""Write the form of `loops.py` as Python for numba."""

from collections.abc import Iterator, Sequence

from scanl.ops._compiler.expressions import Expression, Printer
from scanl.ops._compiler.loops import Assign, KernelCall, Loop, LoopFunction, Statement

_HEADER = '''"""{title}"""

import math

import numpy as np

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._sigmoid import log_sigmoid, sigmoid, tanh
from scanl.ops._cpu._slots import units
{more}

erf, cos, sin, sqrt, atan2 = math.erf, math.cos, math.sin, math.sqrt, math.atan2
inf, nan = math.inf, math.nan
_FLAGS = {{"error_model": "numpy", "fastmath": {{"contract", "nsz"}}}}
_SUM = {{"error_model": "numpy", "fastmath": {{"contract", "nsz", "reassoc"}}}}  # many partial sums, in vectors
'''


class NumbaPrinter(Printer):
    """dtype: the source of the element type.   constants: the names of its constants, by their source."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.constants: dict[str, str] = {}

    def constant(self, value: float) -> str:
        return self.constants.setdefault(repr(value), f"c{len(self.constants)}")

    def operation(self, name: str, args: tuple[Expression, ...]) -> str:
        return f"{self.dtype}({self.text(args[0])})" if name == "real" else super().operation(name, args)

    def lines(self, body: Sequence[Statement], indent: str) -> Iterator[str]:
        for statement in body:
            match statement:
                case Loop(name, bounds, inner):
                    yield f"{indent}for {name} in range({', '.join(map(self.text, bounds))}):"
                    yield from self.lines(inner, indent + "    ")
                case Assign(target, value, adds):
                    yield f"{indent}{self.text(target)} {'+=' if adds else '='} {self.text(value)}"
                case KernelCall(name, args):
                    yield f"{indent}{name}({', '.join(map(self.text, args))})"


def header(title: str, more: str) -> str:
    """Return the beginning of a module. more: lines of what it needs beside what every kernel does."""
    return _HEADER.format(title=title, more=more)


def function(name: str, made: LoopFunction) -> str:
    """Return the source of a function."""
    printer = NumbaPrinter(f"np.{made.kind}" if made.kind else "dtype.type")
    lines = list(printer.lines(made.body, "    "))
    return "\n".join([
        f"@helper(**{'_SUM' if made.sums else '_FLAGS'})",
        f"def {name}({', '.join([*made.pointers, *made.sizes])}):",
        "    separate()",
        *[f"    {constant} = {printer.dtype}({value})" for value, constant in printer.constants.items()],
        *lines,
        "",
    ])  # fmt: skip
