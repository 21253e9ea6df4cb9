"""Token mixer of TransNormerLLM: linear attention with a decay for each head and a norm over all heads."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.depth import relative_depth
from scanl.layers.parts.lrpe import LRPE
from scanl.layers.parts.norm import simple_rms_norm
from scanl.layers.parts.positions import positions
from scanl.ops import linear_attention


class TransNormerState(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("num_heads, key_dim, head_dim", "S; with positions keys have 2K channels")]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add, when="lrpe")]


@registry.register("transnormerllm")
class TransNormerLLM(Layer):
    """TransNormerLLM: a constant decay for each head, a gate without an activation, and positions in the lowest layer
    only.

    The slopes s_h are those of ALiBi: 2^(-8 (h+1) / H) for H a power of 2. In a stack of L layers, of any class, l is
    the layer's index from 0; outside a stack it is 0. So the highest layer hardly forgets. The slopes are those of the
    released code. In the paper the logarithm of the decay is linear in h. The model's channel mixer, SGLU, is
    `gated_mlp` with activation="identity".

    Parameters as in the released code: qkvu_proj (4D, D), out_proj (D, D); lrpe.theta (H, K) where there are positions.
    The norm has none.
    Initialisation: linear weights N(0, 0.02²); theta_j = 10000^(-2j/D) for channel j of all heads.
    """

    id = "S-transnormerllm"
    equation = (
        "S_t = lambda_h S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  q, k = SiLU(W x),  "
        "lambda_h = exp(-s_h (1 - l / (L-1)));  y = W_o (W_u x * SRMSNorm(o))"
    )
    source = (
        'Qin et al., "TransNormerLLM: A Faster and Better Large Language Model with Improved TransNormer", '
        "arXiv:2307.14995, sec. 3.1"
    )
    op = "linear_attention"
    state: ClassVar = TransNormerState
    sample: ClassVar = {"num_heads": 3}
    residual_out = "out_proj"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        lrpe: Annotated[
            bool | None,
            "positions (LRPE), which double the features of queries and keys; by default in the lowest layer of a "
            "stack and outside of stacks",
        ] = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.positioned = dim, num_heads, dim // num_heads, lrpe
        self.qkvu_proj = nn.Linear(dim, 4 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.lrpe = None if lrpe is False else LRPE(num_heads, self.head_dim)
        for linear in (self.qkvu_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=0.02)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        self.rate = 1 - relative_depth(index, len(layers)) + 1e-5
        if self.positioned is None and index:
            self.lrpe = None

    @property
    def key_dim(self) -> int:
        """Channels of the features of a head's keys."""
        return self.head_dim if self.lrpe is None else 2 * self.head_dim

    def run(
        self, x: Tensor, state: TransNormerState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, TransNormerState]:
        recurrent, past = self._begin(x, state, cu_seqlens)
        q, k, v, u = self.qkvu_proj(x).chunk(4, -1)
        q, k, v = (tensor.unflatten(-1, (self.num_heads, -1)) for tensor in (F.silu(q), F.silu(k), v))
        if self.lrpe is not None:
            steps, past = positions(past, x.shape[1], cu_seqlens)
            q, k = self.lrpe(steps, q, k)
        slopes = torch.tensor(alibi_slopes(self.num_heads), device=x.device, dtype=widen(q).dtype)
        o, recurrent = linear_attention(
            q, k, v.to(q.dtype), -self.rate * slopes, state=recurrent, scale=1.0, cu_seqlens=cu_seqlens
        )
        y = u * simple_rms_norm(o.flatten(-2)).to(x.dtype)
        return self.out_proj(y), TransNormerState(recurrent, past)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of ALiBi: 2^(-8 (h+1) / H) for H a power of 2; else also every other one of twice as many.

    Source: Press, Smith and Lewis, "Train Short, Test Long", arXiv:2108.12409, section 3, and its code for other H.

    >>> alibi_slopes(2), alibi_slopes(3)
    ([0.0625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    below = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / below) for h in range(below)]
    return slopes + [2 ** (-4 * (h + 1) / below) for h in range(0, 2 * (heads - below), 2)]
