"""Hawk and Griffin's recurrent block."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import InnerState
from scanl.layers.parts.short_convolution import ShortConvolution
from scanl.layers.ssm.rglru import RGLRU, RGLRUState
from scanl.ops.fused.gated import gated


class HawkState(NamedTuple):
    rg_lru: Annotated[RGLRUState, InnerState("rg_lru")]
    conv: Annotated[Tensor, InnerState("conv_1d", "the last inputs of the convolution")]


@registry.register("hawk")
class Hawk(Layer):
    """Recurrent block of Hawk and Griffin: a GELU branch times a branch of convolution and RG-LRU.

    Parameters as in the released recurrentgemma: linear_y, linear_x (width, D), linear_out (D, width),
    rg_lru, and conv_1d, here in `nn.Conv1d`'s shape.
    Initialisation as in that code: linear weights N(0, 1/fan_in), and in a stack of L layers linear_out N(0, 2/(L
    width)); convolution N(0, 0.01/W), biases 0.
    """

    id = "S-hawk"
    equation = "y = W_o (GELU(W_1 x) * RGLRU(conv_4(W_2 x)))"
    source = (
        'De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models", '
        "arXiv:2402.19427, sec. 2.3"
    )
    op = "linear_scan"
    state: ClassVar = HawkState
    sample: ClassVar = {"num_heads": 2, "width": 12}
    residual_out = "linear_out"
    residual_by_depth = True
    left_out = ("linear_x", "conv_1d")

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.FreeHeads, "diagonal blocks in the gates' weights; a divisor of width"] = 8,
        width: Annotated[options.Width | None, "channels of the recurrence; by default about 4/3 dim"] = None,
        conv_size: options.ConvSize = 4,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.width = width or num_heads * _block_width(4 * dim / 3 / num_heads)
        self.linear_y = nn.Linear(dim, self.width)
        self.linear_x = nn.Linear(dim, self.width)
        self.linear_out = nn.Linear(self.width, dim)
        self.conv_1d = ShortConvolution(self.width, conv_size)
        self.rg_lru = RGLRU(self.width, num_heads)
        for linear in (self.linear_y, self.linear_x, self.linear_out):
            nn.init.normal_(linear.weight, std=math.sqrt(1 / linear.in_features))
            nn.init.zeros_(linear.bias)
        nn.init.normal_(self.conv_1d.conv.weight, std=math.sqrt(0.01 / conv_size))
        if self.conv_1d.conv.bias is not None:
            nn.init.zeros_(self.conv_1d.conv.bias)

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        nn.init.normal_(self.linear_out.weight, std=math.sqrt(2 / (len(layers) * self.width)))

    def run(self, x: Tensor, state: HawkState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, HawkState]:
        rg_lru, conv = state or (None, None)
        h, conv = self.conv_1d(self.linear_x(x), conv, cu_seqlens=cu_seqlens)
        h, rg_lru = self.rg_lru(h, rg_lru, cu_seqlens=cu_seqlens)
        return self.linear_out(gated(self.linear_y(x), h, "gelu_tanh")), HawkState(rg_lru, conv)


def _block_width(width: float) -> int:
    """Round to a multiple of 8, at least 8: matrix products of odd small widths take up to twice as long."""
    return 8 * round(width / 8) if width >= 8 else max(1, round(width))
