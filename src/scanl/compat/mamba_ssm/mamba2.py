"""The module `Mamba2` of mamba-ssm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from scanl.compat.mamba_ssm.decoding import cached, check_one_step, undecayed
from scanl.compat.mamba_ssm.scans import mamba_chunk_scan_combined, selective_state_update
from scanl.errors import ConfigError
from scanl.layers.base import widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.time_step import time_step_bias


class Mamba2(nn.Module):
    """Mamba-2 as in mamba-ssm: its parameters, its initialization, its forward pass and its decoding.

    d_ssm: channels of the recurrence; a gated linear unit takes the others. D_has_hdim, rmsnorm, norm_before_gate: the
    original's. `scanl.layers.Mamba2` has the usual choice of these. chunk_size, use_mem_eff_path and sequence_parallel
    are for the original's kernels and processes; they are ignored. Raises ConfigError for a process_group.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.d_state, self.d_conv, self.conv_init, self.expand = (
            d_model,
            d_state,
            d_conv,
            conv_init,
            expand,
        )
        self.d_inner, self.headdim, self.ngroups = expand * d_model, headdim, ngroups
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        if process_group is not None:
            raise ConfigError(f"Mamba2: process_group is {process_group!r}, expected None: scanl splits no layer")
        if self.d_ssm % headdim or self.d_ssm > self.d_inner:
            raise ConfigError(
                f"Mamba2: d_ssm is {self.d_ssm}, expected a multiple of headdim={headdim}, at most {self.d_inner}"
            )
        self.nheads, self.D_has_hdim, self.rmsnorm = self.d_ssm // headdim, D_has_hdim, rmsnorm
        self.norm_before_gate, self.dt_limit, self.activation = norm_before_gate, dt_limit, "silu"
        self.chunk_size, self.use_mem_eff_path, self.layer_idx = chunk_size, use_mem_eff_path, layer_idx
        self.process_group, self.sequence_parallel = process_group, sequence_parallel
        self.convolved = [self.d_ssm, ngroups * d_state, ngroups * d_state]  # x, B, C
        gated, width = self.d_inner - self.d_ssm, sum(self.convolved)
        self.projected = [gated, gated, self.d_ssm, width, self.nheads]  # both parts of the gated unit, z, xBC, dt
        with torch.device(device or torch.get_default_device()):
            self.in_proj = nn.Linear(d_model, sum(self.projected), bias, dtype=dtype)
            self.conv1d = nn.Conv1d(width, width, d_conv, groups=width, padding=d_conv - 1, bias=conv_bias, dtype=dtype)
            if conv_init is not None:
                nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
            self.act = nn.SiLU()
            self.dt_bias = nn.Parameter(time_step_bias(self.nheads, dt_min, dt_max, dt_init_floor).to(dtype))
            self.A_log = nn.Parameter(torch.empty(self.nheads).uniform_(*A_init_range).log().to(dtype))
            self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads))
            if rmsnorm:
                self.norm = GatedRMSNorm(self.d_ssm, gate_first=not norm_before_gate, groups=ngroups).to(dtype=dtype)
            self.out_proj = nn.Linear(self.d_inner, d_model, bias, dtype=dtype)
        undecayed(self.dt_bias, self.A_log, self.D)

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Return y like u (B, T, D), or (B T, D) with seqlen=T.

        seq_idx: the number of the sequence of each step, (B, T); each has a state of its own.   cu_seqlens:
        offsets of the sequences of one row, (N+1,), as seq_idx has them, so that inference_params gets a state for
        each.   inference_params: as in mamba-ssm. At seqlen_offset 0 the states are written into its
        key_value_memory_dict; afterwards a call takes one step and changes them in place.
        """
        x = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        if cu_seqlens is not None and seq_idx is None:
            raise ConfigError("Mamba2: cu_seqlens is given, expected seq_idx with it: the state is reset by seq_idx")
        conv_state, ssm_state = None, None
        if inference_params is not None:
            rows = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
            conv_state, ssm_state = cached(self, inference_params, rows)
            if inference_params.seqlen_offset > 0:
                return self.step(u, conv_state, ssm_state)[0]
        gate, linear, z, xBC, dt = self.in_proj(x).split(self.projected, -1)
        if conv_state is not None:
            if cu_seqlens is None:
                conv_state.copy_(F.pad(xBC.mT, (self.d_conv - xBC.shape[1], 0)))
            else:
                conv_state.copy_(causal_conv1d_varlen_states(xBC[0], cu_seqlens, self.d_conv))
        weights = self.conv1d.weight[:, 0], self.conv1d.bias
        xBC = causal_conv1d_fn(xBC.mT, *weights, seq_idx=seq_idx, activation=self.activation)
        assert isinstance(xBC, Tensor)
        inputs, B, C = xBC.mT.split(self.convolved, -1)
        varlen = ssm_state is not None and cu_seqlens is not None
        y, *ends = mamba_chunk_scan_combined(
            self._heads(inputs), dt, -widen(self.A_log).exp(), self._groups(B), self._groups(C), self.chunk_size,
            self._heads(self.D) if self.D_has_hdim else self.D, None if self.rmsnorm else self._heads(z), self.dt_bias,
            seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=True, dt_limit=self.dt_limit,
            return_final_states=True, return_varlen_states=varlen,
        )  # fmt: skip
        if ssm_state is not None:
            ssm_state.copy_(ends[-1])
        y = self._read(y, z, gate, linear)
        return y if seqlen is None else y.flatten(0, 1)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y (B, 1, D) of one step x (B, 1, D), and the states, which change in place.

        Δ is clipped to dt_limit, as in `forward`; the original clips it there alone.
        """
        check_one_step("Mamba2.step", hidden_states)
        gate, linear, z, xBC, dt = self.in_proj(hidden_states[:, 0]).split(self.projected, -1)
        xBC = causal_conv1d_update(xBC, conv_state, self.conv1d.weight[:, 0], self.conv1d.bias, self.activation)
        x, B, C = xBC.split(self.convolved, -1)
        heads = (self.nheads, self.headdim)
        dt = F.softplus(dt + self.dt_bias).clamp(*self.dt_limit).unsqueeze(-1).expand(-1, *heads)
        A = -widen(self.A_log).exp()[:, None, None].expand(*heads, self.d_state)
        D = self._heads(self.D) if self.D_has_hdim else self.D.unsqueeze(-1).expand(heads)
        z_heads = None if self.rmsnorm else self._heads(z)
        y = selective_state_update(ssm_state, self._heads(x), dt, A, self._groups(B), self._groups(C), D, z_heads)
        return self._read(y, z, gate, linear).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return empty states: the last inputs of the convolution, and h (B, H, P, N). max_seqlen is ignored."""
        conv, ssm = self.conv1d.weight, self.in_proj.weight
        return (
            conv.new_zeros(batch_size, self.d_conv, len(conv), dtype=dtype).mT,
            ssm.new_zeros(batch_size, self.nheads, self.headdim, self.d_state, dtype=dtype),
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.headdim))

    def _groups(self, B: Tensor) -> Tensor:
        return B.unflatten(-1, (self.ngroups, self.d_state))

    def _read(self, y: Tensor, z: Tensor, gate: Tensor, linear: Tensor) -> Tensor:
        """Return the output, from the heads' y (..., H, P), the gate z and both parts of the gated unit."""
        y = y.flatten(-2)
        y = self.norm(y, z) if self.rmsnorm else y
        return self.out_proj(torch.cat([F.silu(gate) * linear, y], -1))
