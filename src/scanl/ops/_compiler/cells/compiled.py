"""The kernels of a cell on any device: the trace, the plans, and the part that torch computes.

The source of the kernels depends on the step, its options and which operands are given, never on sizes or lengths.
"""

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.ops._compiler.cells.plan import Root, StepPlan
from scanl.ops._compiler.cells.sizes import TracedAxes, choices
from scanl.ops._compiler.cells.trace import Ref, TraceNode, alone, trace
from scanl.ops._compiler.cells.values import Sizes, Values
from scanl.ops._compiler.files import load
from scanl.ops._compiler.rules import UnsupportedOperation
from scanl.ops._compiler.views import merged
from scanl.ops.products.by_onednn import add_transposed

AFTER, BEFORE = "states after", "states before"  # the steps; no operand can have these names
MAX_MEMORY_RATIO = 3  # times the inputs, outputs and states: what the forward and the backward pass may take together
LENGTH = 4096  # steps over which this is counted


class _Place(NamedTuple):
    """Where a value of every step is: an array, or a part of its rows."""

    array: str
    view: Ref | None


class States:
    """The states of all steps, which the forward pass has stored.

    after: the states after the steps, whose rows have at least `size` numbers.   first: the state of every sequence
    before its first step.   reverse, cu_seqlens: as in the call.
    """

    def __init__(self, after: Tensor, size: int, first: Tensor, reverse: bool, cu_seqlens: Tensor | None):
        self.steps = after.shape[1]
        self.after = flat(after)[:, :size]
        self.first = first.reshape(len(first), size)
        self.reverse, self.cu_seqlens = reverse, cu_seqlens
        if cu_seqlens is not None:
            ends = cu_seqlens.long()
            begins = ends[1:] - 1 if reverse else ends[:-1]
            self.begins = torch.where(ends.diff() > 0, begins, len(self.after))  # first rows of what has steps

    def entering(self, low: int, high: int) -> Tensor:
        """Return the states of all sequences before these steps."""
        at = high if self.reverse else low - 1
        if self.cu_seqlens is not None or not 0 <= at < self.steps:
            return self.first.contiguous()
        return self.after[at :: self.steps].contiguous()

    def before(self, low: int, high: int) -> Tensor:
        """Return the states before the steps of these rows."""
        shift, last = (1, self.steps - 1) if self.reverse else (-1, 0)
        some = slice(-((last - low) // self.steps), -((last - high) // self.steps))  # sequences that begin here
        if self.cu_seqlens is None and some.start == some.stop:
            return self.after[low + shift : high + shift]
        count = high - low
        begin, end = max(low + shift, 0), min(high + shift, len(self.after))
        rows = self.after.new_empty((count + 1, self.after.shape[1]))
        rows[begin - shift - low : end - shift - low] = self.after[begin:end]
        if self.cu_seqlens is None:
            rows[some.start * self.steps + last - low : count : self.steps] = self.first[some]
            return rows[:count]
        here = (self.begins >= low) & (self.begins < high)  # nothing here waits for a GPU: the others go last
        return rows.index_copy_(0, torch.where(here, self.begins - low, count), self.first)[:count]


class CompiledCell:
    """The kernels of a cell for certain options and operands; a subclass writes and runs the kernels of a device.

    frugal: store no products with matrices, but compute all of them again in the backward pass. Otherwise as many are
    stored as `MAX_MEMORY_RATIO` allows if all axes have the same size.
    """

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        shapes: Mapping[str, tuple[str, ...] | None],
        output: tuple[str, ...],
        timed: frozenset[str],
        axes: TracedAxes,
        options: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        frugal: bool,
    ):
        self.axes, self.frugal, self.dtype = axes, frugal, dtype
        self.traced = traced = trace(step, shapes, output, axes, options, dtype)
        self.present = [operand for operand, of in shapes.items() if of is not None]
        self.timed = [operand for operand in self.present if operand in timed]
        self.state = _numbers(traced.last)
        self.y = _numbers(traced.y)
        self._sizes: dict[tuple[int, ...], Sizes] = {}
        self._within: dict[Sizes, bool] = {}
        self.y_is_state = traced.y[1:] == traced.last[1:] and traced.y.node is traced.last.node
        self._plan_backward()
        forward_roots = [Root("y", traced.y), Root("last", traced.last)]
        self._forward_plan = StepPlan(traced, forward_roots, backward=False)
        self._kept = self._backward_plan.kept
        missing = [node for node in self._kept if node not in self._forward_plan.lefts]
        assert not missing, "the backward pass reads products of the forward pass only"
        self.name, self.text = name, self.source(name)
        self.described = self.text, *self._beside()

    def source(self, name: str) -> str:
        """Return the source of both kernels."""
        raise NotImplementedError

    def _beside(self) -> Iterator[Any]:
        """Yield the operations that torch computes, with numbers as expressions of the axes."""

        def of(value: Any) -> Any:
            if isinstance(value, Ref):
                node, *numbers = value
                literal = node.what if node.kind == "literal" else None
                return node.index, literal, *(of(number) for number in pytree.tree_leaves(numbers))
            if value is self.dtype:
                return "the dtype of the operands"
            return self.axes.expression(value) if type(value) is int and value < 2**62 else repr(value)

        for node in self.traced.nodes:
            if node.kind in ("torch", "several"):
                yield node.index, repr(node.what), *map(of, node.args)
        yield from ((name, ref and of(ref)) for name, ref in self.traced.gradients.items())

    def refusals(self, sizes: Sizes) -> list[str]:
        """Return why the kernels cannot run operands of these sizes."""
        return []

    @functools.cached_property
    def module(self) -> types.ModuleType:
        return load(self.name, self.text)

    def _size(self, operand: str) -> int:
        return self.traced.operands[operand].node.size

    def _plan_backward(self) -> None:
        """Plan the backward pass: its outputs with a row for every step, its sums over time, and torch's work
        afterwards."""
        traced, roots = self.traced, []
        self._rows: dict[str, int] = {}  # gradients with a row for every step, and the numbers of a row
        self._factors: dict[str, int] = {}  # of products, likewise
        self._sums: dict[str, int] = {}
        self._outer: dict[TraceNode, list[_Place]] = {}  # the arrays whose product over rows and time a node is
        places: dict[tuple, _Place] = {_key(traced.y): _Place("y", None)}
        places |= _parts(AFTER, traced.last)
        for operand in self.timed:
            places[_key(traced.operands[operand])] = _Place(operand, None)
            ref = traced.gradients[operand]
            if ref is not None:
                self._rows[f"d{operand}"] = _numbers(ref)
                roots.append(Root(f"d{operand}", ref))
                places = _parts(f"d{operand}", ref) | places
        carried = traced.gradients["state"]
        assert carried is not None
        roots.append(Root("dstate", carried))
        todo = [ref.node for name, ref in traced.gradients.items() if ref is not None and not ref.node.batched]
        visited: set[TraceNode] = set()
        while todo:
            node = todo.pop()
            if node in visited:
                continue
            visited.add(node)
            if node.kind == "total":
                name = f"t{node.index}"
                self._sums[name] = _numbers(node.args[0])
                roots.append(Root(name, node.args[0], adds=True))
            elif node.kind == "outer":
                pair = []
                for side, ref in enumerate(node.args):
                    ordered = _rows_first(ref, side, grouped=len(node.whole.shape) == 3)
                    place = places.get(_key(ordered))
                    if ordered.node is traced.operands["state"].node:
                        place = _Place(BEFORE, ordered)
                    elif place is None:
                        place = places[_key(ordered)] = _Place(f"r{len(self._factors)}", None)
                        self._factors[place.array] = _numbers(ordered)
                        roots.append(Root(place.array, ordered))
                    pair.append(place)
                self._outer[node] = pair
            elif node.kind in ("torch", "several"):
                todo.extend(arg.node for arg in node.args if isinstance(arg, Ref))
        self._backward_plan = StepPlan(traced, roots, backward=True)
        again = self._again(self._backward_plan.kept)
        if again:
            self._backward_plan = StepPlan(traced, roots, backward=True, again=again)

    def _again(self, products: Sequence[TraceNode]) -> set[TraceNode]:
        """Return which of the products that the backward pass reads it computes again.

        The others are stored. A stored number saves as many multiplications as the matrix has rows.
        """
        typical = self.sizes(self.axes.typical())
        room, again = 0.0 if self.frugal else self._room(typical), set()
        for node in sorted(products, key=lambda node: -typical[node.args[1].shape[-2]]):
            room -= typical[node.size]
            if room < 0:
                again.add(node)
                room += typical[node.size]
        return again

    def _room(self, sizes: Sizes) -> float:
        """Return how many numbers of a step may be stored besides the states, its inputs and outputs and what the
        backward pass writes, for all to take `MAX_MEMORY_RATIO` times its inputs, outputs and states.
        """
        inputs, state = sum(sizes[self._size(n)] for n in self.timed), sizes[self.state]
        written = sum(sizes[numbers] for numbers in self._rows.values()) + sizes[self.y]
        passing = sum(sizes[numbers] for numbers in self._factors.values()) * min(self.window(sizes) / LENGTH, 1)
        required = inputs + sizes[self.y] + written + passing + (0 if self.y_is_state else state)
        return MAX_MEMORY_RATIO * (inputs + sizes[self.y] + state) - required

    def window(self, sizes: Sizes) -> int:
        """Return for how many steps at a time the backward pass stores factors of products."""
        raise NotImplementedError

    def within(self, sizes: Sizes) -> bool:
        """Whether the stored products, if there are any, are within the memory that `MAX_MEMORY_RATIO` allows."""
        if sizes not in self._within:
            stored = sum(sizes[node.size] for node in self._kept)
            self._within[sizes] = not stored or stored <= self._room(sizes)
        return self._within[sizes]

    # --- calls

    def sizes(self, sizes: Mapping[str, int]) -> Sizes:
        traced_sizes = {name: sizes[name] for name in self.axes.traced}
        if not all(isinstance(size, int) for size in traced_sizes.values()):
            return Sizes(self.axes, traced_sizes)  # symbolic sizes have no hash
        return self._sizes.setdefault(tuple(traced_sizes.values()), Sizes(self.axes, traced_sizes))

    def kept_numbers(self, sizes: Sizes) -> int:
        """Return how many numbers the forward pass keeps of every step: the state, unless the output is the state, and
        products with matrices that the backward pass reads. The others, and elementwise values, are computed again.
        """
        return sum(sizes[node.size] for node in self._kept) + (0 if self.y_is_state else sizes[self.state])

    def _gradients(
        self, values: Mapping[str, Tensor], results: Mapping[str, Tensor], dstate: Tensor, torchs: "OfTorch"
    ) -> list[Tensor]:
        """Return the gradient of every operand that is not None."""
        gradients = []
        for operand in self.present:
            ref, like = self.traced.gradients[operand], values[operand]
            if operand == "state":
                gradients.append(dstate)
            elif ref is None:
                gradients.append(torch.zeros_like(like, memory_format=torch.contiguous_format))
            elif operand in self.timed:
                gradients.append(results[f"d{operand}"].view(like.shape))
            else:
                # A copy, because two gradients may be views of one total, and an op's outputs may not share memory.
                gradients.append(torchs.view(ref).clone(memory_format=torch.contiguous_format).view(like.shape))
        return gradients


class OfTorch(Values):
    """Values without a batch axis that the kernels read, and values that follow from the kernels' sums."""

    def __init__(self, compiled: CompiledCell, values: Mapping[str, Tensor], sizes: Sizes):
        super().__init__(values, sizes, compiled.dtype)
        self.compiled = compiled

    def operands(self, plan: StepPlan, layout: Callable[[Tensor], Tensor] = Tensor.contiguous) -> dict[str, Tensor]:
        """Return the values that the kernels of a plan read, and the matrices, laid out by this function."""
        dtype = self.values["state"].dtype
        values = {f"v{node.index}": self.memory(node).to(dtype) for node in plan.values}
        for node in plan.lefts:
            values[f"w{node.index}"] = layout(self.view(node.args[1]))
        return values

    def start(self, arrays: Mapping[str, Tensor], states: States) -> None:
        """Set the products of rows, summed over the rows, to zero. arrays: those with a row for every step."""
        outer = self.compiled._outer
        self.used = used = {place.array for places in outer.values() for place in places}
        self.states = states
        self.arrays = {name: flat(value) for name, value in {**self.values, **arrays}.items() if name in used}
        self.arrays[AFTER] = states.after
        self._memory |= {node: states.after.new_zeros(self.sizes.all(node.whole.shape)) for node in outer}

    def add(self, low: int, high: int, factors: Mapping[str, Tensor]) -> None:
        """Add the products of these rows. factors: arrays that have these rows alone."""
        if low == high:
            return
        window = {**factors, **({BEFORE: self.states.before(low, high)} if BEFORE in self.used else {})}
        for node, places in self.compiled._outer.items():
            for place in places:
                if place.array not in window:
                    window[place.array] = self.arrays[place.array][low:high]
            if not all(window[place.array].numel() for place in places):
                continue
            total = self._memory[node]
            *groups, m, n = total.shape
            a, b = (self._rows(window[place.array], place.view) for place in places)
            if groups:
                a, b = (
                    tensor.reshape(len(tensor), groups[0], -1, width).transpose(0, 1).reshape(groups[0], -1, width)
                    for tensor, width in ((a, m), (b, n))
                )
            else:
                a, b = a.reshape(-1, m), b.reshape(-1, n)
            add_transposed(total, a, b)

    def finish(self, sums: Tensor) -> None:
        """Take in the sums over time."""
        at = 0
        for name, numbers in self.compiled._sums.items():
            size = self.sizes[numbers]
            node = self.compiled.traced.nodes[int(name[1:])]
            self._memory[node] = sums[at : at + size]
            at += size

    def _rows(self, rows: Tensor, view: Ref | None) -> Tensor:
        """Return a part of every row."""
        if view is None:
            return rows
        shape, strides = self.sizes.all(view.shape), self.sizes.all(view.strides)
        offset = rows.storage_offset() + self.sizes[view.offset]
        return rows.as_strided((len(rows), *shape), (rows.stride(0), *strides), offset)


Made = TypeVar("Made", bound=CompiledCell)


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
    sums: Mapping[str, Sequence[Sequence[str]]],
    *,
    frugal: bool,
) -> Made:
    """Return the most general kernels of a cell.

    Raises UnsupportedOperation if its step uses what such kernels cannot run.
    They are for every dtype: the two traces that must agree differ in that, too.
    """
    failure: Exception | None = None
    for pair in choices(sizes, fixed, sums):

        def made(axes: TracedAxes, dtype: torch.dtype) -> Made:
            with alone():
                return kind(name, step, shapes, output, timed, axes, options, dtype, frugal=frugal)

        try:
            one, other = map(made, pair, (torch.float64, torch.float32))
            if one.described == other.described:
                return one
            if one.described != made(pair[0], torch.float32).described:
                raise UnsupportedOperation("numbers or branches that depend on the dtype")
            raise UnsupportedOperation("numbers that depend on the sizes in a way that is not known")
        except (RuntimeError, ValueError, UnsupportedOperation) as error:
            failure = failure if isinstance(failure, UnsupportedOperation) else error
    assert failure is not None
    raise failure


