"""Which tiles of registers hold the values of a step on a GPU.

A tile is (rows of the batch, channels). It holds one axis of a value, its channels. Of the other axes at most one is
divided over programs, its groups (heads). All others are small, and every index of them has a tile of its own.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from scanl.ops._compiler.cells.plan import StepPlan
from scanl.ops._compiler.cells.sizes import TracedAxes
from scanl.ops._compiler.cells.trace import Ref
from scanl.ops._compiler.rules import UnsupportedOperation

MAX_TILES = 64  # tiles of one value


class ChannelTile(NamedTuple):
    """The numbers of one tile in the memory of a row.

    offset: of the first one.   group: the distance of two groups; 0 if all groups have the same.   axis: the letter of
    the channels; "" for a single number.   channel: the distance of two channels.
    """

    offset: int
    group: int
    axis: str
    channel: int


class Tiles:
    """Divides views into tiles.

    widths: the channels of a tile, by the letter of their axis.   group: the letter of the axis of groups, "" if there
    is none.   groups: their number.
    """

    def __init__(self, axes: TracedAxes, plans: Sequence[StepPlan]):
        self.axes = axes
        self.group, self.groups, self.widths = "", 1, dict[str, int]()
        views = [ref for plan in plans for ref in _views(plan) if ref.node.batched]
        self._find_group([ref for ref in views if ref == ref.node.whole])
        sizes = {size for ref in views for size in ref.shape}
        if self.group:
            alone = [size for size in sizes if self._letters(size) == {self.group}]
            self.groups = math.gcd(*alone) or axes.traced[self.group]
        for size in sorted(sizes):
            letters = self._letters(size)
            letter = self._channels(letters)
            if letter:
                channels = size // self.groups if self.group in letters else size
                self.widths[letter] = math.gcd(self.widths.get(letter, 0), channels)
        self._fixed = ""  # the letter of channels whose number is fixed
        last = plans[0].traced.operands["state"].shape
        if not self.widths and last:
            self._fixed = next((name for name in sorted(axes.fixed) if axes.traced[name] == last[-1]), "")
            if self._fixed:
                self.widths[self._fixed] = last[-1]

    def _letters(self, size: int) -> set[str]:
        return {name for name in self.axes.free if size and size % self.axes.free[name] == 0}

    def _channels(self, letters: set[str]) -> str:
        """Return the letter of the channels among the letters of an axis; "" if it has none."""
        channels = letters - {self.group}
        if len(channels) > 1:
            raise UnsupportedOperation(f"an axis that holds {' and '.join(sorted(letters))}")
        return next(iter(channels), "")

    def _find_group(self, wholes: Sequence[Ref]) -> None:
        """Find the axis that has another one inside it: that one has the channels."""
        outer: set[str] = set()
        for ref in wholes:
            axes = [(by, self._letters(size)) for size, by in zip(ref.shape, ref.strides, strict=True)]
            axes = sorted((by, letters) for by, letters in axes if letters and by)
            for (_, inside), (_, outside) in pairwise(axes):
                outer |= outside - inside
        merged = [letters for ref in wholes for size in ref.shape if len(letters := self._letters(size)) > 1]
        if len(outer) > 1:
            raise UnsupportedOperation(f"values with the axes {' and '.join(sorted(outer))} beside their channels")
        for letters in merged:
            if not outer < letters or len(letters) > 2 or not outer:
                raise UnsupportedOperation(f"an axis that holds {' and '.join(sorted(letters))}")
        self.group = outer.pop() if outer else ""

    def split(self, shape: Sequence[int], strides: Sequence[int]) -> list[tuple[str, int, int]]:
        """Return the axes as (kind, size, stride), the outermost first. kind: "each", "group", or a letter."""
        tiles: list[tuple[str, int, int]] = []
        axes = [i for i, size in enumerate(shape) if size != 1]
        for i in axes:
            size, by = shape[i], strides[i]
            letters = self._letters(size)
            letter = self._channels(letters)
            if not letters and self._fixed and i == axes[-1] and size % self.widths[self._fixed] == 0:
                letter = self._fixed
            width = self.widths[letter] if letter else 1
            groups = self.groups if self.group in letters else 1
            count = size // (width * groups)
            if count > MAX_TILES:
                raise UnsupportedOperation(f"an axis of {self.axes.expression(size)} numbers beside its channels")
            if count > 1:
                tiles.append(("each", count, by * groups * width))
            if groups > 1:
                tiles.append(("group", groups, by * width))
            if letter:
                tiles.append((letter, width, by))
        kinds = [kind for kind, _, _ in tiles if kind != "each"]
        if kinds.count("group") > 1 or len(kinds) - kinds.count("group") > 1:
            raise UnsupportedOperation("a value with two axes of channels")
        return tiles

    def of(self, ref: Ref) -> list[ChannelTile]:
        """Return the tiles of a view, the last axis running fastest."""
        offsets, group, axis, channel = [], 0, "", 0
        for kind, size, by in self.split(ref.shape, ref.strides):
            if kind == "each":
                offsets.append([i * by for i in range(size)])
            elif kind == "group":
                group = by
            elif by:
                axis, channel = kind, by
        if math.prod(map(len, offsets)) > MAX_TILES:
            raise UnsupportedOperation(f"a value of more than {MAX_TILES} numbers for each channel")
        return [ChannelTile(ref.offset + sum(by), group, axis, channel) for by in product(*offsets)]

    def count(self, shape: Sequence[int]) -> int:
        """Return how many tiles a value of this shape has."""
        return math.prod(size for kind, size, _ in self.split(shape, (0,) * len(shape)) if kind == "each")

    def counts(self, shape: Sequence[int], outer: int) -> tuple[int, int]:
        """Return how many tiles the first `outer` axes of a shape have, and the others. Raises UnsupportedOperation.

        A fixed number of channels is looked for on the last axis alone. So the first axes of a value may be single
        numbers, and the same axes without the others be channels.
        """
        parts = shape[:outer], shape[outer:]
        all_axes, first, second = (
            [axis[:2] for axis in self.split(axes, (0,) * len(axes))] for axes in (shape, *parts)
        )
        if all_axes != first + second:
            raise UnsupportedOperation(
                "channels on the last axis of a value that are single numbers before another axis"
            )
        return self.count(parts[0]), self.count(parts[1])


def _views(plan: StepPlan) -> Iterator[Ref]:
    yield from (root.ref for root in plan.roots)
    yield from plan.traced.operands.values()
    for node in plan.needed:
        yield node.whole
        for arg in node.args[:1] if node.kind == "product" else node.args:
            for view in arg if node.kind == "join" else (arg,):
                if isinstance(view, Ref):
                    yield view
