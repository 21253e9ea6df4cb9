"""Write the form of `loops.py` as functions in C99."""

import ctypes
from collections.abc import Collection, Iterable, Iterator, Sequence

from scanl.ops._compiler.expressions import LEVELS, Constant, Expression, Load, Name, Printer
from scanl.ops._compiler.loops import Assign, KernelCall, Loop, LoopFunction, Statement, number_kind
from scanl.ops._compiler.print_llvm import IEEE_FUNCTIONS, check_portable
from scanl.ops._compiler.rules import UnsupportedOperation
from scanl.ops.products.quantized_linear import LOWER_BITS, MIDDLE

# In C a state has no whole numbers. Memory of another kind is not in C: the other threads.
KINDS = {"float32": "float", "float64": "double", "int64": "double", "int8": "signed char"}
SUFFIXES = {"float": "f", "double": ""}  # of functions
FUNCTIONS = {"abs": "fabs", "**": "pow"}  # others have their names
SIGNS = {"not": "!", "neg": "-"}
HELPERS = {  # that math.h lacks: their arguments and bodies. S is the suffix of its functions
    "sigmoid": ("KIND x", "return x >= 0 ? 1 / (1 + expS(-x)) : expS(x) / (1 + expS(x));"),
    "log_sigmoid": ("KIND x", "return (x < 0 ? x : 0) - log1pS(expS(-fabsS(x)));"),
    "total": (
        "const KIND *x, int count",
        "KIND sum = 0;\n    for (int k = 0; k < count; k++) sum += x[k];\n    return sum;",
    ),
}
PRODUCT = """\
for (int row = 0; row < {rows}; row++) {{
    for (int column = 0; column < {columns}; column++) {{
        const {kind} *in = {x} + row * {x_row}, *w = {w} + column * {w_row};
        {kind} sums[8] = {{0}};
        for (int k = 0; k < {terms} / 8 * 8; k += 8) {{
            for (int j = 0; j < 8; j++) sums[j] += in[k + j] * w[k + j];
        }}
        for (int k = {terms} / 8 * 8; k < {terms}; k++) sums[k % 8] += in[k] * w[k];
        {y}[row * {y_row} + column] = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
    }}
}}"""  # what `times` computes
ROWS_PRODUCT = """\
for (int row = 0; row < {rows}; row++) {{
    for (int column = 0; column < {columns}; column++) {y}[row * {y_row} + column] = 0;
}}
for (int k = 0; k < {terms}; k++) {{
    for (int row = 0; row < {rows}; row++) {{
        {kind} *out = {y} + row * {y_row}, factor = {x}[row * {x_row} + k];
        for (int column = 0; column < {columns}; column++) out[column] += factor * {w}[k * {columns} + column];
    }}
}}"""  # what `times_rows` computes
# What `times_quantized` computes, as `products/rows_by_weight.py` does: sums of 32 bits for 512 terms hold them. The
# largest number is found by bits, in the order of which NaN is the largest. A sum with 1.5 * 2^23 has no bits below 1.
QUANTIZED_PRODUCT = """\
union {{ float number; int bits; }} u;
for (int row = 0; row < {rows}; row++) {{
    const float *in = {x} + row * {x_row};
    signed short numbers[{terms}];
    int peak = 0;
    for (int k = 0; k < {terms}; k++) {{
        u.number = in[k];
        peak = (u.bits & 0x7fffffff) > peak ? u.bits & 0x7fffffff : peak;
    }}
    u.bits = peak;
    float by = 32767 / u.number, factor = by < INFINITY ? u.number / 32767 : 0;
    if (peak >= 0x7f800000) factor = NAN;
    for (int k = 0; k < {terms}; k++) {{
        u.number = in[k] * by + 12582912;
        numbers[k] = factor > 0 ? (signed short)u.bits : 0;
    }}
    for (int column = 0; column < {columns}; column++) {{
        const signed char *w = {w} + column * {terms};
        {total}
        {y}[row * {y_row} + column] = (float)total * (factor * {scale}){added};
    }}
}}"""
SHORT_TOTAL = """\
int total = 0;
        for (int k = 0; k < {terms}; k++) total += w[k] * numbers[k];"""
LONG_TOTAL = """\
long long total = 0;
        for (int k = 0; k < {terms}; k += 512) {{
            int sum = 0;
            for (int j = k; j < {terms} && j < k + 512; j++) sum += w[j] * numbers[j];
            total += sum;
        }}"""


def real(value: float, kind: str) -> str:
    """Return a number as a literal of "float" or "double"."""
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "-INFINITY" if value < 0 else "INFINITY"
    return f"{ctypes.c_float(value).value:.8e}f" if kind == "float" else f"{value:.16e}"


