"""Attention from one sequence to another, and rows of packed sequences side by side."""

import torch
from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.layers.packing import unpack
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.norm import RMSNorm


class CrossAttention(Module):
    """W_o softmax(W_q norm(x) . W_k m / sqrt(K)) W_v m, by heads: what the steps x (B, Q, D) read of m (B, S, D_m).

    There are no positions: m says where it stands. Keys and values are computed once, by `keys_values`.
    Initialisation: maps N(0, 1/fan_in), o_proj divided by sqrt(2 L), of L attentions into one residual stream.
    """

    def __init__(self, dim: int, memory_dim: int, num_heads: int, depth: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = RMSNorm(dim, eps=1e-6)
        self.q_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(memory_dim, dim, bias=False) for _ in range(2))
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        with torch.no_grad():
            self.o_proj.weight.div_((2 * depth) ** 0.5)

    def keys_values(self, m: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, S, H, K) of m (B, S, D_m)."""
        return self._heads(self.k_proj(m)), self._heads(self.v_proj(m))

    def forward(self, x: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Return (B, Q, D). visible: (B or 1, Q or 1, S), whether a step sees a key."""
        q = self._heads(self.q_proj(self.norm(x.to(self.norm.weight.dtype))))
        return self.o_proj(attend(q, k, v, visible).flatten(2).to(self.o_proj.weight.dtype))

    def _heads(self, x: Tensor) -> Tensor:
        return widen(x).unflatten(-1, (self.num_heads, -1))


def side_by_side(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed sequences (1, total, D) as rows (N, longest, D), zeros after their ends, and the mask of steps."""
    lengths = cu_seqlens.diff()
    steps = torch.arange(int(lengths.max()) if len(lengths) else 0, device=x.device)
    mask = steps < lengths[:, None]
    return unpack(x, mask), mask


def seen(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return (B or 1, 1, S), which steps are seen: where the mask (B, S) is True. None, or a row without a step: all.

    Padding is zeros, whose keys and values are 0. So a row without a step reads 0.
    """
    if mask is None:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=like.device)
    return (mask | ~mask.any(1, keepdim=True))[:, None]
