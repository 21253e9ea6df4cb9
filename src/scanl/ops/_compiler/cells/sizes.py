"""Sizes of traced tensors as expressions of the axes.

A cell is traced on tensors without memory. Every axis gets a size that is its real size times a prime of its own. So
every size, stride and offset that occurs in the trace can be read back as an expression of the axes: 4·D, H·K, D/2.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod
from types import MappingProxyType

from scanl.ops._compiler.expressions import Constant, Expression, Name

_BATCHES = (1009, 1109)  # the size of the batch in the two traces
# The sizes of the first trace, then of the second. The two of an axis differ by twice a prime above 200, another one
# for each axis. So if a multiple of one axis is near a multiple of another in both traces, it is not as near in both.
_PRIMES = (1013, 1093, 1201, 1301, 1373, 1487, 1571, 1697, 2251, 1607, 1823, 2683, 2347, 1933, 2029, 2179)
_TYPICAL = 128  # channels
_MAX_CONSTANT = 1000  # the largest number that is read as a constant


class TracedAxes:
    """The axes of a traced cell.

    sizes: the real size of every axis.   fixed: axes that keep their real size; the kernels are for these sizes only.
    tied: axes that are a multiple of another one, as (other, factor).   turn: which primes to use, 0 or 1.   free: the
    others, with the prime of each.   batch: the size of the batch.   sums: axes that join parts, with the axes of each.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        fixed: frozenset[str],
        tied: Mapping[str, tuple[str, Fraction]],
        turn: int,
        sums: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType({}),
    ):
        self.sizes, self.fixed, self.tied, self.sums = dict(sizes), fixed, dict(tied), sums
        free = [name for name in sizes if name not in fixed and name not in tied and name not in sums]
        self.batch = _BATCHES[turn]
        half = turn * len(_PRIMES) // 2
        primes = (_PRIMES[half:] + _PRIMES[:half])[: len(free)]
        self.free = dict(zip(free, primes, strict=True))
        self._real = {name: max(sizes[name], 1) for name in free}
        self.traced = {name: self.free.get(name, 1) * max(size, 1) for name, size in sizes.items()}
        for name, (other, factor) in tied.items():
            self.traced[name] = int(self.traced[other] * factor)
        self._known: dict[int, Expression] = {}  # the axes that join parts, and where the parts begin
        for name, parts in sums.items():
            self.traced |= self._joined(name, self.traced)
            for count in range(2, len(parts) + 1):
                number = sum(_size(factors, self.traced) for factors in parts[:count])
                if number > _MAX_CONSTANT:
                    self._known[number] = functools.reduce(operator.add, map(_product, parts[:count]))
        self.expression = functools.cache(self._expression)

    def _joined(self, name: str, sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: sum(_size(factors, sizes) for factors in self.sums[name])}

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether kernels for these axes can run with other sizes."""
        same = all(sizes[name] == self.sizes[name] for name in self.fixed)
        return same and all(sizes[name] == sizes[other] * factor for name, (other, factor) in self.tied.items())

    def typical(self) -> dict[str, int]:
        """Return sizes for which choices are made that shall not depend on a call: all free axes are equal."""
        sizes = {name: self.sizes[name] if name in self.fixed else _TYPICAL for name in self.sizes}
        sizes |= {name: int(sizes[other] * factor) for name, (other, factor) in self.tied.items()}
        for name in self.sums:
            sizes |= self._joined(name, sizes)
        return sizes

    def _expression(self, number: int) -> Expression:
        """Return the number of a trace as an expression in the names of the axes."""
        expression = self._known.get(number) or self._term(number)
        if expression is not None:
            return expression
        for constant in sorted(range(-64, 65), key=abs):  # the nearest is what is meant
            expression = self._term(number - constant)
            if expression is not None:
                return expression + constant if constant > 0 else expression - abs(constant)
        for degree in (1, 2, 3):
            for axes in combinations_with_replacement(self.free, degree):
                product = prod(self.traced[axis] for axis in axes)
                for count in range(1, 17):
                    for sign in (1, -1):
                        remainder = self._term(number - sign * count * product)
                        if remainder is not None:
                            term = _product([*([str(count)] if count > 1 else []), *axes])
                            return remainder + term if sign > 0 else remainder - term
        raise ValueError(f"{number} is no expression of the axes {', '.join(self.free)}")

    def _term(self, number: int) -> Expression | None:
        """Return a number that is a constant or a product of axes with a rational factor; None for another number."""
        remainder, axes = abs(number), []
        if remainder == 0:
            return Constant(0)
        for name, prime in self.free.items():
            while remainder % prime == 0:
                remainder //= prime
                axes.append(name)
        factor = Fraction(remainder, prod(self._real[name] for name in axes))
        if self.free and (factor.numerator > _MAX_CONSTANT or factor.denominator > _MAX_CONSTANT):
            return None
        term = _product([*([str(factor.numerator)] if factor.numerator > 1 else []), *axes])
        term = term // factor.denominator if factor.denominator > 1 else term
        return term if number > 0 else -term


def _product(factors: Sequence[str]) -> Expression:
    """Return the product of axes and numbers."""
    values: list[Expression] = [Constant(int(factor)) if factor.isdigit() else Name(factor) for factor in factors]
    return functools.reduce(lambda a, b: a * b, values) if values else Constant(1)


def _size(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return prod(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)


def choices(
    sizes: Mapping[str, int], fixed: frozenset[str], sums: Mapping[str, Sequence[Sequence[str]]]
) -> Iterator[tuple[TracedAxes, TracedAxes]]:
    """Return pairs of axes to trace with, the most general first; both of a pair must give the same kernels.

    If the step needs one axis to be a multiple of another, the first pair fails. A step that computes a number from a
    size gives different kernels, unless all sizes are fixed. The batch is never fixed.
    """
    tied: dict[str, tuple[str, Fraction]] = {}
    free = [name for name in sizes if name not in fixed and name not in sums and sizes[name]]
    free.sort(key=lambda name: sizes[name])
    for i, name in enumerate(free):
        other = next((axis for axis in free[:i] if axis not in tied and sizes[name] % sizes[axis] == 0), None)
        if other is not None and sizes[other] > 1:
            tied[name] = other, Fraction(sizes[name], sizes[other])
    for some, ties in ((fixed, {}), (fixed, tied), (frozenset(sizes), {})):
        yield TracedAxes(sizes, some, ties, 0, sums), TracedAxes(sizes, some, ties, 1, sums)
