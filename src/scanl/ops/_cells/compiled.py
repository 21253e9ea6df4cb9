"""What the kernels of a cell have in common on every device: the trace, the plans, and what torch computes beside them.

The source of the kernels depends on the step, its options and which operands are given, never on sizes or lengths.
"""

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from scanl.ops._cells.files import load
from scanl.ops._cells.plan import Plan, Root
from scanl.ops._cells.sizes import Axes, choices
from scanl.ops._cells.trace import Node, Ref, Unsupported, alone, trace
from scanl.ops._cells.values import Sizes, Values


class _Place(NamedTuple):
    """Where a value of every step is: an array, or a part of its rows."""

    array: str
    part: Ref | None


class Compiled:
    """The kernels of a cell for certain options and given operands; a subclass writes and runs those of a device."""

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        shapes: Mapping[str, tuple[str, ...] | None],
        output: tuple[str, ...],
        timed: frozenset[str],
        axes: Axes,
        options: Mapping[str, Any],
    ):
        self.axes = axes
        self.traced = traced = trace(step, shapes, output, axes, options)
        self.given = [operand for operand, of in shapes.items() if of is not None]
        self.timed = [operand for operand in self.given if operand in timed]
        self.state = _numbers(traced.last)
        self.y = _numbers(traced.y)
        self.y_is_state = traced.y[1:] == traced.last[1:] and traced.y.node is traced.last.node
        self._plan_backward()
        forward_roots = [Root("y", traced.y), Root("last", traced.last)]
        self._forward_plan = Plan(traced, forward_roots, backward=False)
        self._kept = self._backward_plan.kept
        missing = [node for node in self._kept if node not in self._forward_plan.lefts]
        assert not missing, "the backward pass reads products of the forward pass only"
        self._sizes: dict[tuple[int, ...], Sizes] = {}
        self.name, self.text = name, self.source(name)

    def source(self, name: str) -> str:
        """Return the source of both kernels."""
        raise NotImplementedError

    def refusals(self, sizes: Sizes) -> list[str]:
        """Return why the kernels cannot run operands of these sizes."""
        return []

    @functools.cached_property
    def module(self) -> types.ModuleType:
        return load(self.name, self.text)

    def _size(self, operand: str) -> int:
        return self.traced.operands[operand].node.size

    def _plan_backward(self) -> None:
        """Plan the backward pass: what has a row for every step, what is summed, and what torch does afterwards."""
        traced, roots = self.traced, []
        self._rows: dict[str, int] = {}  # results with a row for every step, and the numbers of a row
        self._sums: dict[str, int] = {}
        self._outer: dict[Node, list[_Place]] = {}  # the arrays whose product over rows and time a node is
        places: dict[tuple, _Place] = {}
        for operand in self.timed:
            places[_key(traced.operands[operand])] = _Place(operand, None)
            ref = traced.gradients[operand]
            if ref is not None:
                self._rows[f"d{operand}"] = _numbers(ref)
                roots.append(Root(f"d{operand}", ref))
                places.setdefault(_key(ref), _Place(f"d{operand}", None))
                if ref.node.kind == "join" and ref == ref.node.whole:
                    for at, value in ref.node.args:
                        if isinstance(value, Ref):
                            places.setdefault(_key(value), _Place(f"d{operand}", at))
        if traced.gradients["state"] is not None:
            roots.append(Root("dstate", traced.gradients["state"]))
        todo = [ref.node for name, ref in traced.gradients.items() if ref is not None and not ref.node.batched]
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.kind == "total":
                name = f"t{node.index}"
                self._sums[name] = _numbers(node.args[0])
                roots.append(Root(name, node.args[0], adds=True))
            elif node.kind == "outer":
                pair = []
                for side, ref in enumerate(node.args):
                    ordered = _rows_first(ref, side, grouped=len(node.whole.shape) == 3)
                    place = places.get(_key(ordered))
                    if place is None:
                        place = places[_key(ordered)] = _Place(f"r{len(places)}", None)
                        self._rows[place.array] = _numbers(ordered)
                        roots.append(Root(place.array, ordered))
                    pair.append(place)
                self._outer[node] = pair
            elif node.kind == "torch":
                todo.extend(arg.node for arg in node.args if isinstance(arg, Ref))
        self._backward_plan = Plan(traced, roots, backward=True)

    # --- calls

    def sizes(self, sizes: Mapping[str, int]) -> Sizes:
        own = {name: sizes[name] for name in self.axes.traced}
        if not all(isinstance(size, int) for size in own.values()):
            return Sizes(self.axes, own)  # symbolic sizes have no hash
        return self._sizes.setdefault(tuple(own.values()), Sizes(self.axes, own))

    def kept_numbers(self, sizes: Sizes) -> int:
        """Return how many numbers the forward pass keeps of every step: the state, unless the output is the state, and
        the products with matrices that the backward pass reads. Elementwise values are computed again.
        """
        return sum(sizes[node.size] for node in self._kept) + (0 if self.y_is_state else sizes[self.state])

    def _gradients(
        self, values: Mapping[str, Tensor], results: Mapping[str, Tensor], dstate: Tensor, torchs: "OfTorch"
    ) -> list[Tensor]:
        """Return the gradient of every operand that is given."""
        found = []
        for operand in self.given:
            ref, like = self.traced.gradients[operand], values[operand]
            if ref is None:
                found.append(torch.zeros_like(like, memory_format=torch.contiguous_format))
            elif operand == "state":
                found.append(dstate)
            elif operand in self.timed:
                found.append(results[f"d{operand}"].view(like.shape))
            else:
                # A copy, because two gradients may be views of one total, and an op's outputs may not share memory.
                found.append(torchs.view(ref).clone(memory_format=torch.contiguous_format).view(like.shape))
        return found


