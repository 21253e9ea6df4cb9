"""Minimal gated recurrent unit."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import Channelwise, driven
from scanl.layers.initial_state import Axes
from scanl.ops import linear_scan


@registry.register("mingru")
class MinGRU(Channelwise):
    """minGRU: a gated recurrence whose gates do not depend on the state, so a scan computes it.

    The authors' program scans logarithms, for which g has to be positive. The plain scan here gives the same numbers.

    Parameters as in the authors' program: to_hidden_and_gate (2E, D), hidden first; to_out (D, E).
    Initialisation: as in PyTorch, also in the authors' program.
    """

    id = "S-mingru"
    aliases = ("minimal_gru",)
    equation = (
        "h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t),  z_t = sigmoid(W_z x_t),  "
        "g(v) = v + 1/2 if v >= 0 else sigmoid(v)"
    )
    source = 'Feng et al., "Were RNNs All We Needed?", arXiv:2410.01201, sec. 3.1 and appendix B'
    op = "linear_scan"
    state: ClassVar = Axes("width")
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
        self.to_hidden_and_gate = nn.Linear(dim, 2 * self.width, bias=bias)
        self.to_out = nn.Linear(self.width, dim, bias=bias)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        _, drive = driven(self.to_hidden_and_gate, x, lambda rows: rows.unflatten(-1, (2, -1)))
        h, (last,) = self.advance([drive], [], [state], cu_seqlens)
        return self.to_out(h.to(x.dtype)), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        hidden, gate = widen(p[0]).unbind(2)
        candidate = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        h, last = linear_scan(gate.sigmoid() * candidate, (-gate).sigmoid(), states[0], cu_seqlens=cu_seqlens)
        return h, [last]
