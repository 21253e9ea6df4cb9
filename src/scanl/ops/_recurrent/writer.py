"""Functions in LLVM's language, written by Python: values with operators, loops and branches as contexts.

All numbers are float32 and all indices i64. A vector is as wide as a register, and a pointer counts numbers.
"""

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, SupportsFloat

from llvmlite.binding import get_host_cpu_features

_WIDE = bool(get_host_cpu_features().get("avx512f"))
LANES = 16 if _WIDE else 8  # numbers of a vector
REGISTERS = 32 if _WIDE else 16  # of vectors
VECTOR = f"<{LANES} x float>"
MASK, WORDS = f"<{LANES} x i1>", f"<{LANES} x i32>"
_SUFFIX = f"v{LANES}f32"
_FLAGS = "contract nsz"


class CodeValue(NamedTuple):
    """A value of LLVM's, its type, and the function that it belongs to."""

    text: str
    kind: str
    code: Any

    def __add__(self, other: "CodeValue | int") -> "CodeValue":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.code.binary("add", self, other)

    def __sub__(self, other: "CodeValue | int") -> "CodeValue":
        return self.code.binary("sub", self, other)

    def __mul__(self, other: "CodeValue | int") -> "CodeValue":  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.code.binary("mul", self, other)

    def __floordiv__(self, other: "CodeValue | int") -> "CodeValue":
        return self.code.binary("div", self, other)

    def __mod__(self, other: "CodeValue | int") -> "CodeValue":
        return self.code.binary("rem", self, other)

    def below(self, other: "CodeValue | int") -> "CodeValue":
        """Return whether an index is less than another one."""
        return self.code.new(f"icmp slt i64 {self.text}, {_text(other)}", "i1")

    def equals(self, other: "CodeValue | int") -> "CodeValue":
        return self.code.new(f"icmp eq i64 {self.text}, {_text(other)}", "i1")


def _text(value: CodeValue | int) -> str:
    return value.text if isinstance(value, CodeValue) else str(value)


