"""sLSTM: exponential gates, a normaliser, and heads that mix their own channels."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.module import Module
from scanl.layers.parts.block_diagonal import BlockDiagonalMap
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.parts.depth import channel_ramp, relative_depth
from scanl.layers.parts.norm import HeadNorm
from scanl.layers.parts.short_convolution import ShortConvolution, convolve
from scanl.ops import slstm
from scanl.ops.slstm import FORGET_GATES
from scanl.options import one_of


class SLSTMState(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("4, num_heads, head_dim", "h, c, n and m")]
    conv: Annotated[Tensor | tuple[()], InnerState("conv1d", "the last inputs; () without a convolution")]


class SLSTMCell(Module):
    """Recurrent weights and biases of the gates, in the order i, f, z, o."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self._recurrent_kernel_ = nn.Parameter(torch.zeros(num_heads, 4 * width, width))
        self._bias_ = nn.Parameter(torch.zeros(4 * num_heads * width))

    def kernel_and_bias(self) -> tuple[Tensor, Tensor]:
        """Return the kernel (4, H, K, K), output axis before input axis, and the bias (4, H, K)."""
        heads, _, width = self._recurrent_kernel_.shape
        kernel = self._recurrent_kernel_.view(heads, 4, width, width).transpose(0, 1)
        return kernel, self._bias_.view(4, heads, width)


@registry.register("slstm")
class SLSTM(SolvedLayer):
    """The sLSTM layer of xLSTM: a convolution feeds the gates i and f, the input feeds z and o.

    Parameters as in PyPI's xlstm with its "vanilla" cell: conv1d.conv (D, 1, W); fgate, igate, zgate, ogate (H, K, K),
    where fgate feeds i and igate feeds f, as there; slstm_cell._recurrent_kernel_ (H, 4K, K), rows of i, f, z and o;
    slstm_cell._bias_ (4 H K); group_norm.weight (D), to which 1 is added.
    Initialisation as in that code: gates N(0, 2/(5D)); the recurrent kernel 0. In layer l of a stack of L layers of any
    kind, the bias of f is 5 - 12 (j/(K-1))^(0.3 + 1.3 l/(L-1)) over the channels j of each head; the other biases are
    0. The convolution as in PyTorch.
    """

    id = "S-slstm"
    aliases = ("scalar_lstm",)
    equation = (
        "c_t = f_t * c_{t-1} + i_t * tanh(z_t),  n_t = f_t * n_{t-1} + i_t,  h_t = sigmoid(o_t) * c_t / n_t,  "
        "i_t = exp(i'_t),  f_t = sigmoid(f'_t),  each of i', f', z, o = W u_t + R h_{t-1} + b"
    )
    source = 'Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, eq. (8) to (17)'
    op = "slstm"
    state: ClassVar = SLSTMState
    reads: ClassVar = {"conv1d.conv": nn.Conv1d}
    sample: ClassVar = {"num_heads": 3}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[
            options.Heads, "H; each head mixes only its own K = D / H channels, in the gates and over time"
        ] = 4,
        conv_size: options.ConvSizeOrNone = 4,
        variant: Annotated[
            str,
            one_of(FORGET_GATES),
            'the function of the forget gate: "sigmoid", or "exp", which the paper allows too',
        ] = "sigmoid",
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.variant = dim, num_heads, dim // num_heads, variant
        self.conv1d = None if conv_size is None else ShortConvolution(dim, conv_size)
        small = math.sqrt(2 / (5 * dim))
        self.fgate = BlockDiagonalMap(dim, num_heads, small)
        self.igate = BlockDiagonalMap(dim, num_heads, small)
        self.zgate = BlockDiagonalMap(dim, num_heads, small)
        self.ogate = BlockDiagonalMap(dim, num_heads, small)
        self.slstm_cell = SLSTMCell(num_heads, self.head_dim)
        self.group_norm = HeadNorm(dim)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        with torch.no_grad():
            _, bias = self.slstm_cell.kernel_and_bias()
            bias[1] = 5 - 12 * channel_ramp(self.head_dim) ** (0.3 + 1.3 * relative_depth(index, len(layers)))

    def run(self, x: Tensor, state: SLSTMState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, SLSTMState]:
        recurrent, conv = state or (None, None)
        if self.conv1d is None:
            convolved, conv = x, ()
        else:
            assert not isinstance(conv, tuple)
            convolved, conv = convolve(self.conv1d.conv, x, conv, cu_seqlens=cu_seqlens, silu=True)
        kernel, bias = self.slstm_cell.kernel_and_bias()
        gates = torch.stack([self.fgate(convolved), self.igate(convolved), self.zgate(x), self.ogate(x)], 2)
        gates = gates.unflatten(-1, (self.num_heads, self.head_dim))
        h, recurrent = self.run_cell(slstm, gates + bias, kernel, recurrent, forget=self.variant, cu_seqlens=cu_seqlens)
        return self.group_norm(h).to(x.dtype), SLSTMState(recurrent, conv)
