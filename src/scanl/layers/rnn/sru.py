"""Simple recurrent unit."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops import sru


@registry.register("sru")
class SRU(ChannelwiseLayer, SolvedLayer):
    """SRU: a gated average of projected inputs for each channel, and a highway past it.

    As in the released code, the gate r reads the old state. In the paper's first version it reads the new state.

    Parameters as in PyPI's sru: weight (D, 3D), whose columns are W, W_f and W_r of the first channel, then of
    the second; weight_c (2D), v_f before v_r, a buffer of zeros in "v1"; bias (2D), b_f before b_r; layer_norm; and the
    buffer scale_x, α.
    Initialisation as in that code: weight U(±sqrt(3/D)); in "v2" W_f and W_r are then multiplied by sqrt(1/2), and
    weight_c is U(±sqrt(3/2)); with layer_norm, W, W_f and W_r are multiplied by 0.1; bias 0, highway_bias.
    """

    id = "S-sru"
    aliases = ("simple_recurrent_unit",)
    equation = (
        "c_t = f_t * c_{t-1} + (1 - f_t) * W x_t,  h_t = r_t * c_t + (1 - r_t) * alpha x_t,  "
        "f_t, r_t = sigmoid(W x_t + v * c_{t-1} + b)"
    )
    source = (
        'Lei, Zhang, Wang, Dai and Artzi, "Simple Recurrent Units for Highly Parallelizable Recurrence", '
        "arXiv:1709.02755, eq. (1) to (4)"
    )
    op = "sru"
    state: ClassVar = StateAxes("dim", "c")

    scale_x: Tensor

    def __init__(
        self,
        dim: options.Dim,
        variant: Annotated[
            Literal["v1", "v2"],
            'in "v1" the gates do not read the state (v_f = v_r = 0), so the recurrence is linear',
        ] = "v2",
        highway_bias: Annotated[float, "initial b_r; below 0 more of the input passes by"] = 0.0,
        rescale: Annotated[bool, "α = sqrt(1 + 2 e^highway_bias); if False, α = 1"] = True,
        layer_norm: Annotated[bool, "the projections read LayerNorm(x); the highway reads x"] = False,
    ) -> None:
        super().__init__()
        self.dim, self.variant = dim, variant
        self.weight = nn.Parameter(torch.empty(dim, 3 * dim).uniform_(-math.sqrt(3 / dim), math.sqrt(3 / dim)))
        self.bias = nn.Parameter(torch.zeros(2 * dim))
        self.register_buffer("scale_x", torch.full((1,), math.sqrt(1 + 2 * math.exp(highway_bias)) if rescale else 1.0))
        self.layer_norm = nn.LayerNorm(dim) if layer_norm else None
        if variant == "v1":
            self.register_buffer("weight_c", torch.zeros(2 * dim))
        else:
            self.weight_c = nn.Parameter(torch.empty(2 * dim).uniform_(-math.sqrt(1.5), math.sqrt(1.5)))
        with torch.no_grad():
            self.bias[dim:] = highway_bias
            if variant == "v2":
                self.weight.view(dim, dim, 3)[:, :, 1:] *= math.sqrt(0.5)
            if layer_norm:
                self.weight *= 0.1

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        normed = x if self.layer_norm is None else self.layer_norm(x)
        rows = (normed @ self.weight).unflatten(-1, (-1, 3))
        drive = Drive(_state_rows(rows), normed, lambda: _state_rows(self.weight.unflatten(-1, (-1, 3))))
        b_f, b_r = self.bias.chunk(2)
        gates = [] if self.variant == "v1" else self.weight_c.chunk(2)
        reset = widen(rows[..., 2]) + b_r
        y, (last,) = self.advance([drive, reset, widen(x) * self.scale_x], [b_f, *gates], [state], cu_seqlens)
        return y.to(x.dtype), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        (new, f), (b_f, *gates) = widen(p[0]).unbind(2), v
        y, last = self.run_cell(
            sru, new, f + b_f, p[1], p[2], *(gates or (None, None)), states[0], cu_seqlens=cu_seqlens
        )
        return y, [last]


def _state_rows(rows: Tensor) -> Tensor:
    """Return the rows of W and W_f, which act on the state, (..., 2, D); those of W_r act on the output alone."""
    return rows[..., :2].movedim(-1, -2)


@registry.preset("sru_v1", variant="v1")
class SRUv1(SRU):
    """The first SRU: the gates read only the input, so the recurrence is linear."""

    id = "S-sru"
    equation = (
        "c_t = f_t * c_{t-1} + (1 - f_t) * W x_t,  h_t = r_t * c_t + (1 - r_t) * alpha x_t,  "
        "f_t, r_t = sigmoid(W x_t + b)"
    )
    source = 'Lei, Zhang and Artzi, "Training RNNs as Fast as CNNs", arXiv:1709.02755v1, eq. (1) to (5)'
    sample: ClassVar = {}
