"""Attention with bounded-memory control: softmax attention over a few slots, each a weighted mean of all tokens."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate
from scanl.ops import linear_attention, linear_scan
from scanl.options import above


class ABCState(NamedTuple):
    """State of `ABC`: sums over all steps, and a count of steps."""

    keys: Annotated[Tensor, StateAxes("num_heads, head_k_dim, num_slots", "Σ k_j e_jᵀ")]
    values: Annotated[Tensor, StateAxes("num_heads, num_slots, head_v_dim", "Σ e_j v_jᵀ")]
    weights: Annotated[Tensor, StateAxes("num_heads, num_slots", "Σ e_j")]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("abc")
class ABC(Layer):
    """Attention with bounded-memory control: each token is added to M slots, with learned weights.

    The state holds sums and not means: the logits of the weights are clipped, so the sums cannot overflow.

    Parameters as in flash-linear-attention: q_proj, k_proj (H K, D); v_proj, g_proj (H V, D); s_proj (H M, D);
    g_norm.weight (V); o_proj (D, H V).
    Initialisation: linear weights N(0, 0.02²), norm 1.
    """

    id = "S-abc"
    aliases = ("attention_with_bounded_memory",)
    equation = (
        "K_t = sum_{j<=t} e_j k_j^T / sum_{j<=t} e_j,  V_t likewise,  e_t = exp(W_s x_t),  "
        "o_t = V_t^T softmax(K_t q_t / sqrt(K));  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Peng et al., "ABC: Attention with Bounded-memory Control", arXiv:2110.02488, sec. 3 and 4'
    op = "linear_attention"
    state: ClassVar = ABCState
    sample: ClassVar = {"num_heads": 2, "num_slots": 5, "expand_k": 4 / 3}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        expand_k: options.ExpandKeys = 0.5,
        expand_v: options.ExpandValues = 1.0,
        num_heads: options.FreeHeads = 4,
        num_slots: options.Slots = 64,
        rope_base: Annotated[
            options.RopeBase | None, "base of the rotary positions' wavelengths, for which K is even; None for none"
        ] = 10000.0,
        output_gate: Annotated[options.OutputGate, "a SiLU gate after the norm"] = True,
        clamp: Annotated[float, above(0), "the logits of the weights are clipped to ±clamp"] = 32.0,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        self.head_k_dim, self.head_v_dim = (round(expand * dim) // num_heads for expand in (expand_k, expand_v))
        if rope_base is not None and self.head_k_dim % 2:
            expected = f"an even number of channels of a head because of rope_base, not {self.head_k_dim}"
            self._refuse("expand_k", expand_k, expected)
        self.dim, self.num_heads, self.num_slots, self.clamp = dim, num_heads, num_slots, clamp
        self.rope_base = rope_base
        key, value = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.q_proj, self.k_proj, self.v_proj, self.s_proj = (
            nn.Linear(dim, width, bias=False) for width in (key, key, value, num_heads * num_slots)
        )
        self.g_proj = nn.Linear(dim, value, bias=False) if output_gate else None
        self.g_norm = GatedRMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = nn.Linear(value, dim, bias=False)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def run(self, x: Tensor, state: ABCState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ABCState]:
        keys, values, weights, past = self._begin(x, state, cu_seqlens)
        steps, past = positions(past, x.shape[1], cu_seqlens)
        projections = (self.q_proj, self.k_proj, self.v_proj, self.s_proj)
        q, k, v, s = (widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in projections)
        if self.rope_base is not None:
            q, k = (rotate(tensor, steps, self.head_k_dim, self.rope_base) for tensor in (q, k))
        e = s.clamp(-self.clamp, self.clamp).exp()
        z, weights = linear_scan(e, e.new_ones(()), weights, cu_seqlens=cu_seqlens)
        sums, keys = linear_attention(q, k, e, state=keys, cu_seqlens=cu_seqlens)
        p = (sums / z).softmax(-1)
        o, values = linear_attention(p / z, e, v, state=values, scale=1.0, cu_seqlens=cu_seqlens)
        y = self.g_norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(y.to(x.dtype).flatten(-2)), ABCState(keys, values, weights, past)
