"""Order the nodes of a trace into the work of one time step.

A step is a sequence of segments. In a segment every sequence runs some loops, then products with matrices run for all
sequences of a group together. A loop computes elementwise values of one shape. It stores the values that other loops or
products need.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scanl.ops._compiler.cells.trace import Ref, TracedStep, TraceNode, contiguous
from scanl.ops._compiler.rules import same


class Store(NamedTuple):
    """A write to a buffer, whose strides are along the axes of the loop. adds: add to what is there."""

    buffer: str
    offset: int
    strides: tuple[int, ...]
    value: "Ref | float"
    adds: bool = False


@dataclass
class StepLoop:
    shape: tuple[int, ...]
    nodes: list[TraceNode] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)

    def holds(self, ref: Ref) -> bool:
        """Whether this loop computes the value of the view at its own index, so that it lies in a register."""
        if ref.node.kind != "elementwise" or not any(ref.node is node for node in self.nodes):
            return False
        return squeezed(ref)[1:] == squeezed(ref.node.whole)[1:]


@dataclass
class Reduce:
    node: TraceNode


@dataclass
class Segment:
    items: list[StepLoop | Reduce] = field(default_factory=list)
    products: list[TraceNode] = field(default_factory=list)


class Root(NamedTuple):
    """A result: the buffer that gets it, contiguous, or with `adds` its sum over time."""

    buffer: str
    ref: Ref
    adds: bool = False


def squeezed(ref: Ref, like: Sequence[int] | None = None) -> Ref:
    """Return the view without the axes that have size 1 in `like` (its own shape if None)."""
    axes = [i for i, size in enumerate(ref.shape if like is None else like) if size != 1]
    return Ref(ref.node, ref.offset, tuple(ref.shape[i] for i in axes), tuple(ref.strides[i] for i in axes))


class StepPlan:
    """The work of one time step.

    again: products of the forward step that the backward pass computes again.   needed: the nodes to compute, in order.
    kept: the other products of the forward step that the backward pass reads.
    values: nodes without a batch axis that loops read.   scratch: nodes in scratch memory.   lefts: the left factor of
    every product, in scratch or the state.
    """

    def __init__(self, traced: TracedStep, roots: Sequence[Root], *, backward: bool, again: Collection[TraceNode] = ()):
        self.traced, self.roots, self.backward, self.again = traced, roots, backward, again
        self.kept: list[TraceNode] = []
        self.values: list[TraceNode] = []
        self.scratch: list[TraceNode] = []
        self.lefts: dict[TraceNode, Ref] = {}
        self.segments: list[Segment] = []
        self._level: dict[TraceNode, int] = {}
        self._position: dict[TraceNode, int] = {}
        self._buffer: dict[TraceNode, str] = {}
        self.needed = needed = self._needed()
        for node in needed:
            self._level[node] = max([0, *(self._after(arg) for arg in arguments(node))])
        direct = self._direct(needed)
        for node in needed:
            self._place(node, direct.get(node))
        for root in roots:
            if root.ref.node not in direct:
                shape = squeezed(root.ref).shape
                strides = squeezed(Ref(root.ref.node, 0, root.ref.shape, contiguous(root.ref.shape))).strides
                self._store(self._after(root.ref), shape, Store(root.buffer, 0, strides, root.ref, root.adds), 0)
        self._materialise()
        self.lanes = self._lanes()

    def _lanes(self) -> int:
        """Return the size of the last axis if every channel along it is computed from that channel alone; else 0."""
        sizes: set[int] = {self.traced.last.shape[-1]} if self.traced.last.shape else {0}
        if self.lefts:
            return 0
        views: list[Ref] = []
        for segment in self.segments:
            for item in segment.items:
                if isinstance(item, Reduce) or not item.shape:
                    return 0
                sizes.add(item.shape[-1])
                views += [
                    squeezed(arg, node.whole.shape) for node in item.nodes for arg in node.args if isinstance(arg, Ref)
                ]
                views += [store.value for store in item.stores if isinstance(store.value, Ref)]
                views += [Ref(self.traced.last.node, s.offset, item.shape, s.strides) for s in item.stores]
        lanes = sizes.pop()
        separate = all(
            ref.strides[-1] == 1 and all(by % lanes == 0 for by in (ref.offset, *ref.strides[:-1]))
            for ref in views
            if ref.node.batched
        )
        return 0 if sizes or not separate else lanes

    def buffer(self, node: TraceNode) -> str:
        """Return the name of the buffer that holds a node."""
        return self._buffer.get(node) or f"s{node.index}"

    def _needed(self) -> list[TraceNode]:
        """Return the nodes to compute, in order."""
        nodes: set[TraceNode] = set()
        todo = [root.ref.node for root in self.roots]
        while todo:
            node = todo.pop()
            if node in nodes or node.kind == "literal":
                continue
            nodes.add(node)
            if not node.batched:
                self.values.append(node)
                self._buffer[node] = f"v{node.index}"
            elif node.kind == "operand":
                self._buffer[node] = node.what
            elif (
                self.backward and node.kind == "product" and node.index < self.traced.forward and node not in self.again
            ):
                self.kept.append(node)
                self._buffer[node] = f"k{node.index}"
            else:
                todo.extend(ref.node for ref in arguments(node))
        self.kept.sort(key=lambda node: node.index)
        self.values.sort(key=lambda node: node.index)
        return sorted((node for node in nodes if node not in self._buffer), key=lambda node: node.index)

    def _after(self, ref: Ref) -> int:
        """Return the first segment in which a value may be used."""
        return self._level.get(ref.node, 0) + (ref.node.kind == "product" and ref.node in self._level)

    def _direct(self, needed: Sequence[TraceNode]) -> dict[TraceNode, str]:
        """Return the joins that are a result and nothing else: their parts are written to the result at once."""
        uses: dict[TraceNode, int] = {}
        for node in needed:
            for ref in arguments(node):
                uses[ref.node] = uses.get(ref.node, 0) + 1
        for root in self.roots:
            uses[root.ref.node] = uses.get(root.ref.node, 0) + 1
        return {
            root.ref.node: root.buffer
            for root in self.roots
            if root.ref.node.kind == "join"
            and uses[root.ref.node] == 1
            and not root.adds
            and root.ref == root.ref.node.whole
            and squeezed(root.ref).strides == squeezed(root.ref._replace(strides=contiguous(root.ref.shape))).strides
        }

    def _segment(self, level: int) -> Segment:
        while len(self.segments) <= level:
            self.segments.append(Segment())
        return self.segments[level]

    def _earliest(self, value: "Ref | float", level: int, shape: tuple[int, ...]) -> int:
        """Return the first item of a segment that may read a value."""
        if not isinstance(value, Ref) or self._level.get(value.node) != level:
            return 0
        node = value.node
        same = node.kind == "elementwise" and squeezed(value)[1:] == squeezed(node.whole)[1:] and value.shape == shape
        return self._position[node] + (0 if same else 1)

    def _loop(self, level: int, shape: tuple[int, ...], earliest: int) -> tuple[StepLoop, int]:
        items = self._segment(level).items
        for at in range(earliest, len(items)):
            item = items[at]
            if isinstance(item, StepLoop) and item.shape == shape:
                return item, at
        items.append(StepLoop(shape))
        loop = items[-1]
        assert isinstance(loop, StepLoop)
        return loop, len(items) - 1

    def _store(self, level: int, shape: tuple[int, ...], store: Store, earliest: int) -> int:
        value = store.value
        if isinstance(value, Ref):
            value = squeezed(value)
            earliest = max(earliest, self._earliest(value, level, shape))
        loop, at = self._loop(level, shape, earliest)
        loop.stores.append(store._replace(value=value))
        return at

    def _place(self, node: TraceNode, result: str | None) -> None:
        level = self._level[node]
        segment = self._segment(level)
        if node.kind == "elementwise":
            full_shape = node.whole.shape
            shape = squeezed(node.whole).shape
            node_args = [squeezed(arg, full_shape) if isinstance(arg, Ref) else arg for arg in node.args]
            loop, at = self._loop(level, shape, max([0, *(self._earliest(arg, level, shape) for arg in node_args)]))
            loop.nodes.append(node)
            self._position[node] = at
        elif node.kind == "join":
            name = result or self.buffer(node)
            self._buffer[node] = name
            fence = last = 0
            for i, (at, value) in enumerate(node.args):
                place = squeezed(at)
                source = squeezed(value, at.shape) if isinstance(value, Ref) else value
                used = self._store(level, place.shape, Store(name, at.offset, place.strides, source), fence)
                fence = used + 1 if i == 0 and at == node.whole and len(node.args) > 1 else fence
                last = max(last, used)
            self._position[node] = last
            if result is None:
                self.scratch.append(node)
        elif node.kind == "reduce":
            segment.items.append(Reduce(node))
            self._position[node] = len(segment.items) - 1
            self.scratch.append(node)
        else:
            self.lefts[node] = self._left(node, level)
            segment.products.append(node)
            self.scratch.append(node)

    def _left(self, node: TraceNode, level: int) -> Ref:
        """Return the left factor in memory that a product can read: scratch or the carried state, its last axis
        contiguous."""
        lhs: Ref = node.args[0]
        carried = "dlast" if self.backward else "state"
        if (lhs.node in self._level or lhs.node.what == carried) and lhs.strides[-1] == 1:
            return lhs
        index = len(self.traced.nodes)
        copy = TraceNode("elementwise", 0, 1, same, (lhs,), lhs.node.dtype, index, lhs)
        copy.size, copy.whole = math.prod(lhs.shape), Ref(copy, 0, lhs.shape, contiguous(lhs.shape))
        self.traced.nodes.append(copy)
        self._level[copy] = level
        self._place(copy, None)
        return copy.whole

    def _materialise(self) -> None:
        """Store values in scratch that are read from memory."""
        sources: set[TraceNode] = {ref.node for ref in self.lefts.values()}
        for segment in self.segments:
            for item in segment.items:
                if isinstance(item, Reduce):
                    sources.add(item.node.args[0].node)
                    continue
                for node in item.nodes:
                    views = (squeezed(arg, node.whole.shape) for arg in node.args if isinstance(arg, Ref))
                    sources.update(ref.node for ref in views if not item.holds(ref))
                values = (store.value for store in item.stores if isinstance(store.value, Ref))
                sources.update(ref.node for ref in values if not item.holds(ref))
        for segment in self.segments:
            for item in segment.items:
                if isinstance(item, Reduce):
                    continue
                for node in item.nodes:
                    if node in sources:
                        target = squeezed(node.whole)
                        item.stores.append(Store(self.buffer(node), 0, target.strides, target))
                        self.scratch.append(node)


def arguments(node: TraceNode) -> Iterator[Ref]:
    """Return the views that a node with a batch axis reads, but for the matrix of a product."""
    for arg in node.args[:1] if node.kind == "product" else node.args:
        value = arg[1] if node.kind == "join" else arg
        if isinstance(value, Ref) and value.node.kind != "literal":
            yield value