class OfTorch(Values):
    """Values without a batch axis that the kernels read, and those that follow from what the kernels sum."""

    def __init__(self, compiled: Compiled, values: Mapping[str, Tensor], sizes: Sizes):
        super().__init__(values, sizes)
        self.compiled = compiled

    def operands(self, plan: Plan) -> dict[str, Tensor]:
        found = {f"v{node.index}": self.memory(node) for node in plan.values}
        for node in plan.lefts:
            found[f"w{node.index}"] = self.view(node.args[1]).contiguous()
        return found

    def results(self, rows: Mapping[str, Tensor], sums: Tensor) -> None:
        """Take in what the backward pass has found."""
        at = 0
        for name, numbers in self.compiled._sums.items():
            size = self.sizes[numbers]
            node = self.compiled.traced.nodes[int(name[1:])]
            self._memory[node] = sums[at : at + size]
            at += size
        every = {**self.values, **rows}
        for node, places in self.compiled._outer.items():
            *groups, m, n = self.sizes.all(node.whole.shape)
            if not all(every[place.array].numel() for place in places):
                self._memory[node] = sums.new_zeros((*groups, m, n))
                continue
            a, b = (self._rows(every[place.array], place.part) for place in places)
            if groups:
                a, b = (
                    each.reshape(len(each), groups[0], -1, width).transpose(0, 1).reshape(groups[0], -1, width)
                    for each, width in ((a, m), (b, n))
                )
                self._memory[node] = a.mT @ b
            else:
                self._memory[node] = a.reshape(-1, m).T @ b.reshape(-1, n)

    def _rows(self, array: Tensor, part: Ref | None) -> Tensor:
        """Return an array with a row for every step and sequence, or a part of every row."""
        rows = array.reshape(array.shape[0] * array.shape[1], -1)
        if part is None:
            return rows
        shape, strides = self.sizes.all(part.shape), self.sizes.all(part.strides)
        offset = rows.storage_offset() + self.sizes[part.offset]
        return rows.as_strided((len(rows), *shape), (rows.stride(0), *strides), offset)


Made = TypeVar("Made", bound=Compiled)


def generate(
    kind: type[Made],
    name: str,
    step: Callable[..., Any],
    shapes: Mapping[str, tuple[str, ...] | None],
    output: tuple[str, ...],
    timed: frozenset[str],
    sizes: Mapping[str, int],
    fixed: frozenset[str],
    options: Mapping[str, Any],
) -> Made:
    """Return the most general kernels of a cell. Raises Unsupported if its step uses what such kernels cannot run."""
    failure: Exception = Unsupported("no axes")
    for pair in choices(sizes, fixed):
        try:
            with alone():
                one, other = (kind(name, step, shapes, output, timed, axes, options) for axes in pair)
        except (RuntimeError, ValueError) as error:
            failure = error
            continue
        if one.text == other.text:
            return one
        failure = Unsupported("numbers that depend on the sizes in a way that is not known")
    raise failure


def _numbers(ref: Ref) -> int:
    return math.prod(ref.shape)


def _key(ref: Ref) -> tuple:
    return ref.node, ref.offset, tuple((n, by) for n, by in zip(ref.shape, ref.strides, strict=True) if n != 1)


def _rows_first(ref: Ref, side: int, *, grouped: bool) -> Ref:
    """Return the factor of an outer product with its axes in the order: groups, rows, columns."""
    if side == 0:  # (groups, columns, rows), the rows perhaps being the batch alone
        first = 1 if grouped else 0
        order = [*range(first), *range(first + 1, len(ref.shape)), first]
        return Ref(ref.node, ref.offset, *(tuple(each[i] for i in order) for each in (ref.shape, ref.strides)))
    return ref


def rows(value: Tensor) -> Tensor:
    """Return (B, T, E) with a contiguous last axis."""
    flat = (
        value if value.ndim == 3 and value.stride(-1) == 1 else value.flatten(2) if value.ndim > 2 else value[..., None]
    )
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
