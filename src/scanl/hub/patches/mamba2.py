"""Mamba-2: Mamba2Mixer of transformers, and its variants in Bamba, Zamba2, Falcon-H1, Nemotron-H and Granite."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.hub.patches.base import CachedPatch, convolved, decay, register
from scanl.ops import linear_attention


@register("mamba2")
class Mamba2Patch(CachedPatch):
    modules: ClassVar = (
        "mamba2.Mamba2Mixer",
        "bamba.BambaMixer",
        "zamba2.Zamba2MambaMixer",
        "falcon_h1.FalconH1Mixer",
        "nemotron_h.NemotronHMamba2Mixer",
        "granitemoehybrid.GraniteMoeHybridMambaLayer",
    )
    original: ClassVar = "matrices over chunks of the steps"
    runs: ClassVar = "short_convolution, linear_attention"
    corrects: ClassVar = (
        "packed sequences are kept apart",
        "the limits of the step size hold for single steps too",
        "biases add nothing at left padding",
    )
    kernels: ClassVar = ("mamba2_chunk_scan", "causal_conv1d_fn")
    reads: ClassVar = ("conv1d",)
    needs_call: ClassVar = ("packing",)

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, keys = module.num_heads, (module.n_groups, module.ssm_state_size)
        z, inputs, dt = _projected(module, x).split([module.intermediate_size, module.conv_dim, heads], -1)
        u, conv = convolved(module, inputs, conv, cu_seqlens, module.activation)
        u, B, C = u.split([module.intermediate_size, math.prod(keys), math.prod(keys)], -1)
        u = u.unflatten(-1, (heads, -1))
        dt = _step_size(module, dt)
        y, state = linear_attention(
            C.float().unflatten(-1, keys),  # y has the dtype of C; the norm needs y unrounded
            B.unflatten(-1, keys),
            dt[..., None] * u,
            dt * decay(module.A_log),
            state=None if recurrent is None else recurrent.mT,
            scale=1.0,
            cu_seqlens=cu_seqlens,
        )
        y = torch.addcmul(y, module.D[:, None], u).flatten(-2)
        y = y * F.silu(z) if isinstance(module.norm, nn.Identity) else module.norm(y, z)
        # A cache made from this view keeps its strides, so the op later reads its own layout.
        return module.out_proj(y.to(x.dtype)), inputs, conv, state.mT


def _projected(module: Any, x: Tensor) -> Tensor:
    """Return z, the convolution's inputs and dt, concatenated. Falcon-H1 scales each by its own factor."""
    if hasattr(module, "mup_vector"):
        return module.in_proj(x * module.ssm_in_multiplier) * module.mup_vector
    return module.in_proj(x)


def _step_size(module: Any, dt: Tensor) -> Tensor:
    """Return Δ in float32, clipped to the module's limits."""
    dt = F.softplus(dt.float() + module.dt_bias.float())
    low, high = module.time_step_limit
    return dt.clamp(low, high) if low > 0 or high < math.inf else dt
