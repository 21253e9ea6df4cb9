r"""Gated slot attention: softmax attention over a few slots, each a running average of keys and of values.

.. math:: \tilde K_t = \mathrm{Diag}(\alpha_t) \tilde K_{t-1} + (1 - \alpha_t) k_t^\top, \quad
          \tilde V_t = \mathrm{Diag}(\alpha_t) \tilde V_{t-1} + (1 - \alpha_t) v_t^\top, \quad
          o_t = \tilde V_t^\top \mathrm{softmax}(\tilde K_t q_t)
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import whole_heads
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention


class SlotState(NamedTuple):
    """State of attention over slots. keys: (B, H, K, M), a column for each slot.   values: (B, H, M, V), a row each."""

    keys: Tensor
    values: Tensor


@register("gsa")
class GSA(Layer):
    """Gated slot attention: M slots, each with its own forget gate, are read by softmax attention.

    Args:
        dim: D, model width.
        expand_k, expand_v: all heads together have expand_k * D channels of keys and expand_v * D of values.
        num_heads: H.
        num_slots: M, slots of a head.
        gate_logit_normalizer: τ; a slot's gate is α_t = σ(W_f x_t)^(1/τ).
        norm_eps: ε of the norm.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj (H V, D); f_proj (H M, D);
    g_norm.weight (H V), of the norm over all heads; o_proj (D, H V).
    Initialisation: linear weights N(0, 0.02²), norm 1.
    State: slots of keys (B, H, K, M) and of values (B, H, M, V), zeros.
    """

    id = "S-gsa"
    equation = (
        "K_t = Diag(a_t) K_{t-1} + (1 - a_t) k_t^T,  V_t = Diag(a_t) V_{t-1} + (1 - a_t) v_t^T,  "
        "o_t = V_t^T softmax(K_t q_t);  a_t = sigmoid(W_f x_t)^(1/tau),  y = W_o RMSNorm(SiLU(o))"
    )
    source = (
        'Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", arXiv:2409.07146, eq. (6) '
        "to (9)"
    )
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2, "num_slots": 5}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: int,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_slots: int = 64,
        gate_logit_normalizer: float = 8,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim = whole_heads(self._who(), "expand_k", expand_k, dim, num_heads)
        self.head_v_dim = whole_heads(self._who(), "expand_v", expand_v, dim, num_heads)
        if num_slots < 1 or not gate_logit_normalizer > 0:
            found = f"num_slots is {num_slots} and gate_logit_normalizer is {gate_logit_normalizer}"
            raise ConfigError(f"{self._who()}: {found}, expected positive numbers")
        self.dim, self.num_heads, self.num_slots = dim, num_heads, num_slots
        self.gate_logit_normalizer = gate_logit_normalizer
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj, self.k_proj = nn.Linear(dim, key, bias=False), nn.Linear(dim, key, bias=False)
        self.v_proj = nn.Linear(dim, value, bias=False)
        self.f_proj = nn.Linear(dim, num_heads * num_slots, bias=False)
        self.g_norm = GatedRMSNorm(value, norm_eps)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> SlotState:
        def zeros(*shape: int) -> Tensor:
            return self._zeros(batch_size, self.num_heads, *shape, device=device, dtype=dtype, at_least=torch.float32)

        return SlotState(zeros(self.head_k_dim, self.num_slots), zeros(self.num_slots, self.head_v_dim))

    def forward(
        self, x: Tensor, state: SlotState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, SlotState]:
        self._check(x, state, cu_seqlens)
        keys, values = (None, None) if state is None else state
        projections = (self.q_proj, self.k_proj, self.v_proj, self.f_proj)
        q, k, v, f = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        g = F.logsigmoid(f) / self.gate_logit_normalizer
        write = -torch.expm1(g)
        logits, keys = linear_attention(F.silu(q), F.silu(k), write, gv=g, state=keys, scale=1.0, cu_seqlens=cu_seqlens)
        o, values = linear_attention(
            logits.softmax(-1), write, F.silu(v), g, state=values, scale=1.0, cu_seqlens=cu_seqlens
        )
        return self.o_proj(self.g_norm(F.silu(o.flatten(-2)), None).to(x.dtype)), SlotState(keys, values)