def _numbers(ref: Ref) -> int:
    return math.prod(ref.shape)


def _key(ref: Ref) -> tuple:
    """Return what two views of the same numbers in the same order have in common: axes that can be merged are."""
    sizes, (strides,) = merged(ref.shape, ref.strides)
    return ref.node, ref.offset, *sizes, *strides


def _parts(array: str, ref: Ref) -> dict[tuple, _Place]:
    """Return the places of a value, and of what it joins, in the rows of an array."""
    places = {_key(ref): _Place(array, None)}
    if ref.node.kind == "join" and ref == ref.node.whole:
        for at, value in ref.node.args:
            if isinstance(value, Ref):
                places.setdefault(_key(value), _Place(array, at))
    return places


def _rows_first(ref: Ref, side: int, *, grouped: bool) -> Ref:
    """Return the factor of an outer product with its axes in the order: groups, rows, columns."""
    if side == 0:  # (groups, columns, rows), the rows perhaps being the batch alone
        first = 1 if grouped else 0
        order = [*range(first), *range(first + 1, len(ref.shape)), first]
        return Ref(ref.node, ref.offset, *(tuple(numbers[i] for i in order) for numbers in (ref.shape, ref.strides)))
    return ref


def flat(value: Tensor) -> Tensor:
    """Return (B·T, E)."""
    return value.reshape(value.shape[0] * value.shape[1], math.prod(value.shape[2:]))


def rows(value: Tensor) -> Tensor:
    """Return (B, T, E) with a contiguous last axis."""
    flat = (
        value if value.ndim == 3 and value.stride(-1) == 1 else value.flatten(2) if value.ndim > 2 else value[..., None]
    )
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
