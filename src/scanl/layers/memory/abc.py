r"""Attention with bounded-memory control: softmax attention over a few slots, each a weighted mean of all tokens.

.. math:: e_t = \exp(W_s x_t), \quad \tilde K_t = \frac{\sum_{j \le t} e_j k_j^\top}{\sum_{j \le t} e_j}, \quad
          \tilde V_t = \frac{\sum_{j \le t} e_j v_j^\top}{\sum_{j \le t} e_j}, \quad
          o_t = \tilde V_t^\top \mathrm{softmax}(\tilde K_t q_t / \sqrt K)
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.positions import positions
from scanl.layers.parts.query_key_value import whole_heads
from scanl.layers.parts.rotary import rotate
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention, linear_scan


class ABCState(NamedTuple):
    """State of `ABC`: sums over all steps, and a count of steps.

    keys: Σ k_j e_jᵀ (B, H, K, M).   values: Σ e_j v_jᵀ (B, H, M, V).   weights: Σ e_j (B, H, M).
    steps: (B, 1), int64.
    """

    keys: Tensor
    values: Tensor
    weights: Tensor
    steps: Tensor


@register("abc")
class ABC(Layer):
    """Attention with bounded-memory control: each token is added to M slots, with learned weights.

    The state holds sums and not means: the logits of the weights are clipped, so the sums cannot overflow.

    Args:
        dim: D, model width.
        expand_k, expand_v: all heads together have expand_k * D channels of keys and expand_v * D of values.
        num_heads: H.
        num_slots: M, slots of a head.
        use_rope: rotate queries and keys by their position; K must then be even.
        rope_base: b of the rotary angles.
        use_output_gate: a SiLU gate after the norm of the output.
        clamp: the logits of the weights are clipped to ±clamp.
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj, g_proj (H V, D); s_proj (H M, D);
    g_norm.weight (V); o_proj (D, H V).
    Initialisation: linear weights N(0, 0.02²), norm 1.
    State: sums (B, H, K, M), (B, H, M, V) and (B, H, M), zeros, and a count of steps.
    """

    id = "S-abc"
    aliases = ("attention_with_bounded_memory",)
    equation = (
        "K_t = sum_{j<=t} e_j k_j^T / sum_{j<=t} e_j,  V_t likewise,  e_t = exp(W_s x_t),  "
        "o_t = V_t^T softmax(K_t q_t / sqrt(K));  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Peng et al., "ABC: Attention with Bounded-memory Control", arXiv:2110.02488, sec. 3 and 4'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2, "num_slots": 5, "expand_k": 4 / 3}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: int,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_slots: int = 64,
        use_rope: bool = True,
        rope_base: float = 10000.0,
        use_output_gate: bool = True,
        clamp: float = 32.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim = whole_heads(self._who(), "expand_k", expand_k, dim, num_heads)
        self.head_v_dim = whole_heads(self._who(), "expand_v", expand_v, dim, num_heads)
        if num_slots < 1 or not clamp > 0:
            raise ConfigError(
                f"{self._who()}: num_slots is {num_slots} and clamp is {clamp}, expected positive numbers"
            )
        if use_rope and self.head_k_dim % 2:
            raise ConfigError(
                f"{self._who()}: expand_k is {expand_k}, which gives heads of {self.head_k_dim} channels, expected an "
                "even number because of use_rope"
            )
        self.dim, self.num_heads, self.num_slots, self.clamp = dim, num_heads, num_slots, clamp
        self.rotated, self.rope_base = self.head_k_dim if use_rope else 0, rope_base
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj, self.k_proj = nn.Linear(dim, key, bias=False), nn.Linear(dim, key, bias=False)
        self.v_proj = nn.Linear(dim, value, bias=False)
        self.s_proj = nn.Linear(dim, num_heads * num_slots, bias=False)
        self.g_proj = nn.Linear(dim, value, bias=False) if use_output_gate else None
        self.g_norm = GatedRMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ABCState:
        def zeros(*shape: int) -> Tensor:
            return self._zeros(batch_size, self.num_heads, *shape, device=device, dtype=dtype, at_least=torch.float32)

        return ABCState(
            zeros(self.head_k_dim, self.num_slots),
            zeros(self.num_slots, self.head_v_dim),
            zeros(self.num_slots),
            self._zeros(batch_size, 1, device=device, dtype=torch.int64),
        )

    def forward(
        self, x: Tensor, state: ABCState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, ABCState]:
        keys, values, weights, read = self._begin(x, state, cu_seqlens)
        steps, read = positions(read, x.shape[1], cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj, self.s_proj)
        q, k, v, s = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        q, k = (rotate(part, steps, self.rotated, self.rope_base) for part in (q, k))
        e = s.clamp(-self.clamp, self.clamp).exp()
        z, weights = linear_scan(e, e.new_ones(()), weights, cu_seqlens=cu_seqlens)
        sums, keys = linear_attention(q, k, e, state=keys, cu_seqlens=cu_seqlens)
        p = (sums / z).softmax(-1)
        o, values = linear_attention(p / z, e, v, state=values, scale=1.0, cu_seqlens=cu_seqlens)
        y = self.g_norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(y.to(x.dtype).flatten(-2)), ABCState(keys, values, weights, read)
