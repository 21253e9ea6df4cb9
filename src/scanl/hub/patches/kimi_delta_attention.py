"""Kimi delta attention, in Kimi Linear, Bailing and GLM-5: the delta rule with a decay for each channel of a key."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.hub.patches.base import decay, register
from scanl.hub.patches.gated_deltanet import DeltaRulePatch, gated, remember
from scanl.layers.base import widen


class _KimiPatch(DeltaRulePatch):
    kernels: ClassVar = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn")
    reads: ClassVar = ("conv1d", "forget_gate", "o_norm")


def _run(
    module: Any,
    x: Tensor,
    forget: Tensor,
    bound: float | None,
    gate: Tensor,
    conv: Tensor | None,
    recurrent: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `run`. forget: (B, T, H K), before its bias.   bound: least log decay, or None.   gate: (B, T, H V)."""
    inputs = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
    rate, width = decay(module.forget_gate.A_log).view(-1, 1), module.head_dim
    raw = (widen(forget) + module.forget_gate.dt_bias).unflatten(-1, (-1, width))
    g = rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(-rate * raw)
    beta = module.b_proj(x).sigmoid()
    o, conv, recurrent = remember(module, inputs, beta, g, (width, width), conv, recurrent, cu_seqlens)
    return module.o_proj(gated(module.o_norm, o, gate)), inputs, conv, recurrent


@register("kimi_delta_attention")
class KimiDeltaAttentionPatch(_KimiPatch):
    """Kimi Linear and GLM-5: low-rank gates."""

    modules: ClassVar = ("kimi_linear.KimiLinearDeltaAttention", "glm5_next.Glm5NextTextLinearAttention")
    corrects: ClassVar = (*DeltaRulePatch.corrects, "forget gates beyond 88 have gradients")

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate = module.forget_gate
        bound = getattr(gate, "safe_gate_lower_bound", None)  # Kimi Linear does not have this option
        forget, out = gate.f_b_proj(gate.f_a_proj(x)), module.g_b_proj(module.g_a_proj(x))
        return _run(module, x, forget, bound, out, conv, recurrent, cu_seqlens)


@register("kimi_delta_attention_full_rank")
class KimiDeltaAttentionFullRankPatch(_KimiPatch):
    """Bailing: full-rank gates."""

    modules: ClassVar = ("bailing_hybrid.BailingHybridDeltaAttention",)

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate = module.forget_gate
        bound = gate.lower_bound if gate.safe_gate else None
        return _run(module, x, gate.f_proj(x), bound, module.g_proj(x), conv, recurrent, cu_seqlens)
