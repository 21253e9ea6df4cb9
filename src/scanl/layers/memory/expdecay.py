"""Matrix memory with a learned constant decay."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_attention


@registry.register("expdecay")
class ExpDecay(Layer):
    """Exponential-decay matrix memory: each row of each head forgets at its own learned rate.

    Parameters: q_proj, k_proj, v_proj, o_proj (D, D) without biases; decay (H, K), without weight decay; K = D / H.
    Initialisation: decay N(0, 1), the projections as in PyTorch.
    """

    id = "S-expdecay"
    aliases = ("exponential_decay_rnn",)
    equation = "S_t = Diag(sigmoid(decay)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t"
    source = "Linear RNN base block, exponential-decay matrix memory; its listing reads S with v, here with q"
    op = "linear_attention"
    state: ClassVar = StateAxes("num_heads, head_dim, head_dim")
    sample: ClassVar = {"num_heads": 3}
    residual_out = "o_proj"
    hints: ClassVar = {"decay": UNDECAYED_HINT}

    def __init__(self, dim: options.Dim, num_heads: options.Heads = 4) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.decay = nn.Parameter(torch.randn(num_heads, self.head_dim))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        g = F.logsigmoid(widen(self.decay)).expand(k.shape)
        o, last = linear_attention(q, k, v, g, state=state, scale=1.0, cu_seqlens=cu_seqlens)
        return self.o_proj(o.to(x.dtype).flatten(-2)), last
