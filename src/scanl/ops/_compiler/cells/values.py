"""Values of a traced step that have no batch axis, computed by torch on the real tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.ops._compiler.cells.sizes import TracedAxes
from scanl.ops._compiler.cells.trace import Ref, TraceNode
from scanl.ops._compiler.expressions import value


class Sizes:
    """The real sizes of the axes in one call: they turn the numbers of a trace into real numbers."""

    def __init__(self, axes: TracedAxes, sizes: Mapping[str, int]):
        self.names, self._axes = dict(sizes), axes
        self._found: dict[int, int] = {}

    def __getitem__(self, number: int) -> int:
        if number not in self._found:
            self._found[number] = value(self._axes.expression(number), self.names)
        return self._found[number]

    def all(self, numbers: Sequence[int]) -> list[int]:
        return [self[number] for number in numbers]


class Values:
    """The memory of nodes without a batch axis: the trace's functions, called on the real operands.

    traced: the dtype of the operands in the trace, which stands for the one that they have.
    """

    def __init__(self, values: Mapping[str, Tensor], sizes: Sizes, traced: torch.dtype):
        self.values, self.sizes, self.traced = values, sizes, traced
        self._memory: dict[TraceNode, Any] = {}

    def memory(self, node: TraceNode) -> Any:
        """Return the memory of a node as the trace has laid it out; for a node of "several" results, these."""
        if node not in self._memory:
            if node.kind == "operand":
                self._memory[node] = self.values[node.what].contiguous()
            elif node.kind == "literal" or node.what is torch.full:
                value, *shape = node.args or (node.what,)
                dtype, device = self._argument(node.dtype), self.values["state"].device
                self._memory[node] = torch.full(self.sizes.all(shape), value, dtype=dtype, device=device)
            else:
                function, form = node.what
                args, kwargs = pytree.tree_unflatten([self._argument(arg) for arg in node.args], form)
                changes = isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable
                if changes:  # others may still read what was there before
                    args = (args[0].clone(), *args[1:])
                result = function(*args, **kwargs)
                self._memory[node] = (
                    pytree.tree_leaves(result) if node.kind == "several" else self._with_layout(result, node)
                )
        return self._memory[node]

    def _with_layout(self, value: Tensor, node: TraceNode) -> Tensor:
        """Return a value with the strides of the trace: torch may choose others."""
        strides = tuple(self.sizes.all(node.whole.strides))
        if value.stride() == strides:
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)

    def view(self, ref: Ref) -> Tensor:
        shape, strides, memory = self.sizes.all(ref.shape), self.sizes.all(ref.strides), self.memory(ref.node)
        return memory.as_strided(shape, strides, memory.storage_offset() + self.sizes[ref.offset])

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.memory(value.node) if value.node.kind == "several" else self.view(value)
        if isinstance(value, torch.device):
            return self.values["state"].device
        if value is self.traced:
            return self.values["state"].dtype
        plain = type(value) is not int or value >= 2**62
        return value if plain else self.sizes[value]
