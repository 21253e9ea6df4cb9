"""Mamba: MambaMixer of transformers, and its variants in Falcon-Mamba, Jamba and Zamba."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.hub.patches.base import CachedPatch, convolved, decay, register
from scanl.ops import selective_scan


@register("mamba")
class MambaPatch(CachedPatch):
    modules: ClassVar = ("mamba.MambaMixer", "falcon_mamba.FalconMambaMixer", "jamba.JambaMambaMixer")
    original: ClassVar = "a Python loop over the steps"
    runs: ClassVar = "short_convolution, selective_scan"
    corrects: ClassVar = ("a prompt in several pieces keeps its state", "packed sequences are kept apart")
    kernels: ClassVar = ("mamba_selective_scan", "causal_conv1d_fn")
    reads: ClassVar = ("conv1d", "dt_proj")
    needs_call: ClassVar = ("packing",)

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, z = module.in_proj(x).chunk(2, -1)
        u, conv = convolved(module, inputs, conv, cu_seqlens, module.activation)
        rank, width = module.time_step_rank, module.ssm_state_size
        delta, B, C = module.x_proj(u).split([rank, width, width], -1)
        if hasattr(module, "dt_layernorm"):
            delta, B, C = module.dt_layernorm(delta), module.b_layernorm(B), module.c_layernorm(C)
        y, last = selective_scan(
            u,
            F.linear(delta, module.dt_proj.weight),
            decay(module.A_log),
            B,
            C,
            module.D.float(),
            z,
            module.dt_proj.bias.float(),
            recurrent,
            delta_softplus=True,
            cu_seqlens=cu_seqlens,
        )
        return module.out_proj(y), inputs, conv, last


@register("mamba_heads")
class MambaHeadsPatch(CachedPatch):
    """Zamba: each head has its own projections to B, C and the step size. All channels of a head use its B and C."""

    modules: ClassVar = ("zamba.ZambaMambaMixer",)
    original: ClassVar = MambaPatch.original
    runs: ClassVar = MambaPatch.runs
    corrects: ClassVar = MambaPatch.corrects
    kernels: ClassVar = MambaPatch.kernels
    reads: ClassVar = ("conv1d",)
    needs_call: ClassVar = MambaPatch.needs_call

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, width = module.n_mamba_heads, module.ssm_state_size
        # The projection's outputs alternate: a channel for the convolution, then a channel of the gate.
        inputs, z = module.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        u, conv = convolved(module, inputs, conv, cu_seqlens, module.activation)
        low = torch.einsum("bthd,hrd->bthr", u.unflatten(-1, (heads, -1)), module.x_proj_weight)
        delta, B, C = low.split([module.time_step_rank, width, width], -1)
        delta = torch.einsum("bthr,hdr->bthd", delta, module.dt_proj_weight).flatten(2)
        y, last = selective_scan(
            u,
            delta,
            decay(module.A_log).flatten(0, 1),
            B,
            C,
            module.D.float().flatten(),
            z,
            module.dt_proj_bias.float().flatten(),
            None if recurrent is None else recurrent.flatten(1, 2),
            delta_softplus=True,
            cu_seqlens=cu_seqlens,
        )
        return module.out_proj(y), inputs, conv, last.unflatten(1, (heads, -1))
