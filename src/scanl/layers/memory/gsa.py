"""Gated slot attention: softmax attention over a few slots, each a running average of keys and of values."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.ops import linear_attention
from scanl.options import above


class SlotState(NamedTuple):
    """State of attention over slots."""

    keys: Annotated[Tensor, StateAxes("num_heads, head_k_dim, num_slots", "a column for each slot")]
    values: Annotated[Tensor, StateAxes("num_heads, num_slots, head_v_dim", "a row for each slot")]


@registry.register("gsa")
class GSA(Layer):
    """Gated slot attention: M slots, each with its own forget gate, are read by softmax attention.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj (H V, D); f_proj (H M, D);
    g_norm.weight (H V), of the norm over all heads; o_proj (D, H V).
    Initialisation: linear weights N(0, 0.02²), norm 1.
    """

    id = "S-gsa"
    aliases = ("gated_slot_attention",)
    equation = (
        "K_t = Diag(a_t) K_{t-1} + (1 - a_t) k_t^T,  V_t = Diag(a_t) V_{t-1} + (1 - a_t) v_t^T,  "
        "o_t = V_t^T softmax(K_t q_t);  a_t = sigmoid(W_f x_t)^(1/tau),  y = W_o RMSNorm(SiLU(o))"
    )
    source = (
        'Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", arXiv:2409.07146, eq. (6) '
        "to (9)"
    )
    op = "linear_attention"
    state: ClassVar = SlotState
    sample: ClassVar = {"num_heads": 2, "num_slots": 5}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand_k: options.ExpandKeys = 1.0,
        expand_v: options.ExpandValues = 1.0,
        num_heads: options.FreeHeads = 4,
        num_slots: options.Slots = 64,
        gate_logit_normalizer: Annotated[float, above(0), "τ; a slot's gate is α_t = σ(W_f x_t)^(1/τ)"] = 8,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim, self.head_v_dim = (round(expand * dim) // num_heads for expand in (expand_k, expand_v))
        self.dim, self.num_heads, self.num_slots = dim, num_heads, num_slots
        self.gate_logit_normalizer = gate_logit_normalizer
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj, self.k_proj, self.v_proj, self.f_proj = (
            nn.Linear(dim, width, bias=False) for width in (key, key, value, num_heads * num_slots)
        )
        self.g_norm = GatedRMSNorm(value, norm_eps)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def run(self, x: Tensor, state: SlotState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, SlotState]:
        keys, values = state or (None, None)
        projections = (self.q_proj, self.k_proj, self.v_proj, self.f_proj)
        q, k, v, f = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        g = F.logsigmoid(f) / self.gate_logit_normalizer
        write = -torch.expm1(g)
        logits, keys = linear_attention(F.silu(q), F.silu(k), write, gv=g, state=keys, scale=1.0, cu_seqlens=cu_seqlens)
        o, values = linear_attention(
            logits.softmax(-1), write, F.silu(v), g, state=values, scale=1.0, cu_seqlens=cu_seqlens
        )
        return self.o_proj(self.g_norm(F.silu(o.flatten(-2)), None).to(x.dtype)), SlotState(keys, values)
