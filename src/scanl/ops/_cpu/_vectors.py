"""Explicit vector code for loops over the rows of a block of columns.

LLVM's vectoriser puts the loop over columns inside the loop over rows, so sums over rows are loaded and stored at every
row. Here a strip of columns is one vector value, a few registers wide, and the sums stay in registers. An `Emitter`
generates the body of this loop, inside a numba intrinsic that `emitted` makes.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from scanl.ops._cpu import _math
from scanl.ops._cpu._flat import FlatType, flattened
from scanl.ops._cpu._team import widen_vectors

STRIP = 256 if get_host_cpu_features().get("avx512f") else 128  # bytes of a strip
LINE = 64  # bytes of a vector that is then summed to one number
SIZE = ir.IntType(64)
_FLAGS = ("contract", "nsz")


def emitted(generate: Callable[..., None] | None = None, *, width: int | None = None) -> Any:
    """Make an intrinsic of a function (e, *values), which generates its code by an Emitter e.

    width: bytes of a strip; by default STRIP, and the function around the code may use vectors of 512 bits.
    """
    if generate is None:
        return lambda function: emitted(function, width=width)

    def made(typingctx, *arguments):
        def codegen(context, builder, signature, values):
            e = Emitter(context, builder, signature, values, width)
            generate(e, *e.values)
            return context.get_dummy_value()

        kinds = [
            types.int64 if isinstance(kind, types.Integer | types.Boolean) else flattened(types.unliteral(kind))
            for kind in arguments
        ]
        return types.void(*kinds), codegen

    vars(made)["__signature__"] = inspect.signature(generate)  # numba counts arguments after the first
    return intrinsic(made)


class Emitter:
    """Generates the code of an intrinsic of arrays, pointers and integers; the first of them has the strips."""

    def __init__(
        self, context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[Any], width: int | None
    ):
        if width is None:
            widen_vectors(builder.function)
        self.context, self.builder, self.kinds = context, builder, signature.args
        kind = next(arg.dtype for arg in signature.args if hasattr(arg, "dtype"))
        self.item = kind.bitwidth // 8
        self.number = context.get_value_type(kind)
        self.strip = ir.VectorType(self.number, (width or STRIP) // self.item)
        self.values = [
            builder.extract_value(value, 0) if isinstance(arg, FlatType) else value
            for arg, value in zip(signature.args, arguments, strict=True)
        ]

    def at(self, array: Any, *indices: Any) -> Any:
        """Return the address of an element; its index is the sum of `indices`, of which a pair is a product."""
        place = array
        for index in indices:
            pair = index if isinstance(index, tuple) else (index,)
            factors: list[Any] = [SIZE(n) if isinstance(n, int) else n for n in pair]
            place = self.builder.gep(place, [self.builder.mul(*factors) if len(factors) > 1 else factors[0]])
        return place

    def read(self, place: Any, kind: Any | None = None) -> Any:
        """Read the strip at an address, or a vector of another kind."""
        pointer = self.builder.bitcast(place, (kind or self.strip).as_pointer())
        return self.builder.load(pointer, align=1 if kind else self.item)

    def write(self, value: Any, place: Any) -> None:
        self.builder.store(value, self.builder.bitcast(place, value.type.as_pointer()), align=self.item)

    def number_at(self, place: Any) -> Any:
        """Read one number into every lane."""
        return self.spread(self.builder.load(place))

    def spread(self, number: Any, lanes: int | None = None) -> Any:
        """Copy a number to every lane of a strip, or of a vector of so many `lanes`."""
        count: Any = lanes or self.strip.count
        first = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
        vector = self.builder.insert_element(first, number, ir.Constant(ir.IntType(32), 0))
        return self._lanes(vector, [0] * count)

    def some(self, first: Any, count: Any, *conditions: Any) -> Any:
        """Return a mask of the lanes with `first` + lane < `count`; it is empty unless all conditions hold."""
        for condition in conditions:
            count = self.builder.select(condition, count, first)
        word = ir.IntType(32)
        lanes = ir.Constant(ir.VectorType(word, self.strip.count), list(range(self.strip.count)))
        remaining = self.builder.trunc(self.builder.sub(count, first), word)
        return self.builder.icmp_signed("<", lanes, self.spread(remaining))

    def is_set(self, flag: Any) -> Any:
        return self.builder.icmp_signed("!=", flag, flag.type(0))

    def place_if(self, flag: Any, array: Any, start: Any, lane: Any, spare: Any) -> Any:
        """Return the address of a strip if the flag is set, else the address of a spare strip.

        Use it for strips that are masked unless the flag is set. A masked access to unmapped memory is allowed, but
        takes hundreds of cycles.
        """
        return self.builder.select(flag, self.at(array, start, lane), self.at(spare, lane))

    def read_some(self, place: Any, mask: Any, otherwise: Any | None = None) -> Any:
        """Read the strip at an address where the mask is set; other lanes are zero, or `otherwise`, without a read."""
        otherwise = ir.Constant(self.strip, None) if otherwise is None else otherwise
        align = ir.Constant(ir.IntType(32), self.item)
        address = self.builder.bitcast(place, self.strip.as_pointer())
        return self._masked("load", self.strip, [address, align, mask, otherwise])

    def write_some(self, value: Any, place: Any, mask: Any) -> None:
        address = self.builder.bitcast(place, self.strip.as_pointer())
        align = ir.Constant(ir.IntType(32), self.item)
        self._masked("store", ir.VoidType(), [value, address, align, mask])

    def prefetch(self, place: Any) -> None:
        """Prefetch the strip at an address, which may be outside the array: hardware does not predict such strides."""
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        for line in range(0, self.strip.count, LINE // self.item):
            self.builder.call(function, [self.builder.bitcast(self.at(place, line), byte), word(0), word(3), word(1)])

    def _masked(self, kind: str, result: Any, arguments: list[Any]) -> Any:
        letter = "f32" if self.item == 4 else "f64"
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(result, [argument.type for argument in arguments]),
            f"llvm.masked.{kind}.v{self.strip.count}{letter}.p0",
        )
        return self.builder.call(function, arguments)

    def exp(self, x: Any) -> Any:
        """Return e^x of float32, computed as by `_exp32` of _math.py, which states its error."""
        assert self.item == 4
        words = ir.VectorType(ir.IntType(32), self.strip.count)

        def same(number: Any) -> ir.Constant:
            return ir.Constant(self.strip, [float(number)] * self.strip.count)

        def bits(number: int) -> ir.Constant:
            return ir.Constant(words, [number] * self.strip.count)

        for order, bound in (("<", _math.LOWEST_EXPONENT), (">", _math.HIGHEST_EXPONENT)):
            x = self.builder.select(self.builder.fcmp_ordered(order, x, same(bound)), same(bound), x)
        rounded = self.add(same(_math.ROUND), x, same(_math.LOG2E))
        n = self.add(rounded, same(-_math.ROUND))
        r = self.add(self.add(x, n, same(-_math.LN2_HIGH)), n, same(-_math.LN2_LOW))
        p = same(_math.POLYNOMIAL[0])
        for coefficient in _math.POLYNOMIAL[1:]:
            p = self.add(same(coefficient), p, r)
        y = self.add(self.add(r, self.times(p, r), r), same(1))
        power = self.builder.shl(self.builder.add(self.builder.bitcast(rounded, words), bits(126)), bits(23))
        return self.times(self.add(y, y), self.builder.bitcast(power, self.strip))

    def choose(self, flag: Any, a: Any, b: Any) -> Any:
        """Return a if the flag is set, else b."""
        return self.builder.select(flag, a, b)

    def total(self, value: Any) -> Any:
        """Return the sum of a strip's lanes."""
        return self.builder.extract_element(self.folded(value, 1), ir.Constant(ir.IntType(32), 0))

    def add_number(self, place: Any, number: Any) -> None:
        self.builder.store(self.add(self.builder.load(place), number), place)

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=_FLAGS)  # pyright: ignore[reportCallIssue]

    def add(self, total: Any, a: Any, b: Any | None = None) -> Any:
        """Return total + a b, or total + a."""
        more = a if b is None else self.times(a, b)
        return self.builder.fadd(total, more, flags=_FLAGS)  # pyright: ignore[reportCallIssue]

    def sums(self, count: int, start: Callable[[int], Any] | None = None, kind: Any | None = None) -> list[Any]:
        """Return `count` accumulators for a loop, strips or of another kind, initially zero or given by `start`."""
        zero = ir.Constant(kind or self.strip, None)
        return [
            cgutils.alloca_once_value(self.builder, zero if start is None else self.read(start(n)))
            for n in range(count)
        ]

    def add_to(self, total: Any, a: Any, b: Any) -> None:
        self.builder.store(self.add(self.builder.load(total), a, b), total)

    def keep(self, total: Any, place: Any) -> None:
        self.write(self.builder.load(total), place)

    def rows(self, count: Any, step: int = 1) -> Any:
        """Generate a loop over rows: a context manager that yields the row's index."""
        return _Rows(self.builder, count, step)

    def dot(self, a: Any, b: Any) -> Any:
        """Multiply two strips and sum the products down to a vector of LINE bytes; `totals` finishes the sum."""
        width, total = LINE // self.item, None
        for first in range(0, self.strip.count, width):
            product = [self._lanes(value, range(first, first + width)) for value in (a, b)]
            total = self.times(*product) if total is None else self.add(total, *product)
        return total

    def totals(self, four: Sequence[Any]) -> Any:
        """Sum the lanes of each of four vectors; return the sums as a vector of four."""
        width, unit = four[0].type.count, 16 // self.item  # unit: lanes within which a shuffle is cheap

        def meet(a: Any, b: Any, low: Sequence[int], high: Sequence[int]) -> Any:
            places = [range(block, block + unit) for block in range(0, width, unit)]
            pick = [
                [(n if n < unit else n - unit + width) + place[0] for place in places for n in lanes]
                for lanes in (low, high)
            ]
            return self.add(*[self._shuffle(a, b, lanes) for lanes in pick])

        if unit == 4:
            pairs = [meet(four[n], four[n + 1], (0, 4, 1, 5), (2, 6, 3, 7)) for n in (0, 2)]
            return self.folded(meet(pairs[0], pairs[1], (0, 1, 4, 5), (2, 3, 6, 7)), unit)
        low, high = (self.folded(meet(four[n], four[n + 1], (0, 2), (1, 3)), unit) for n in (0, 2))
        return self._shuffle(low, high, range(4))

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """Transpose a square of as many strips as a strip has lanes."""
        rows, count, span = list(rows), self.strip.count, 1
        while span < count:  # exchange the squares of `span` rows that lie beside the diagonal of each pair of squares
            upper = [lane if not lane & span else count + lane - span for lane in range(count)]
            lower = [lane + span if not lane & span else count + lane for lane in range(count)]
            for r in range(count):
                if not r & span:
                    pair = rows[r], rows[r + span]
                    rows[r], rows[r + span] = (self._shuffle(*pair, lanes) for lanes in (upper, lower))
            span *= 2
        return rows

    def add_four(self, place: Any, four: Any) -> None:
        """Add a vector of four to the numbers at an address."""
        four_numbers = self.builder.load(self.builder.bitcast(place, four.type.as_pointer()), align=self.item)
        self.write(self.add(four_numbers, four), place)

    def folded(self, value: Any, width: int) -> Any:
        """Add the halves of a vector, and again, until it has `width` lanes."""
        while value.type.count > width:
            half = value.type.count // 2
            value = self.add(self._lanes(value, range(half)), self._lanes(value, range(half, 2 * half)))
        return value

    def _lanes(self, value: Any, lanes: Sequence[int]) -> Any:
        return self._shuffle(value, value, lanes)

    def _shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(ir.IntType(32), len(lanes))
        return self.builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))


class _Rows:
    def __init__(self, builder: ir.IRBuilder, count: Any, step: int):
        kind = count.type
        self.loop = cgutils.for_range_slice(builder, kind(0), count, kind(step), kind)

    def __enter__(self) -> Any:
        return self.loop.__enter__()[0]

    def __exit__(self, *error: Any) -> None:
        self.loop.__exit__(*error)
