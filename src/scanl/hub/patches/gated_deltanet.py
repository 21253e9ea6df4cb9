"""Gated DeltaNet in Qwen's models since Qwen3-Next, and in OLMo Hybrid."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.hub.patches.base import CachedPatch, convolved, decay, register
from scanl.layers.base import widen
from scanl.ops import delta_rule
from scanl.ops._frame.context import late

_GATES = {"silu": late(F, "silu"), "sigmoid": late(torch, "sigmoid")}


class DeltaRulePatch(CachedPatch):
    """One convolution over queries, keys and values; a memory with the delta rule; a gated norm."""

    original: ClassVar = "chunks in a Python loop"
    runs: ClassVar = "short_convolution, delta_rule"
    corrects: ClassVar = (
        "packed sequences are kept apart",
        "padding on the right, or fed as a single token, does not change the state",
    )
    needs_call: ClassVar = ("packing",)


def remember(
    module: Any,
    inputs: Tensor,
    beta: Tensor,
    g: Tensor,
    widths: tuple[int, int],
    conv: Tensor | None,
    recurrent: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the readout o (B, T, H, V), float32 or wider, and the new states of convolution and memory.

    inputs: queries, keys and values concatenated, (B, T, 2 G K + H V), before their convolution.   beta: write
    strength, (B, T, H).   g: log decay, (B, T, H) or (B, T, H, K).   widths: K and V.
    """
    u, after = convolved(module, inputs, conv, cu_seqlens, module.activation)
    (K, V), heads = widths, beta.shape[-1]
    keys = (u.shape[-1] - heads * V) // 2
    q, k, v = u.split([keys, keys, heads * V], -1)
    # rms_norm makes a query sqrt(K) times a unit vector. The scale 1/K instead of 1/sqrt(K) compensates for that.
    q = F.rms_norm(widen(q.unflatten(-1, (-1, K))), (K,), None, 1e-6 / K)
    k, v = k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))
    o, last = delta_rule(q, k, v, beta, g, recurrent, scale=1 / K, normalize_keys=True, cu_seqlens=cu_seqlens)
    return o, after, last


def gated(norm: Any, o: Tensor, gate: Tensor) -> Tensor:
    """Apply the original's norm to each head of o (B, T, H, V), times the gate (B, T, H V), in the gate's dtype."""
    o = F.rms_norm(o, o.shape[-1:], widen(norm.weight), norm.variance_epsilon).flatten(-2)
    return (o * _GATES[norm.activation](widen(gate))).to(gate.dtype)


def _log_decay(module: Any, a: Tensor) -> Tensor:
    return decay(module.A_log) * F.softplus(widen(a) + module.dt_bias)


class _GatedPatch(DeltaRulePatch):
    kernels: ClassVar = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")
    reads: ClassVar = ("conv1d", "norm")


@register("gated_deltanet")
class GatedDeltaNetPatch(_GatedPatch):
    modules: ClassVar = (
        "qwen3_5.Qwen3_5GatedDeltaNet",
        "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
        "qwen4_exp.Qwen4ExpTextGatedDeltaNet",
    )

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, beta = module.in_proj_qkv(x), module.in_proj_b(x).sigmoid()
        g, widths = _log_decay(module, module.in_proj_a(x)), (module.head_k_dim, module.head_v_dim)
        o, conv, recurrent = remember(module, inputs, beta, g, widths, conv, recurrent, cu_seqlens)
        return module.out_proj(gated(module.norm, o, module.in_proj_z(x))), inputs, conv, recurrent


@register("gated_deltanet_by_key")
class GatedDeltaNetByKeyPatch(_GatedPatch):
    """Qwen3-Next: one projection, whose outputs are grouped by head of keys."""

    modules: ClassVar = ("qwen3_next.Qwen3NextGatedDeltaNet",)

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, K, V = module.num_k_heads, module.head_k_dim, module.head_v_dim
        values = module.value_dim // heads
        parts = module.in_proj_qkvz(x).unflatten(-1, (heads, -1)).split([K, K, values, values], -1)
        q, k, v, z = (piece.flatten(-2) for piece in parts)
        b, a = (piece.flatten(-2) for piece in module.in_proj_ba(x).unflatten(-1, (heads, -1)).chunk(2, -1))
        inputs, g = torch.cat([q, k, v], -1), _log_decay(module, a)
        o, conv, recurrent = remember(module, inputs, b.sigmoid(), g, (K, V), conv, recurrent, cu_seqlens)
        return module.out_proj(gated(module.norm, o, z)), inputs, conv, recurrent


@register("gated_deltanet_apart")
class GatedDeltaNetApartPatch(_GatedPatch):
    """OLMo Hybrid: queries, keys and values have separate projections. Write strengths may be up to 2."""

    modules: ClassVar = ("olmo_hybrid.OlmoHybridGatedDeltaNet",)
    reads: ClassVar = ("conv1d", "o_norm")

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        beta = module.b_proj(x).sigmoid()
        beta = 2 * beta if module.allow_neg_eigval else beta
        g, widths = _log_decay(module, module.a_proj(x)), (module.head_k_dim, module.head_v_dim)
        o, conv, recurrent = remember(module, inputs, beta, g, widths, conv, recurrent, cu_seqlens)
        return module.o_proj(gated(module.o_norm, o, module.g_proj(x))), inputs, conv, recurrent
