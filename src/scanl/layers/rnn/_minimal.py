"""Base of minGRU and minLSTM: one map makes a candidate and gates from the input, and a scan mixes them."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options
from scanl.layers.base import widen
from scanl.layers.channelwise import ChannelwiseLayer, driven
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_scan


class MinimalLayer(ChannelwiseLayer):
    """Base class: h_t = keep_t ⊙ h_{t-1} + write_t ⊙ g(W_h x_t), g(v) = v + 1/2 if v >= 0 else sigmoid(v).

    projection: name of the map, as in the authors' program; it has the rows of W_h first, then of the gates.
    A subclass defines `weights`.
    """

    projection: ClassVar[str]
    num_gates: ClassVar[int]
    op = "linear_scan"
    state: ClassVar = StateAxes("width")
    sample: ClassVar = {"expand": 1.5}
    residual_out = "to_out"

    def __init__(
        self,
        dim: options.Dim,
        expand: Annotated[options.Expand, "the state has E = int(expand * D) channels"] = 1.0,
        bias: options.Bias = True,
    ) -> None:
        super().__init__()
        self.dim, self.width = dim, int(expand * dim)
        if self.width < 1:
            self._refuse("expand", expand, f"at least 1/{dim} because of dim={dim}")
        setattr(self, self.projection, nn.Linear(dim, (1 + self.num_gates) * self.width, bias=bias))
        self.to_out = nn.Linear(self.width, dim, bias=bias)

    def weights(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keep and write of the gates before their functions, (B, T, E) each."""
        raise NotImplementedError

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        _, drive = driven(getattr(self, self.projection), x, lambda rows: rows.unflatten(-1, (1 + self.num_gates, -1)))
        h, (last,) = self.advance([drive], [], [state], cu_seqlens)
        return self.to_out(h.to(x.dtype)), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        hidden, *gates = widen(p[0]).unbind(2)
        keep, write = self.weights(gates)
        candidate = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        h, last = linear_scan(write * candidate, keep, states[0], cu_seqlens=cu_seqlens)
        return h, [last]
