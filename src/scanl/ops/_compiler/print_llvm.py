"""Write the form of `loops.py` in LLVM's language: no compiler needs to find out the types.

numba takes thirty times as long for the same loops as LLVM alone.
"""

import ctypes
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scanl.ops._compiler.expressions import Constant, Expression, Load, Name, Operation
from scanl.ops._compiler.loops import Assign, KernelCall, Loop, LoopFunction, Statement
from scanl.ops._compiler.rules import UnsupportedOperation

TYPES = {
    "float32": "float",
    "float64": "double",
    "int64": "i64",
    "int8": "i8",
    "team": "i64",
}  # of numbers in memory, by kind
WIDTHS = {"i1": 0, "i8": 1, "i64": 2, "float": 3, "double": 4}  # the wider one is the type of an operation's result
NUMBERS = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv"}
INDICES = {"+": "add nsw", "-": "sub nsw", "*": "mul nsw"}
CONDITIONS = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}
TRUTHS = {"&": "and", "|": "or"}
INTRINSICS = {"sqrt": "sqrt", "abs": "fabs", "sin": "sin", "cos": "cos", "**": "pow", "floor": "floor",
              "rint": "rint"}  # fmt: skip
OF_LIBRARY = {"erf", "atan2", "fmod"}  # functions of C for both types; an f follows the name of that for float
KERNEL = "kernel"  # the name of the function that runs one
DOUBLES = {"exp", "log", "log1p", "expm1", "tanh"}  # functions of C for double; for float they are `elementary`
IEEE_FUNCTIONS = {"sqrt", "abs", "floor", "rint"}  # functions whose last bit IEEE says
OF_MACHINES = {"sin", "cos", "**", *OF_LIBRARY}  # whose last bits differ between libraries of C


class Value(NamedTuple):
    """A value of LLVM's, and its type."""

    text: str
    type: str