class Function:
    """One function, whose arguments are its attributes by name. `finished` has the text of all of it."""

    def __init__(self, name: str, pointers: str, indices: str = "", *, inline: bool = False) -> None:
        self._lines: list[str] = []
        self._variables: list[str] = []
        self._fresh = itertools.count()
        names = [(each, "ptr") for each in pointers.split()] + [(each, "i64") for each in indices.split()]
        self._head = f"@{name}({', '.join(f'{kind} %{each}' for each, kind in names)})"
        self._inline = "alwaysinline" if inline else "noinline"
        self.arguments = {each: CodeValue(f"%{each}", kind, self) for each, kind in names}

    def __getattr__(self, name: str) -> CodeValue:
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(name) from None

    def finished(self) -> str:
        body = ["entry:", *self._variables, *self._lines, "  ret void", "}", ""]
        return "\n".join([f"define internal void {self._head} {self._inline} nounwind {{", *body])

    def new(self, instruction: str, kind: str) -> CodeValue:
        name = f"%v{next(self._fresh)}"
        self._lines.append(f"  {name} = {instruction}")
        return CodeValue(name, kind, self)

    # --- indices and flow

    def index(self, number: int) -> CodeValue:
        return CodeValue(str(number), "i64", self)

    def binary(self, name: str, a: CodeValue, b: CodeValue | int) -> CodeValue:
        """Return a sum, difference, product, quotient or remainder of indices; the latter two of positive ones."""
        instruction = {"div": "udiv", "rem": "urem"}.get(name, f"{name} nsw")
        return self.new(f"{instruction} i64 {a.text}, {_text(b)}", "i64")

    def choose(self, truth: CodeValue, a: CodeValue | int, b: CodeValue | int, kind: str = "i64") -> CodeValue:
        return self.new(f"select i1 {truth.text}, {kind} {_text(a)}, {kind} {_text(b)}", kind)

    def least(self, a: CodeValue, b: CodeValue | int) -> CodeValue:
        return self.choose(a.below(b), a, b)

    @contextmanager
    def strides(
        self, end: CodeValue | int, begin: CodeValue | int = 0
    ) -> Iterator[tuple[CodeValue, Callable[[CodeValue | int], None]]]:
        """A loop over indices up to `end`. The context yields the index, and what advances it: `advance(step)`."""
        number, place = next(self._fresh), self.variable("i64")
        self._lines.append(f"  store i64 {_text(begin)}, ptr {place}")
        self._lines += [f"  br label %head{number}", f"head{number}:"]
        index = self.new(f"load i64, ptr {place}", "i64")
        more = index.below(end)
        self._lines += [f"  br i1 {more.text}, label %inside{number}, label %after{number}", f"inside{number}:"]
        yield index, lambda step: self._lines.append(f"  store i64 {(index + step).text}, ptr {place}")
        self._lines += [f"  br label %head{number}", f"after{number}:"]

    @contextmanager
    def loop(self, begin: CodeValue | int, end: CodeValue | int, step: CodeValue | int = 1) -> Iterator[CodeValue]:
        """A loop over indices in equal steps. The context yields the index."""
        with self.strides(end, begin) as (index, advance):
            yield index
            advance(step)

    @contextmanager
    def when(self, truth: CodeValue) -> Iterator[None]:
        """A branch that runs if the truth value is set."""
        number = next(self._fresh)
        self._lines += [f"  br i1 {truth.text}, label %then{number}, label %end{number}", f"then{number}:"]
        yield
        self._lines += [f"  br label %end{number}", f"end{number}:"]

    @contextmanager
    def otherwise(self, truth: CodeValue) -> Iterator[None]:
        """A branch that runs if the truth value is not set."""
        with self.when(self.new(f"xor i1 {truth.text}, true", "i1")):
            yield

    def call(self, name: str, *args: CodeValue | int) -> None:
        """Call a function of this module. Its pointers come first."""
        given = ", ".join(f"{arg.kind} {arg.text}" if isinstance(arg, CodeValue) else f"i64 {arg}" for arg in args)
        self._lines.append(f"  call void @{name}({given})")

    # --- memory

    def variable(self, kind: str) -> str:
        """Return the place of a variable, which optimization turns to values."""
        name = f"%m{next(self._fresh)}"
        self._variables.append(f"  {name} = alloca {kind}")
        return name

    def get(self, place: str, kind: str = VECTOR) -> CodeValue:
        return self.new(f"load {kind}, ptr {place}", kind)

    def set(self, place: str, value: CodeValue) -> None:
        self._lines.append(f"  store {value.kind} {value.text}, ptr {place}")

    def at(self, pointer: CodeValue, *indices: CodeValue | int) -> CodeValue:
        """Return the pointer to an element; its index is the sum of `indices`."""
        for index in indices:
            if not (isinstance(index, int) and index == 0):
                pointer = self.new(f"getelementptr float, ptr {pointer.text}, i64 {_text(index)}", "ptr")
        return pointer

    def none(self, pointer: CodeValue) -> CodeValue:
        """Return whether a pointer is null."""
        return self.new(f"icmp eq ptr {pointer.text}, null", "i1")

    def either(self, truth: CodeValue, a: CodeValue, b: CodeValue) -> CodeValue:
        """Return one of two pointers: a if the truth value is set."""
        return self.choose(truth, a, b, "ptr")

    def mask(self, count: CodeValue) -> CodeValue:
        """Return the lanes below a count."""
        lanes = ", ".join(f"i32 {lane}" for lane in range(LANES))
        word = self.new(f"trunc i64 {self.least(count, LANES).text} to i32", "i32")
        return self.new(f"icmp slt {WORDS} <{lanes}>, {self._spread(word, WORDS).text}", MASK)

    def read(self, pointer: CodeValue, mask: CodeValue | None = None) -> CodeValue:
        """Return a vector from memory; where a mask is not set, 0, and no memory is read."""
        if mask is None:
            return self.new(f"load {VECTOR}, ptr {pointer.text}, align 4", VECTOR)
        form = f"ptr {pointer.text}, i32 4, {MASK} {mask.text}, {VECTOR} zeroinitializer"
        return self.new(f"call {VECTOR} @llvm.masked.load.{_SUFFIX}.p0({form})", VECTOR)

    def write(self, value: CodeValue, pointer: CodeValue, mask: CodeValue | None = None) -> None:
        if mask is None:
            self._lines.append(f"  store {value.kind} {value.text}, ptr {pointer.text}, align 4")
        else:
            form = f"{VECTOR} {value.text}, ptr {pointer.text}, i32 4, {MASK} {mask.text}"
            self._lines.append(f"  call void @llvm.masked.store.{_SUFFIX}.p0({form})")

    def number_at(self, pointer: CodeValue) -> CodeValue:
        """Return a vector of one number from memory."""
        return self._spread(self.new(f"load float, ptr {pointer.text}, align 4", "float"), VECTOR)

    def word_at(self, pointer: CodeValue) -> CodeValue:
        """Return an index from a number of int32 in memory."""
        word = self.new(f"load i32, ptr {pointer.text}, align 4", "i32")
        return self.new(f"sext i32 {word.text} to i64", "i64")

    def _spread(self, number: CodeValue, kind: str) -> CodeValue:
        one = self.new(f"insertelement {kind} poison, {number.kind} {number.text}, i32 0", kind)
        return self.shuffle(one, one, [0] * LANES)

    def shuffle(self, a: CodeValue, b: CodeValue, lanes: Sequence[int]) -> CodeValue:
        """Return some lanes of two vectors."""
        picked, kind = ", ".join(f"i32 {lane}" for lane in lanes), f"<{len(lanes)} x {a.kind.split()[-1]}"
        text = f"shufflevector {a.kind} {a.text}, {b.kind} {b.text}, <{len(lanes)} x i32> <{picked}>"
        return self.new(text, kind)

    # --- vectors

    def same(self, number: SupportsFloat) -> CodeValue:
        """Return a vector of one constant."""
        bits = struct.pack(">d", ctypes.c_float(float(number)).value).hex().upper()
        return CodeValue(f"<{', '.join([f'float 0x{bits}'] * LANES)}>", VECTOR, self)

    def words(self, number: int) -> CodeValue:
        return CodeValue(f"<{', '.join([f'i32 {number}'] * LANES)}>", WORDS, self)

    def fused(self, a: CodeValue, b: CodeValue, c: CodeValue) -> CodeValue:
        """Return a b + c."""
        form = ", ".join(f"{VECTOR} {each.text}" for each in (a, b, c))
        return self.new(f"call {_FLAGS} {VECTOR} @llvm.fmuladd.{_SUFFIX}({form})", VECTOR)

    def plus(self, a: CodeValue, b: CodeValue) -> CodeValue:
        return self.new(f"fadd {_FLAGS} {a.kind} {a.text}, {b.text}", a.kind)

    def minus(self, a: CodeValue, b: CodeValue) -> CodeValue:
        return self.new(f"fsub {_FLAGS} {a.kind} {a.text}, {b.text}", a.kind)

    def times(self, a: CodeValue, b: CodeValue) -> CodeValue:
        return self.new(f"fmul {_FLAGS} {a.kind} {a.text}, {b.text}", a.kind)

    def over(self, a: CodeValue, b: CodeValue) -> CodeValue:
        return self.new(f"fdiv {_FLAGS} {a.kind} {a.text}, {b.text}", a.kind)

    def compare(self, order: str, a: CodeValue, b: CodeValue) -> CodeValue:
        return self.new(f"fcmp {order} {VECTOR} {a.text}, {b.text}", MASK)

    def where(self, mask: CodeValue, a: CodeValue, b: CodeValue) -> CodeValue:
        return self.new(f"select {MASK} {mask.text}, {a.kind} {a.text}, {b.kind} {b.text}", a.kind)

    def cast(self, name: str, value: CodeValue, kind: str) -> CodeValue:
        return self.new(f"{name} {value.kind} {value.text} to {kind}", kind)

    def folded(self, value: CodeValue, width: int) -> CodeValue:
        """Add the halves of a vector, and again, until it has `width` lanes."""
        count = LANES
        while count > width:
            count //= 2
            low, high = (self.shuffle(value, value, range(first, first + count)) for first in (0, count))
            value = self.plus(low, high)
        return value


DECLARATIONS = "\n".join([
    f"declare {VECTOR} @llvm.masked.load.{_SUFFIX}.p0(ptr, i32, {MASK}, {VECTOR})",
    f"declare void @llvm.masked.store.{_SUFFIX}.p0({VECTOR}, ptr, i32, {MASK})",
    f"declare {VECTOR} @llvm.fmuladd.{_SUFFIX}({VECTOR}, {VECTOR}, {VECTOR})",
    "",
])  # fmt: skip
