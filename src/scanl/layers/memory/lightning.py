"""Lightning attention as in MiniMax-01: linear attention with a decay for each head, slower in higher layers."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.ops import linear_attention


@registry.register("lightning")
class Lightning(Layer):
    """Lightning attention: SiLU queries, keys and values, a decay of each head, and a sigmoid gate after the norm.

    There are no positions. In a stack of L layers, of any class, l counts from 0, and ε = 1e-5. So the highest layer
    hardly forgets. Outside a stack l = 0.

    Parameters as in transformers' MiniMax: qkv_proj (3 H K, D), in which the rows of q, k and v of a head are together;
    output_gate (H K, D); norm.weight (H K); out_proj (D, H K).
    Initialisation as in that code: linear weights N(0, 0.02²), norm 1.
    """

    id = "S-lightning"
    equation = (
        "S_t = lambda_h S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  lambda_h = exp(-2^(-8 (h+1) / H) r_l),  "
        "r_l = 1 - l/(L - 1 + eps) + eps;  "
        "y = W_o (sigmoid(W_g x) * RMSNorm(o))"
    )
    source = (
        'MiniMax, "MiniMax-01: Scaling Foundation Models with Lightning Attention", arXiv:2501.08313, sec. 2.2; Qin et '
        'al., "Lightning Attention-2", arXiv:2401.04658'
    )
    op = "linear_attention"
    state: ClassVar = StateAxes("num_heads, head_dim, head_dim", "S")
    sample: ClassVar = {"num_heads": 2}
    residual_out = "out_proj"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[
            options.HeadDim | None, "K, channels of queries, keys and values; by default dim / num_heads"
        ] = None,
        norm_eps: Annotated[options.NormEps, "ε of the norm, which is over all heads"] = 1e-6,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        head_dim = dim // num_heads if head_dim is None else head_dim
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        width = num_heads * head_dim
        self.qkv_proj = nn.Linear(dim, 3 * width, bias=False)
        self.output_gate = nn.Linear(dim, width, bias=False)
        self.norm = GatedRMSNorm(width, norm_eps, activation="sigmoid")
        self.out_proj = nn.Linear(width, dim, bias=False)
        for linear in (self.qkv_proj, self.output_gate, self.out_proj):
            nn.init.normal_(linear.weight, std=0.02)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        self.rate = 1 - index / (len(layers) - 1 + 1e-5) + 1e-5

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = F.silu(self.qkv_proj(x)).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        heads = torch.arange(1, self.num_heads + 1, device=x.device, dtype=torch.float64)
        g = -self.rate * torch.exp2(-8 * heads / self.num_heads)
        o, last = linear_attention(q, k, v, g.to(widen(q).dtype), state=state, scale=1.0, cu_seqlens=cu_seqlens)
        return self.out_proj(self.norm(o.flatten(-2), self.output_gate(x)).to(x.dtype)), last
