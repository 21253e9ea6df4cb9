"""Base class of layers whose forget gate has a lower bound that rises with their depth in a stack."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scanl.layers.base import Layer


@dataclass(frozen=True)
class LowestLayer:
    """Reference to the lowest such layer of a stack, from whose Γ the others read their bound, and the index into Γ.

    The index is the number of such layers below. This is not a module, so torch counts Γ only as a parameter of the
    lowest layer.
    """

    lowest: "LowerBoundedLayer"
    below: int


class LowerBoundedLayer(Layer):
    """Base class: in a stack of L such layers, layer l has the bound γ^l = Σ_{j≤l} p_j - p_1.

    p is the softmax of Γ (L, D) over depth. So γ^1 = 0, and with Γ = 0, γ^l = (l-1)/L. The lowest layer owns Γ as
    `gamma`. Outside a stack γ = 0. All such layers of a stack have the same D, of any class.
    """

    gamma: nn.Parameter | None  # only in the lowest layer of a stack

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gamma", None)
        self._bound: LowestLayer | None = None

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        peers = [layer for layer in layers if isinstance(layer, LowerBoundedLayer)]
        below = sum(isinstance(layer, LowerBoundedLayer) for layer in layers[:index])
        if below:
            self._bound = LowestLayer(peers[0], below)
        elif len(peers) > 1:
            weight = next(self.parameters())
            self.gamma = nn.Parameter(torch.zeros(len(peers), self.dim, dtype=weight.dtype, device=weight.device))

    def lower_bound(self) -> Tensor | float:
        """Return γ (D) of this layer; 0 if it is the lowest or not in a stack."""
        if self._bound is None:
            return 0.0
        gamma = self._bound.lowest.gamma
        assert gamma is not None
        return gamma.softmax(0)[1 : self._bound.below + 1].sum(0)
