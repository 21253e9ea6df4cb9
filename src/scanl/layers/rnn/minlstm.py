"""Minimal long short-term memory."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import Channelwise, driven
from scanl.layers.initial_state import Axes
from scanl.ops import linear_scan


@registry.register("minlstm")
class MinLSTM(Channelwise):
    """minLSTM: an LSTM whose gates do not depend on the state and sum to 1, so a scan computes it.

    The quotients are sigmoids of the difference of the logarithms of both gates, as in the paper's program in log
    space: they stay accurate where both gates are near 0. The paper scans logarithms too, for which g has to be
    positive. The plain scan here gives the same numbers.

    Parameters as in the program minGRU-pytorch: to_hidden_and_f_i_gate (3E, D), hidden first, then f and i; to_out
    (D, E).
    Initialisation: as in PyTorch.
    """

    id = "S-minlstm"
    aliases = ("minimal_lstm",)
    equation = (
        "h_t = f'_t * h_{t-1} + i'_t * g(W_h x_t),  f'_t = f_t / (f_t + i_t),  i'_t = i_t / (f_t + i_t),  "
        "f_t = sigmoid(W_f x_t),  i_t = sigmoid(W_i x_t),  g(v) = v + 1/2 if v >= 0 else sigmoid(v)"
    )
    source = 'Feng et al., "Were RNNs All We Needed?", arXiv:2410.01201, sec. 3.2 and appendix B'
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
        self.to_hidden_and_f_i_gate = nn.Linear(dim, 3 * self.width, bias=bias)
        self.to_out = nn.Linear(self.width, dim, bias=bias)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        _, drive = driven(self.to_hidden_and_f_i_gate, x, lambda rows: rows.unflatten(-1, (3, -1)))
        h, (last,) = self.advance([drive], [], [state], cu_seqlens)
        return self.to_out(h.to(x.dtype)), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        hidden, forget, write = widen(p[0]).unbind(2)
        candidate = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        ratio = F.logsigmoid(forget) - F.logsigmoid(write)  # log f / i
        h, last = linear_scan((-ratio).sigmoid() * candidate, ratio.sigmoid(), states[0], cu_seqlens=cu_seqlens)
        return h, [last]
