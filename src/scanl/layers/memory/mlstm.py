"""mLSTM: a matrix memory with exponential gates."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.memory._exponential_gates import remember
from scanl.layers.module import Module
from scanl.layers.parts.block_diagonal import BlockDiagonalMap
from scanl.layers.parts.norm import HeadNorm
from scanl.layers.parts.short_convolution import ShortConvolution
from scanl.ops.fused.gated import gated
from scanl.options import at_least


class MLSTMCell(Module):
    """Gates and norm. The gates read queries, keys and values; `forward` returns ĩ and ln f, (B, T, H) each."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.igate, self.fgate = nn.Linear(3 * width, num_heads), nn.Linear(3 * width, num_heads)
        self.outnorm = HeadNorm(width)
        for gate in (self.igate, self.fgate):
            nn.init.zeros_(gate.weight)
        nn.init.normal_(self.igate.bias, std=0.1)
        with torch.no_grad():
            self.fgate.bias.copy_(torch.linspace(3, 6, num_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        qkv = torch.cat([q, k, v], -1)
        return widen(self.igate(qkv)), F.logsigmoid(widen(self.fgate(qkv)))


class MLSTMState(NamedTuple):
    memory: Annotated[Tensor, StateAxes("num_heads, head_dim, head_dim + 1", "e^-m C, with e^-m n in the last column")]
    m: Annotated[Tensor, StateAxes("num_heads", "the stabilizer")]
    conv: Annotated[Tensor, InnerState("conv1d", "the last inputs of the convolution")]


@registry.register("mlstm")
class MLSTM(Layer):
    """mLSTM with the projections of its block: up, convolution, heads, skip and gate, down.

    To keep the exponential gates from overflow, the memory is stored with the factor e^-m, where
    m_t = max(ln f_t + m_{t-1}, ĩ_t). The denominator is max(|n·q|, e^-m) + 1e-6. Both are as in the released code.

    Parameters as in xlstm's mLSTMLayer: proj_up (2 width, D); q_proj, k_proj, v_proj.weight (width / P, P, P) for
    blocks of P channels;
    conv1d.conv.weight (width, 1, W) and its bias; mlstm_cell.igate and .fgate (H, 3 width) with biases;
    mlstm_cell.outnorm.weight, learnable_skip (width); proj_down (D, width).
    Initialisation: proj_up, q, k and v N(0, 2/(5D)); in a stack of L layers proj_down N(0, (2/L)²/D), and alone L = 1;
    the gates' weights 0, their biases N(0, 0.1²) for i and linspace(3, 6) over the heads for f; the skip 1; the
    convolution as in PyTorch.
    """

    id = "S-mlstm"
    aliases = ("matrix_lstm",)
    equation = (
        "C_t = f_t C_{t-1} + i_t k_t v_t^T,  n_t = f_t n_{t-1} + i_t k_t,  h_t = C_t^T q_t / max(|n_t . q_t|, 1),  "
        "i_t = exp(w_i . x),  f_t = sigmoid(w_f . x)"
    )
    source = 'Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, eq. (19) to (27)'
    op = "linear_attention"
    carried_by = "turns"
    state: ClassVar = MLSTMState
    sample: ClassVar = {"num_heads": 2, "expand": 1.0, "multiple_of": 4}
    residual_out = "proj_down"
    residual_by_depth = True

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 4,
        expand: Annotated[options.Expand, "all heads together have expand * dim channels, rounded up"] = 2.0,
        multiple_of: options.MultipleOf = 64,
        conv_size: options.ConvSize = 4,
        block_size: Annotated[int, at_least(1), "channels of a block in the maps to q, k and v"] = 4,
        bias: options.Bias = False,
    ) -> None:
        super().__init__()
        width = math.ceil(expand * dim / multiple_of) * multiple_of
        for option, divisor in (("num_heads", num_heads), ("block_size", block_size)):
            if width % divisor:
                self._refuse(option, divisor, f"a divisor of {width} channels because of expand={expand}")
        self.dim, self.num_heads, self.width, self.head_dim = dim, num_heads, width, width // num_heads
        small = math.sqrt(2 / (5 * dim))
        self.proj_up = nn.Linear(dim, 2 * width, bias=bias)
        self.q_proj, self.k_proj, self.v_proj = (
            BlockDiagonalMap(width, width // block_size, small, bias) for _ in range(3)
        )
        self.conv1d = ShortConvolution(width, conv_size)
        self.mlstm_cell = MLSTMCell(width, num_heads)
        self.learnable_skip = nn.Parameter(torch.ones(width))
        self.proj_down = nn.Linear(width, dim, bias=bias)
        nn.init.normal_(self.proj_up.weight, std=small)
        if bias:
            nn.init.zeros_(self.proj_up.bias)
            nn.init.zeros_(self.proj_down.bias)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        nn.init.normal_(self.proj_down.weight, std=2 / len(layers) / math.sqrt(self.dim))

    def run(self, x: Tensor, state: MLSTMState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MLSTMState]:
        memory, m, window = self._begin(x, state, cu_seqlens)
        inner, z = self.proj_up(x).chunk(2, -1)
        conv, window = self.conv1d(inner, window, cu_seqlens=cu_seqlens)
        conv = F.silu(conv)
        q, k, v = self.q_proj(conv), self.k_proj(conv), self.v_proj(inner)
        i, log_f = self.mlstm_cell(q, k, v)
        q, k, v = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in (q, k, v))
        h, memory, m = remember(q, k, v, i, log_f, memory, m, cu_seqlens)
        h = self.mlstm_cell.outnorm(h).to(x.dtype) + self.learnable_skip * conv
        return self.proj_down(gated(z, h)), MLSTMState(memory, m, window)
