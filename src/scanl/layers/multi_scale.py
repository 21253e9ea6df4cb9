"""Linear recurrences on several time scales, in one body."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.linear_rnn import LinearRNN
from scanl.ops import linear_scan
from scanl.options import at_least


@registry.register("multi_scale")
class MultiScaleRNN(LinearRNN):
    """The mean of m leaky sums of the same input, each with one learned decay, in the body of `linear_rnn`.

    Differs from the source: the decays are trained through a sigmoid, which keeps them between 0 and 1.

    Parameters: as in `linear_rnn`, but decay (m).
    Initialisation: sigmoid(decay) = linspace(0.1, 0.9, m); the body as in `linear_rnn`.
    State: LinearRNNState, whose recurrent part is (B, m, hidden_dim).
    """

    id = "S-multiscale"
    equation = (
        "s^r_t = sigmoid(decay_r) * s^r_{t-1} + SiLU(conv(W_x u))_t,  y_t = W_o (LN((1/m) sum_r s^r_t) * SiLU(W_z u_t))"
    )
    source = "Linear RNN base block, multi-scale recurrence"
    sample: ClassVar = {"num_scales": 2}

    def __init__(
        self,
        dim: options.Dim,
        expand: Annotated[int, at_least(1), "hidden_dim = expand * dim channels in the recurrence"] = 2,
        num_scales: Annotated[int, at_least(1), "m, number of decays"] = 4,
        **body: Any,
    ) -> None:
        super().__init__(dim, expand, **body)
        self.num_scales = num_scales
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, num_scales).logit())

    def recurrent_shape(self) -> tuple[int, ...]:
        return len(self.decay), self.hidden_dim

    def recur(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = self.recurrent_shape()
        decay = self.decay.sigmoid()[:, None].expand(shape)
        s, last = linear_scan(x[:, :, None].expand(*x.shape[:2], *shape), decay, state, cu_seqlens=cu_seqlens)
        return s.mean(2), last