class CPrinter(Printer):
    """kind: "float" or "double".   helpers: functions that it writes calls of and math.h lacks.

    portable: write calls of elementary functions of our own, whose helpers they are.   bytes: pointers to bytes.
    """

    def __init__(self, kind: str, portable: bool = False, bytes: Collection[str] = ()) -> None:
        self.kind, self.helpers, self._portable, self._bytes = kind, set[str](), portable, bytes

    def loose(self, name: str, around: int) -> bool:
        return name in LEVELS and name != "**"  # compilers warn of some operands that C takes without parentheses

    def constant(self, value: float) -> str:
        text = real(value, self.kind)
        return f"({text})" if text.startswith("-") else text

    def operation(self, name: str, args: tuple[Expression, ...]) -> str:
        texts = [self.text(arg) for arg in args]
        if name == "where":
            return f"{texts[0]} ? {texts[1]} : {texts[2]}"
        if name in SIGNS:
            return f"{SIGNS[name]}{texts[0]}"
        if name in ("int", "real"):
            return f"({'int' if name == 'int' else self.kind})({texts[0]})"
        if name == "address":
            return texts[0]
        if name in LEVELS and name != "**":
            return f"{texts[0]} {name} {texts[1]}"
        if self._portable and name not in IEEE_FUNCTIONS:
            check_portable(name, self.kind)
            self.helpers.add(name)
            return f"own_{name}32({texts[0]})"
        if name in HELPERS:
            self.helpers.add(name)
        if name == "total":  # of numbers from a place on
            texts[0] = f"&{texts[0]}"
        return f"{FUNCTIONS.get(name, name)}{SUFFIXES[self.kind]}({', '.join(texts)})"

    def lines(self, body: Sequence[Statement], outer: Collection[str], indent: str) -> Iterator[str]:
        """Yield the lines of statements. outer: the names that are declared around them."""
        declared = set(outer)
        for statement in body:
            match statement:
                case Loop(name, (count,), inner):
                    yield f"{indent}for (int {name} = 0; {name} < {self.text(count)}; {name}++) {{"
                    yield from self.lines(inner, declared, indent + "    ")
                    yield f"{indent}}}"
                case KernelCall("times" | "times_rows" as name, args):
                    strides = ["w_row"] if name == "times" else []
                    names = ("y", "y_row", "x", "x_row", "w", *strides, "rows", "columns", "terms")
                    values = dict(zip(names, map(self.text, args[1:]), strict=True))
                    text = (PRODUCT if name == "times" else ROWS_PRODUCT).format(kind=self.kind, **values)
                    yield from (indent + line for line in text.splitlines())
                case KernelCall("times_quantized", args):
                    names = ("y", "y_row", "x", "x_row", "w", "scale", "groups", "bias", "rows", "columns", "terms")
                    values = dict(zip(names, map(self.text, args[1:]), strict=True))
                    added = "" if values["bias"] == "0" else f" + {values['bias']}[column]"
                    total = (SHORT_TOTAL if int(values["terms"]) <= 512 else LONG_TOTAL).format(**values)
                    scale = f"{values['scale']}[column]"
                    if values["scale"] in self._bytes:
                        total += f"\n        u.bits = ({scale} + {MIDDLE}) << {LOWER_BITS};"
                        scale = "u.number"
                    text = QUANTIZED_PRODUCT.format(**{**values, "total": total, "added": added, "scale": scale})
                    yield from (indent + line for line in text.splitlines())
                case Assign(target, value, adds):
                    new = isinstance(target, Name) and target.name not in declared
                    declared |= {target.name} if isinstance(target, Name) else set()
                    sign = "+=" if adds else "="
                    yield f"{indent}{f'{self.kind} ' if new else ''}{self.text(target)} {sign} {self.text(value)};"
                case _:
                    raise AssertionError(f"C has no {statement}")


def function(name: str, made: LoopFunction, portable: bool = False) -> tuple[str, set[tuple[str, str]]]:
    """Return the definition of a function, and what it calls that math.h lacks: names, each with its kind.

    The pointers that it writes to overlap no others. portable: see `CPrinter`. Raises UnsupportedOperation for
    functions whose bits depend on the machine.
    """
    if portable and len({*map(number_kind, made.kinds)} - {""}) > 1 and any(_variables(made.body)):
        raise UnsupportedOperation("variables beside numbers of two types: here C and LLVM may round elsewhere")
    kinds = dict(zip(made.pointers, made.kinds, strict=True))
    printer = CPrinter(KINDS[made.kind], portable, {pointer for pointer, kind in kinds.items() if kind == "int8"})
    written = set(_written(made.body))
    pointers = [
        f"{KINDS[kind]} *restrict {pointer}" if pointer in written else f"const {KINDS[kind]} *{pointer}"
        for pointer, kind in kinds.items()
        if kind in KINDS
    ]
    body = "\n".join(printer.lines(made.body, (), "    "))
    return f"static void {name}({', '.join(pointers)})\n{{\n{body}\n}}", {(at, printer.kind) for at in printer.helpers}


def row_bytes(functions: Iterable[LoopFunction]) -> int:
    """Return the bytes of the longest row of whole numbers that a function makes."""
    rows = [0]
    for made in functions:
        for statement in made.body:
            match statement:
                case KernelCall("times_quantized", (*_, Constant(terms))):
                    rows.append(2 * int(terms))
    return max(rows)


def helper(name: str, kind: str) -> str:
    """Return the definition of a function that math.h lacks."""
    arguments, body = (text.replace("KIND", kind).replace("S(", f"{SUFFIXES[kind]}(") for text in HELPERS[name])
    return f"static {kind} {name}{SUFFIXES[kind]}({arguments})\n{{\n    {body}\n}}"


def _variables(body: Sequence[Statement]) -> Iterator[str]:
    """Yield the variables that statements write to."""
    for statement in body:
        match statement:
            case Loop(_, _, inner):
                yield from _variables(inner)
            case Assign(Name(name)):
                yield name


def _written(body: Sequence[Statement]) -> Iterator[str]:
    """Yield the pointers that statements write to."""
    for statement in body:
        match statement:
            case Loop(_, _, inner):
                yield from _written(inner)
            case Assign(Load(pointer)):
                yield pointer
            case KernelCall(_, (_, Name(pointer), *_)):
                yield pointer
