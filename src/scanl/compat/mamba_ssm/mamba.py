"""The module `Mamba` of mamba-ssm, and the function of its inner part."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl import layers
from scanl.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from scanl.compat.mamba_ssm.decoding import cached, check_one_step, undecayed
from scanl.compat.mamba_ssm.scans import selective_scan_fn, selective_state_update
from scanl.layers.base import widen


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Compute Mamba after its input projection: xz (B, 2E, T) to y (B, T, D).

    B, C: (E, N), or None for those that x_proj_weight projects. Weights are as in the module `Mamba`, and the norms
    over B, C and δ have weights if given. checkpoint_lvl is for the original's memory; it is ignored.
    """
    size = A.shape[1] * (2 if A.is_complex() else 1)
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    assert isinstance(x, Tensor)
    sizes = [delta_proj_weight.shape[1], size * (B is None), size * (C is None)]
    low, b, c = F.linear(x.mT, x_proj_weight).split(sizes, -1)
    low = _normed(low, dt_rms_weight, b_c_dt_rms_eps)
    delta = F.linear(low, delta_proj_weight).mT
    B = _projected(b, B_proj_bias, b_rms_weight, b_c_dt_rms_eps, A) if B is None else B
    C = _projected(c, C_proj_bias, c_rms_weight, b_c_dt_rms_eps, A) if C is None else C
    y = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(y, Tensor)
    return F.linear(y.mT, out_proj_weight, out_proj_bias)


def _projected(B: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, A: Tensor) -> Tensor:
    """Return B (B, T, N) in the form of `selective_scan_fn`; of complex numbers the parts alternate."""
    B = _normed(B if bias is None else B + bias.to(B.dtype), norm, eps)
    return B.unflatten(-1, (-1, 2)).movedim(1, 2).flatten(2) if A.is_complex() else B.mT


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, eps)


class Mamba(nn.Module):
    """Mamba as in mamba-ssm: its parameters, its initialization, its forward pass and its decoding.

    The parameters are as in `scanl.layers.Mamba`, which returns a state instead of writing it in place.
    use_fast_path is for the original's kernels; it is ignored.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: Any = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.use_fast_path, self.layer_idx, self.activation = use_fast_path, layer_idx, "silu"
        rank = None if isinstance(dt_rank, str) else dt_rank
        with torch.device(device or torch.get_default_device()):
            layer = layers.Mamba(
                d_model, d_state, d_conv, expand, rank, dt_min, dt_max, dt_init, dt_init_floor, conv_bias, bias
            )
        self.d_inner, self.dt_rank = layer.width, layer.rank
        self.in_proj, self.conv1d = layer.in_proj.to(dtype=dtype), layer.conv1d.to(dtype=dtype)
        self.x_proj, self.dt_proj = layer.x_proj.to(dtype=dtype), layer.dt_proj.to(dtype=dtype)
        self.out_proj = layer.out_proj.to(dtype=dtype)
        self.act = nn.SiLU()
        self.A_log, self.D = layer.A_log, layer.D  # float32 whatever dtype is, as in the original
        undecayed(self.A_log, self.D)
        with torch.no_grad():
            self.dt_proj.weight.mul_(dt_scale)

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
        """Return y (B, T, D) of x (B, T, D).

        inference_params: as in mamba-ssm. At seqlen_offset 0 the states are written into its key_value_memory_dict;
        afterwards a call takes one step and changes them in place.
        """
        conv_state, ssm_state = None, None
        if inference_params is not None:
            conv_state, ssm_state = cached(self, inference_params, len(hidden_states))
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, conv_state, ssm_state)[0]
        x, z = self.in_proj(hidden_states).mT.chunk(2, 1)
        if conv_state is not None:
            conv_state.copy_(F.pad(x, (self.d_conv - x.shape[-1], 0)))
        x = causal_conv1d_fn(x, self.conv1d.weight[:, 0], self.conv1d.bias, activation=self.activation)
        assert isinstance(x, Tensor)
        low, B, C = self.x_proj(x.mT).split([self.dt_rank, self.d_state, self.d_state], -1)
        delta, bias = F.linear(low, self.dt_proj.weight).mT, widen(self.dt_proj.bias)
        A, D = -widen(self.A_log).exp(), widen(self.D)
        y, last = selective_scan_fn(x, delta, A, B.mT, C.mT, D, z, bias, True, return_last_state=True)
        if ssm_state is not None:
            ssm_state.copy_(last)
        return self.out_proj(y.mT)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y (B, 1, D) of one step x (B, 1, D), and the states, which change in place."""
        check_one_step("Mamba.step", hidden_states)
        x, z = self.in_proj(hidden_states[:, 0]).chunk(2, -1)
        x = causal_conv1d_update(x, conv_state, self.conv1d.weight[:, 0], self.conv1d.bias, self.activation)
        low, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        delta, bias = F.linear(low, self.dt_proj.weight), self.dt_proj.bias
        A = -widen(self.A_log).exp()
        y = selective_state_update(ssm_state, x, delta, A, B, C, self.D, z, bias, dt_softplus=True)
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return empty states: the last inputs of the convolution (B, E, W), and h (B, E, N). max_seqlen is ignored."""
        conv, ssm = self.conv1d.weight, self.dt_proj.weight
        return (
            conv.new_zeros(batch_size, self.d_inner, self.d_conv, dtype=dtype),
            ssm.new_zeros(batch_size, self.d_inner, self.d_state, dtype=dtype),
        )
