r"""Linear recurrences on several time scales, in one body.

.. math:: s^r_t = \sigma(d_r) s^r_{t-1} + \mathrm{SiLU}(\mathrm{conv}(W_x u))_t, \quad
          y_t = W_o (\mathrm{LN}(\tfrac 1 m \sum_r s^r_t) \odot \mathrm{SiLU}(W_z u_t))
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import register
from scanl.layers.linear_rnn import LinearRNN
from scanl.ops import linear_scan


@register("multi_scale")
class MultiScale(LinearRNN):
    """The mean of m leaky sums of the same input, each with one learned decay, in the body of `linear_rnn`.

    Differs from the source: the decays are trained through a sigmoid, which keeps them between 0 and 1.

    Args:
        dim: D, model width.
        scales: m, number of decays.
        expand: hidden_dim = expand * dim channels in the recurrence.
        bias: biases in the projections and the convolution.
        use_short_conv: a short causal convolution before the recurrence.
        conv_size: window of the convolution.
        norm_before_gate: see `linear_rnn`.

    Parameters: as of `linear_rnn`, but decay (m).
    Initialisation: sigmoid(decay) = linspace(0.1, 0.9, m); the body as of `linear_rnn`.
    State: LinearRNNState, whose recurrent part is (B, m, hidden_dim).
    """

    id = "S-multiscale"
    aliases = ("MultiScaleRNN",)
    equation = (
        "s^r_t = sigmoid(decay_r) * s^r_{t-1} + SiLU(conv(W_x u))_t,  y_t = W_o (LN((1/m) sum_r s^r_t) * SiLU(W_z u_t))"
    )
    source = "Linear RNN base block, multi-scale recurrence"
    sample: ClassVar = {"scales": 2}

    def __init__(
        self,
        dim: int,
        scales: int = 4,
        expand: int = 2,
        bias: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        norm_before_gate: bool = True,
    ) -> None:
        if scales < 1:
            raise ConfigError(f"multi_scale: scales is {scales}, expected at least 1")
        super().__init__(dim, expand, bias, use_short_conv, conv_size, norm_before_gate)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, scales).logit())

    def recurrent_shape(self) -> tuple[int, ...]:
        return len(self.decay), self.hidden_dim

    def recur(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = self.recurrent_shape()
        decay = self.decay.sigmoid()[:, None].expand(shape)
        s, last = linear_scan(x[:, :, None].expand(*x.shape[:2], *shape), decay, state, cu_seqlens=cu_seqlens)
        return s.mean(2), last
