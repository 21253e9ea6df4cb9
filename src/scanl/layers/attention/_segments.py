"""Base class of attention that remembers earlier segments."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from scanl.layers.base import Layer, widen
from scanl.layers.packing import each_alone
from scanl.layers.parts.exported import exported
from scanl.layers.parts.segments import CallSegments
from scanl.layers.state import State, map_leaves


class SegmentLayer(Layer):
    """Base class of layers that act at the end of each segment of `chunk_size` steps.

    A subclass defines `over`. Its state is a NamedTuple whose last field, `steps`, counts the steps that were read.
    """

    residual_out: ClassVar[str | None] = "o_proj"

    chunk_size: int

    def run(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        if cu_seqlens is not None:
            return each_alone(lambda alone, row: self.run(alone, row, None), x, state, cu_seqlens)
        if torch.compiler.is_exporting():
            return exported(self, x, state)
        if x.shape[1] == 0:
            return x, self._begin(x, state, None)
        segments = CallSegments(x.shape[1], None if state is None else state.steps, self.chunk_size)
        state = self._begin(x, state, None)
        wide = widen(x.new_zeros(())).dtype
        state = map_leaves(lambda leaf: leaf.to(wide) if leaf.is_floating_point() else leaf, state)
        return self.over(x, state, segments)

    def over(self, x: Tensor, state: Any, segments: CallSegments) -> tuple[Tensor, State]:
        """Return y and the state after x (B, T, D), T at least 1. The state's tensors are float32 or wider."""
        raise NotImplementedError
