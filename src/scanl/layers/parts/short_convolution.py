r"""Short depthwise convolution, and the token shift.

.. math:: y_t = b + \sum_{j=0}^{W-1} c_j \odot x_{t-j}
"""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options
from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.state import State
from scanl.ops import short_convolution


def convolve(
    conv: nn.Conv1d, x: Tensor, state: Tensor | None, *, cu_seqlens: Tensor | None = None, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """Convolve x (B, T, D) causally with the weights of a depthwise `nn.Conv1d`.

    state: the last W-1 inputs (B, W-1, D).
    Used by layers whose official parameters are `NAME.weight` (D, 1, W) and `NAME.bias` (D).
    """
    return short_convolution(x, conv.weight[:, 0], conv.bias, state, cu_seqlens=cu_seqlens, silu=silu)


def token_shift(x: Tensor, state: Tensor | None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x_{t-1} for every t, and the new state. state: the last input (B, 1, D), float32 or wider, initially 0."""
    return short_convolution(x, x.new_tensor([1.0, 0.0]).expand(x.shape[2], 2), None, state, cu_seqlens=cu_seqlens)


class ShortConvolution(Layer):
    """Depthwise convolution over the last few steps, for whole sequences or pieces of any length.

    If it is not causal, the window is centred, and for even W its longer half is in the past. Then a piece sees the
    past in the carried state, and nothing of the next piece.

    Parameters as in `nn.Conv1d(D, D, W, groups=D)`: `conv.weight` (D, 1, W), newest input last; `conv.bias`.
    """

    name = "short_convolution"
    id = "P-shortconv"
    equation = "y_t = b + sum_j c_j * x_{t-j}"
    residual_out = None
    state: ClassVar = StateAxes("kernel_size - 1, dim", "the last inputs")
    reads: ClassVar = {"conv": nn.Conv1d}

    def __init__(
        self,
        dim: options.Dim,
        kernel_size: Annotated[options.ConvSize, "W, window of the convolution"] = 4,
        bias: options.ConvBias = True,
        causal: Annotated[bool, "see past inputs only. If False, the layer sees the future"] = True,
    ) -> None:
        super().__init__()
        self.dim, self.kernel_size, self.causal = dim, kernel_size, causal
        self.bidirectional = not causal
        padding = kernel_size - 1 if causal else kernel_size // 2
        self.conv = nn.Conv1d(dim, dim, kernel_size, padding=padding, groups=dim, bias=bias)

    def run(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        if self.causal:
            return convolve(self.conv, x, state, cu_seqlens=cu_seqlens)
        # Split the weights: past and present inputs, and future inputs, which a reversed pass applies.
        later = (self.kernel_size - 1) // 2
        behind, ahead = self.conv.weight[:, 0].split([self.kernel_size - later, later], 1)
        behind = nn.functional.pad(behind, (later, 0))  # to W taps, whose state is the W - 1 last inputs
        y, last = short_convolution(x, behind, self.conv.bias, state, cu_seqlens=cu_seqlens)
        if ahead.shape[1]:
            turned = torch.cat([ahead.flip(1), torch.zeros_like(ahead[:, :1])], 1)
            y = y + short_convolution(x, turned, cu_seqlens=cu_seqlens, reverse=True)[0]
        return y, last
