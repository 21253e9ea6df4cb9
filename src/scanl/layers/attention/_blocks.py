"""A block of a transformer whose keys and values its caller keeps."""

import math

from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.channel.gated_mlp import GatedMLP
from scanl.layers.module import Module
from scanl.layers.parts.norm import RMSNorm
from scanl.layers.parts.rotary import rotate


class TransformerBlock(Module):
    """h + W_o attention(norm(h)), then h + mlp(norm(h)), with a gated network and rotary positions. A module in layers.

    Initialisation: q_proj, k_proj, v_proj N(0, 1/D); o_proj and mlp.down divided by sqrt(2 L), of L blocks.
    """

    def __init__(self, dim: int, num_heads: int, expand: float, rope_base: float, norm_eps: float, depth: int) -> None:
        super().__init__()
        self.num_heads, self.rope_base = num_heads, rope_base
        self.norm, self.mlp_norm = RMSNorm(dim, eps=norm_eps), RMSNorm(dim, eps=norm_eps)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp = GatedMLP(dim, expand)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=dim**-0.5)
        for linear in (self.o_proj, self.mlp.down):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(2 * depth * linear.in_features))

    def projected(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values (B, T, H, K) of h (B, T, D). positions: (B or 1, T)."""
        h = self.norm(h.to(self.norm.weight.dtype))
        q, k, v = (
            widen(proj(h)).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        width = q.shape[-1]
        return rotate(q, positions, width, self.rope_base), rotate(k, positions, width, self.rope_base), v

    def after(self, h: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the block from its input h and the attention's (B, T, H, K)."""
        return self.fed(self.mixed(h, attended))

    def mixed(self, h: Tensor, attended: Tensor) -> Tensor:
        """Return h with the attention's (B, T, H, K) added."""
        return h + self.o_proj(attended.flatten(2).to(h.dtype))

    def fed(self, h: Tensor) -> Tensor:
        """Return h with what the network makes of it added."""
        return h + self.mlp(self.mlp_norm(h.to(self.mlp_norm.weight.dtype)))[0]
