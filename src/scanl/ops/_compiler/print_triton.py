"""Write expressions of one number as Python for Triton, where they are of tiles."""

from collections.abc import Callable

from scanl.ops._compiler.expressions import LEVELS, Expression, Printer
from scanl.ops._compiler.rules import UnsupportedOperation

TRITON_FUNCTIONS = ("abs", "cos", "erf", "exp", "log", "sin", "sqrt")


class TritonPrinter(Printer):
    """tile: makes a constant tile, and returns its name.   helpers: functions of `_triton/_cells.py` that it calls."""

    def __init__(self, tile: Callable[[float], str]) -> None:
        self.tile, self.helpers = tile, set[str]()

    def constant(self, value: float) -> str:
        return self.tile(value)

    def call(self, name: str, *args: str) -> str:
        """Return a call of a helper."""
        self.helpers.add(name)
        return f"{name}({', '.join(args)})"

    def operation(self, name: str, args: tuple[Expression, ...]) -> str:
        match name:
            case "where":
                return f"tl.where({', '.join(map(self.text, args))})"
            case "not":
                return f"{self.text(args[0], 3)} == 0"
            case "**":
                raise UnsupportedOperation("a power other than -1, 0.5, 1, 2 and 3")
        if name in LEVELS:
            return super().operation(name, args)
        texts = map(self.text, args)
        return f"tl.{name}({', '.join(texts)})" if name in TRITON_FUNCTIONS else self.call(name, *texts)
