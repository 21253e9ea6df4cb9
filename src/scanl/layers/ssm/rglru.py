"""Real-gated linear recurrent unit."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.packing import sequence_index
from scanl.layers.parts.block_diagonal import block_diagonal
from scanl.ops import linear_scan
from scanl.ops.fused.rglru_gates import rglru_gates


class BlockDiagonalLinear(Module):
    """y = x W + b, with W block-diagonal. w (blocks, width, width) and b (blocks, width) are named as released."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        block = width // num_blocks
        self.w = nn.Parameter(torch.empty(num_blocks, block, block))
        self.b = nn.Parameter(torch.zeros(num_blocks, block))
        nn.init.normal_(self.w, std=math.sqrt(1 / block))

    def forward(self, x: Tensor) -> Tensor:
        return block_diagonal(x, self.w, self.b)

    def driven(self, x: Tensor) -> Drive:
        """Return the result as a drive: each channel reads the inputs of its own block."""
        y, inputs = self(x), x.unflatten(-1, self.b.shape)
        return Drive(y, inputs, lambda: self.w.transpose(0, 1).flatten(1), lambda: self.b.flatten())


def _fresh_after(fresh: Tensor, steps: Tensor) -> Tensor:
    return fresh * (steps == 0)


class RGLRUState(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("dim")]
    fresh: Annotated[Tensor, StateAxes("1", "1 before the first step and 0 after it", fill=1.0, after=_fresh_after)]


@registry.register("rglru")
class RGLRU(ChannelwiseLayer):
    """RG-LRU: a diagonal recurrence with input and recurrence gates, both block-diagonal.

    The first input of a sequence has the factor 1 in place of sqrt(1 - a²), as in the released code. The state
    therefore records whether its sequence has started. The derivative of the square root is clipped at 1000.

    Parameters: a_param Λ (D); input_gate and a_gate: w (heads, D/heads, D/heads), b (heads, D/heads).
    Initialisation as in the released code: with rho² uniform in [0.9², 0.999²], softplus(Λ) = -ln rho; gates
    N(0, heads/D), biases 0. In the paper a^c, the smallest decay factor, is uniform in [0.9, 0.999]; here it is rho^8.
    """

    id = "S-rglru"
    aliases = ("real_gated_linear_recurrent_unit",)
    equation = (
        "h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t),  a_t = exp(-8 r_t softplus(Lambda)),  "
        "i, r = sigmoid(W x_t)"
    )
    source = (
        'De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models", '
        "arXiv:2402.19427, eq. (1)-(4)"
    )
    op = "linear_scan"
    state: ClassVar = RGLRUState
    sample: ClassVar = {"num_heads": 2}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.Heads, "diagonal blocks in the weight of each gate; a divisor of dim"] = 8,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.a_param = nn.Parameter(torch.empty(dim))
        self.input_gate = BlockDiagonalLinear(dim, num_heads)
        self.a_gate = BlockDiagonalLinear(dim, num_heads)
        with torch.no_grad():
            rho = self.a_param.uniform_(0.9**2, 0.999**2).sqrt_()
            rho.reciprocal_().sub_(1).log_()  # softplus(Λ) = -ln ρ  <=>  Λ = ln(1/ρ - 1)

    def run(self, x: Tensor, state: RGLRUState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RGLRUState]:
        recurrent, fresh = self._begin(x, state, cu_seqlens)
        log_decay = -8 * F.softplus(widen(self.a_param))
        fresh = fresh.to(log_decay.dtype)
        steps = torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is None:
            least = fresh[:, None] if x.shape[1] == 1 else fresh[:, None] * (steps == 0)[:, None]
            fresh = torch.zeros_like(fresh) if x.shape[1] else fresh
        else:
            owner = sequence_index(cu_seqlens, x.shape[1])
            least = (fresh[owner] * (cu_seqlens[owner] == steps)[:, None])[None]
            fresh = fresh * (cu_seqlens.diff() == 0)[:, None]
        drives = [x, self.input_gate.driven(x), self.a_gate.driven(x), least]
        y, (recurrent,) = self.advance(drives, [log_decay], [recurrent], cu_seqlens)
        return y.to(x.dtype), RGLRUState(recurrent, fresh)

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        x, input_gate, a_gate, least = p
        u, a = rglru_gates(x, input_gate, a_gate, v[0], least)
        y, last = linear_scan(u, a, states[0], cu_seqlens=cu_seqlens)
        return y, [last]