class LLVMPrinter:
    """Writes one function.

    called: the declarations of the functions that it calls; several printers have it in common.
    elementary: the functions that the kernel is linked with, by name and type.
    callees: places of the addresses of other kernels in what `KernelCall` has as its first argument, by name.
    portable: leave LLVM no freedom of rounding, neither to contract nor to reorder.
    """

    def __init__(self, made: LoopFunction, called: set[str], callees: Mapping[str, int], portable: bool) -> None:
        self.made, self.called, self._callees, self._portable = made, called, callees, portable
        self.elementary = set[tuple[str, str]]()
        self._number = TYPES[made.kind]
        self._kinds = dict(zip(made.pointers, made.kinds, strict=True))
        flags = "contract nsz reassoc" if made.sums else "contract nsz"
        self._flags = "" if portable else flags
        self._fresh = itertools.count()
        self._block = "entry"
        self._lines: list[str] = []
        self._variables: list[str] = []
        self._names: dict[str, Value] = {}  # indices
        self._types: dict[str, str] = {}  # of variables

    def function(self, name: str) -> str:
        """Return the definition. Nothing is inlined, so that the code of a loop depends on the loop alone."""
        self._statements(self.made.body)
        pointers = ", ".join(f"ptr noalias %{pointer}" for pointer in self.made.pointers)
        return "\n".join([
            f"define internal void @{name}({pointers}) noinline nounwind {{", "entry:", *self._variables, *self._lines,
            "  ret void", "}",
        ])  # fmt: skip

    # --- statements

    def _statements(self, body: Sequence[Statement]) -> None:
        for statement in body:
            match statement:
                case Loop(name, bounds, inner):
                    self._loop(name, bounds, inner)
                case Assign(target, value, adds):
                    self._assign(target, Operation("+", target, value) if adds else value)
                case KernelCall(name, args):
                    self._call_kernel(name, args)

    def _loop(self, name: str, bounds: Sequence[Expression], body: Sequence[Statement]) -> None:
        first, end = ("0", self.value(bounds[0]).text) if len(bounds) == 1 else [self.value(at).text for at in bounds]
        number, index = next(self._fresh), f"%{name}.{next(self._fresh)}"
        head, inside, after = (f"{part}{number}" for part in ("head", "inside", "after"))
        before, outer = self._block, self._names.get(name)
        self._lines += [f"  br label %{head}", f"{head}:"]
        at = len(self._lines)
        self._lines += ["", f"  %c{number} = icmp slt i64 {index}, {end}"]
        self._lines += [f"  br i1 %c{number}, label %{inside}, label %{after}", f"{inside}:"]
        self._block, self._names[name] = inside, Value(index, "i64")
        self._statements(body)
        self._lines += [f"  {index}.next = add nuw nsw i64 {index}, 1", f"  br label %{head}", f"{after}:"]
        self._lines[at] = f"  {index} = phi i64 [{first}, %{before}], [{index}.next, %{self._block}]"
        self._block = after
        if outer is None:
            del self._names[name]
        else:
            self._names[name] = outer

    def _assign(self, target: Load | Name, value: Expression) -> None:
        number = self.value(value)
        if isinstance(target, Load):
            kind = TYPES[self._kinds[target.pointer]]
            place = self._place(target)
            self._lines.append(f"  store {kind} {self._as(kind, number).text}, ptr {place}, align {_bytes(kind)}")
            return
        if target.name not in self._types:
            self._types[target.name] = number.type
            self._variables.append(f"  %at.{target.name} = alloca {number.type}")
        kind = self._types[target.name]
        self._lines.append(f"  store {kind} {self._as(kind, number).text}, ptr %at.{target.name}")

    def _call_kernel(self, name: str, args: Sequence[Expression]) -> None:
        """Call a kernel by its address, with its slots: two that it does not need, and the arguments."""
        number, kind = next(self._fresh), f"[{2 + len(args)} x i64]"
        self._variables.append(f"  %slots{number} = alloca {kind}")
        for at, arg in enumerate(args, 2):
            value = self._address(arg) if isinstance(arg, Name) else self.value(arg)
            place = self._new(f"getelementptr inbounds {kind}, ptr %slots{number}, i64 0, i64 {at}", "ptr")
            self._lines.append(f"  store i64 {value.text}, ptr {place.text}")
        team = args[0]
        assert isinstance(team, Name)
        place = self._new(f"getelementptr inbounds i64, ptr %{team.name}, i64 {self._callees[name]}", "ptr")
        callee = self._new(f"load ptr, ptr {place.text}", "ptr")
        self._lines.append(f"  call void {callee.text}(ptr %slots{number})")

    # --- values

    def value(self, expression: Expression) -> Value:
        match expression:
            case Constant(number):
                return Value(str(number), "i64") if isinstance(number, int) else _number(number, self._number)
            case Name(name):
                if name in self._names:
                    return self._names[name]
                return self._new(f"load {self._types[name]}, ptr %at.{name}", self._types[name])
            case Load(pointer, _):
                kind = TYPES[self._kinds[pointer]]
                read = self._new(f"load {kind}, ptr {self._place(expression)}, align {_bytes(kind)}", kind)
                return self._as(self._number, read) if kind in ("i8", "i64") else read
            case Operation("address", (pointer,)):
                return self._address(pointer)
            case Operation("total", (Load() as first, Constant(int() as count))):
                return self._total(first, count)
            case Operation(name, args):
                return self._operation(name, [self.value(arg) for arg in args])
        raise AssertionError(f"LLVM has no {expression!r}")

    def _operation(self, name: str, args: Sequence[Value]) -> Value:
        if name == "where":
            truth, (one, other) = args[0], self._alike(args[1:])
            return self._new(f"select i1 {truth.text}, {one.type} {one.text}, {other.type} {other.text}", one.type)
        if name == "int":
            return self._new(f"fptosi {args[0].type} {args[0].text} to i64", "i64")
        if name == "real":
            return self._as(self._number, args[0])
        if name == "not":
            return self._new(f"xor i1 {args[0].text}, true", "i1")
        if name in TRUTHS:
            return self._new(f"{TRUTHS[name]} i1 {args[0].text}, {args[1].text}", "i1")
        args = self._alike(args)
        kind, texts = args[0].type, ", ".join(arg.text for arg in args)
        if kind == "i64":
            return self._new(f"{INDICES[name]} i64 {texts}", "i64")
        if name == "neg":
            return self._new(f"fneg {self._flags} {kind} {texts}", kind)
        if name in CONDITIONS:
            return self._new(f"fcmp {CONDITIONS[name]} {kind} {texts}", "i1")
        if name in NUMBERS:
            return self._new(f"{NUMBERS[name]} {self._flags} {kind} {texts}", kind)
        return self._call(name, args, kind)

    def _call(self, name: str, args: Sequence[Value], kind: str) -> Value:
        if self._portable:
            check_portable(name, kind)
        if name in INTRINSICS:
            function = f"llvm.{INTRINSICS[name]}.f{8 * _bytes(kind)}"
        elif name in OF_LIBRARY:
            function = name + "f" * (kind == "float")
        elif kind == "double" and name in DOUBLES:
            function = name
        else:
            function = elementary(name, kind)
            self.elementary.add((name, kind))
        self.called.add(f"declare {kind} @{function}({', '.join([kind] * len(args))})")
        return self._new(
            f"call {self._flags} {kind} @{function}({', '.join(f'{kind} {arg.text}' for arg in args)})", kind
        )

    def _total(self, first: Load, count: int) -> Value:
        """Return the sum of adjacent numbers in memory, as one vector."""
        kind, vector = self._number, f"<{count} x {self._number}>"
        row = self._new(f"load {vector}, ptr {self._place(first)}, align {_bytes(kind)}", vector)
        function, zero = f"llvm.vector.reduce.fadd.v{count}f{8 * _bytes(kind)}", _number(-0.0, kind).text
        self.called.add(f"declare {kind} @{function}({kind}, {vector})")
        return self._new(f"call {self._flags} {kind} @{function}({kind} {zero}, {vector} {row.text})", kind)

    def _alike(self, args: Sequence[Value]) -> Sequence[Value]:
        """Return numbers as those of the widest type among them."""
        widest = max((arg.type for arg in args), key=WIDTHS.__getitem__)
        return [self._as(widest, arg) for arg in args]

    def _as(self, kind: str, value: Value) -> Value:
        if value.type == kind:
            return value
        if kind in ("float", "double") and value.type in ("float", "double"):
            change = "fpext" if kind == "double" else "fptrunc"
        elif kind in ("i8", "i64"):
            change = "zext" if value.type == "i1" else "fptosi"
        else:
            change = "uitofp" if value.type == "i1" else "sitofp"
        return self._new(f"{change} {value.type} {value.text} to {kind}", kind)

    def _place(self, load: Load) -> str:
        kind, index = TYPES[self._kinds[load.pointer]], self.value(load.index).text
        return self._new(f"getelementptr inbounds {kind}, ptr %{load.pointer}, i64 {index}", "ptr").text

    def _address(self, pointer: Expression) -> Value:
        assert isinstance(pointer, Name)
        return self._new(f"ptrtoint ptr %{pointer.name} to i64", "i64")

    def _new(self, instruction: str, kind: str) -> Value:
        name = f"%v{next(self._fresh)}"
        self._lines.append(f"  {name} = {instruction}")
        return Value(name, kind)


