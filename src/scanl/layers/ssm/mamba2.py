r"""Mamba-2: a state space model with one decay per head, computed as linear attention.

.. math:: S_t = e^{-e^{A_{\log}} \Delta_t} S_{t-1} + B_t (\Delta_t x_t)^\top, \quad y_t = S_t^\top C_t + D x_t, \quad
          \Delta_t = \mathrm{softplus}(\mathrm{dt}_t + b)
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, Layer, register, widen
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.parts.time_step import check_step_range, time_step_bias
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention


class Mamba2State(NamedTuple):
    """State of `Mamba2`.

    ssm: S (B, H, N, headdim).   conv: the last W-1 inputs of the convolution (B, W-1, d_inner + 2 G N).
    """

    ssm: Tensor
    conv: Tensor


@register("mamba2")
class Mamba2(Layer):
    """Mamba-2, the SSD layer: convolved x, B and C, one scalar decay per head, and a norm after the gate.

    Args:
        dim: D, model width.
        d_state: N, rows of the state.
        d_conv: W, window of the convolution.
        expand: d_inner = expand * D channels, in H = d_inner / headdim heads.
        headdim: P, channels of a head.
        ngroups: G, groups of heads; the heads of a group use the same B and C, and the norm is over each group.
        A_init_range: range of the initial decay rates e^{A_log}, uniform, per unit of Δ.
        dt_min, dt_max, dt_init_floor: initial Δ, log-uniform in [dt_min, dt_max] and at least the floor.
        bias: biases in in_proj and out_proj.
        conv_bias: bias in the convolution.
        norm_eps: epsilon of the norm.

    Parameters as in mamba_ssm: in_proj (2 d_inner + 2 G N + H, D) for z, x, B, C and dt; conv1d.weight
    (d_inner + 2 G N, 1, W) and its bias; dt_bias, A_log, D (H), without weight decay; norm.weight (d_inner);
    out_proj (D, d_inner).
    Initialisation: A_log = ln U(A_init_range), dt_bias = softplus⁻¹(Δ), D 1, norm 1, the rest as in PyTorch.
    State: S (B, H, N, P), zeros, and the last inputs of the convolution.
    """

    id = "S-mamba2"
    aliases = ("SSD",)
    equation = (
        "S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T,  y_t = S_t^T C_t + D x_t;  "
        "out = W_out RMSNorm(y * SiLU(z))"
    )
    source = 'Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, eq. (16) and sec. 7.1'
    op = "linear_attention"
    reads: ClassVar = {"conv1d": nn.Conv1d}
    sample: ClassVar = {"d_state": 3, "headdim": 4, "ngroups": 2, "expand": 2}
    residual_out = "out_proj"
    hints: ClassVar = dict.fromkeys(("dt_bias", "A_log", "D"), UNDECAYED)

    def __init__(
        self,
        dim: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.dim = dim
        inner = expand * dim
        if min(dim, expand, d_state, d_conv) < 1:
            found = f"dim is {dim}, expand is {expand}, d_state is {d_state} and d_conv is {d_conv}"
            raise ConfigError(f"mamba2: {found}, expected at least 1")
        if headdim < 1 or inner % headdim:
            raise ConfigError(f"mamba2: headdim is {headdim}, expected a divisor of expand * dim={inner}")
        heads = inner // headdim
        if ngroups < 1 or heads % ngroups:
            raise ConfigError(f"mamba2: ngroups is {ngroups}, expected a divisor of expand * dim / headdim={heads}")
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ConfigError(f"mamba2: A_init_range is {A_init_range}, expected 0 < low <= high")
        check_step_range(self._who(), dt_min, dt_max)
        self.heads, self.headdim, self.ngroups, self.d_state, self.d_conv = heads, headdim, ngroups, d_state, d_conv
        self.widths = [inner, ngroups * d_state, ngroups * d_state]
        convolved = sum(self.widths)
        self.in_proj = nn.Linear(dim, inner + convolved + heads, bias=bias)
        self.conv1d = nn.Conv1d(convolved, convolved, d_conv, groups=convolved, bias=conv_bias)
        self.dt_bias = nn.Parameter(time_step_bias(heads, dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*A_init_range).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(inner, norm_eps, gate_first=True, groups=ngroups)
        self.out_proj = nn.Linear(inner, dim, bias=bias)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Mamba2State:
        ssm, conv = (self.heads, self.d_state, self.headdim), (self.d_conv - 1, sum(self.widths))
        return Mamba2State(
            self._zeros(batch_size, *ssm, device=device, dtype=dtype, at_least=torch.float32),
            self._zeros(batch_size, *conv, device=device, dtype=dtype, at_least=torch.float32),
        )

    def forward(
        self, x: Tensor, state: Mamba2State | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Mamba2State]:
        self._check(x, state, cu_seqlens)
        ssm, conv = (None, None) if state is None else state
        z, u, dt = self.in_proj(x).split([self.widths[0], sum(self.widths), self.heads], -1)
        u, conv = convolve(self.conv1d, u, conv, cu_seqlens=cu_seqlens, silu=True)
        u, B, C = u.split(self.widths, -1)
        u = u.unflatten(-1, (self.heads, self.headdim))
        B, C = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (B, C))
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        g = dt * -widen(self.A_log).exp()
        y, ssm = linear_attention(C, B, dt[..., None] * u, g, state=ssm, scale=1.0, cu_seqlens=cu_seqlens)
        y = torch.addcmul(y, self.D[:, None], u).flatten(-2)
        return self.out_proj(self.norm(y, z).to(z.dtype)), Mamba2State(ssm, conv)