def check_portable(name: str, kind: str) -> None:
    """Raise UnsupportedOperation for a function whose bits depend on the machine. kind: "float" or "double"."""
    if name in OF_MACHINES or (kind == "double" and name not in IEEE_FUNCTIONS):
        raise UnsupportedOperation(f"{name} of {kind}, whose bits depend on the machine")


def elementary(name: str, kind: str) -> str:
    """Return the name that an elementary function of our own has for a type."""
    return f"scanl.{name}.{kind}"


class KernelSource(NamedTuple):
    """The text of a module that defines the kernel `KERNEL`, and which elementary functions it declares, by type.

    portable: whether rounding leaves no freedom.
    """

    text: str
    elementary: frozenset[tuple[str, str]]
    portable: bool = False


def source(
    functions: Mapping[LoopFunction, str],
    calls: Sequence[tuple[str, Sequence[tuple[str, int]]]],
    callees: Mapping[str, int],
    kinds: Mapping[str, str],
    rows: int,
    numbers: Mapping[str, int],
    portable: bool = False,
) -> KernelSource:
    """Return the source of a kernel, which takes units of work from a counter until none is left.

    calls: of the functions, in order: the name, and the memories with offsets that the function gets pointers to.
    kinds: of the memories, in the order of the kernel's slots; the number of rows follows them.
    rows: how many a unit has; the last unit begins early if too few are left. 0: there is one unit.
    numbers: how many numbers a row, or a unit of scratch memory, has in a memory, by its name.
    portable: see `LLVMPrinter`. Raises UnsupportedOperation for functions whose bits depend on the machine.
    """
    called, needed, texts = set[str](), set[tuple[str, str]](), list[str]()
    for function, name in functions.items():
        printer = LLVMPrinter(function, called, callees, portable)
        texts.append(printer.function(name))
        needed |= printer.elementary
    lines = ["  %counter = load ptr, ptr %slots", *_slot("units", 1, "i64")]
    for at, name in enumerate(kinds, 2):
        lines += _slot(f"all.{name}", at, "ptr")
    lines += [*_slot("rows", 2 + len(kinds), "i64"), f"  %last = sub i64 %rows, {rows}"] if rows else []
    lines += [
        "  br label %head", "head:", "  %unit = atomicrmw add ptr %counter, i64 1 monotonic",
        "  %more = icmp slt i64 %unit, %units", "  br i1 %more, label %inside, label %after", "inside:",
    ]  # fmt: skip
    if rows:
        lines += [f"  %first = mul i64 %unit, {rows}", "  %early = icmp slt i64 %first, %last"]
        lines += ["  %row = select i1 %early, i64 %first, i64 %last"]
    for name, kind in kinds.items():
        index = "0"
        if name in numbers:
            index = f"%from.{name}"
            lines.append(f"  {index} = mul i64 %{'unit' if name.startswith('scratch') else 'row'}, {numbers[name]}")
        lines.append(f"  %{name} = getelementptr {TYPES[kind]}, ptr %all.{name}, i64 {index}")
    for number, (function, places) in enumerate(calls):
        pointers = []
        for at, (name, offset) in enumerate(places):
            pointers.append(f"ptr %p{number}.{at}")
            lines.append(f"  %p{number}.{at} = getelementptr {TYPES[kinds[name]]}, ptr %{name}, i64 {offset}")
        lines.append(f"  call void @{function}({', '.join(pointers)})")
    lines += ["  br label %head", "after:", "  ret void"]
    kernel = [f"define void @{KERNEL}(ptr %slots) nounwind {{", "entry:", *lines, "}"]
    return KernelSource("\n".join([*sorted(called), *texts, *kernel, ""]), frozenset(needed), portable)


def _slot(name: str, at: int, kind: str) -> list[str]:
    """Return the lines that read a slot."""
    return [
        f"  %{name}.slot = getelementptr inbounds i64, ptr %slots, i64 {at}",
        f"  %{name} = load {kind}, ptr %{name}.slot",
    ]


def _number(value: float, kind: str) -> Value:
    """Return a constant, as LLVM has it: the bits of a double."""
    rounded = ctypes.c_float(value).value if kind == "float" else value
    return Value(f"0x{struct.pack('>d', rounded).hex().upper()}", kind)


def _bytes(kind: str) -> int:
    return {"float": 4, "double": 8, "i64": 8, "i8": 1}[kind]
