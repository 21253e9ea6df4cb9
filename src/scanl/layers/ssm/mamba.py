r"""Mamba: a short convolution, then a selective state space model.

.. math:: h_t = e^{\Delta_t A} \odot h_{t-1} + (\Delta_t u_t)\, B_t^\top, \; y_t = h_t C_t + D \odot u_t, \quad
          u = \mathrm{SiLU}(\mathrm{conv}(W_u x)), \; (\delta, B, C) = W_x u, \;
          \Delta = \mathrm{softplus}(W_\Delta \delta + b)
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, Layer, register, widen
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.parts.time_step import check_step_range, time_step_bias
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.state import Device, DType
from scanl.ops import selective_scan


class MambaState(NamedTuple):
    """State of `Mamba`, in float32 or wider.

    conv: the last d_conv - 1 inputs of the convolution (B, d_conv - 1, E).   ssm: h (B, E, N).
    """

    conv: Tensor
    ssm: Tensor


class StepProjection(nn.Linear):
    """The linear map to the step sizes, whose result is in float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        # The bias is added in float32. It sets the time scale, and half precision would round it by up to 0.4 %.
        return F.linear(input, self.weight) + widen(self.bias)


@register("mamba")
class Mamba(Layer):
    """Mamba (S6): a diagonal recurrence whose step size, input and output depend on the input.

    B is discretised as Δ B, as in the released code. The zero-order hold of the paper's eq. (4) differs by O(Δ²).

    Args:
        dim: D, model width.
        d_state: N, state of each channel.
        d_conv: window of the convolution.
        expand: E = expand * dim channels.
        dt_rank: R, rank of the map to Δ; "auto" is dim/16, rounded up.
        dt_min, dt_max: range of the initial Δ, in steps.
        dt_init: initial W_Δ, "random" or "constant".
        dt_scale: scale of the initial W_Δ.
        dt_init_floor: minimum of the initial Δ.
        conv_bias: bias in the convolution.
        bias: biases in in_proj and out_proj.
        norm_eps: epsilon of RMS norms without weights over δ, B and C, as in Falcon-Mamba; None for no norm.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. It multiplies Δ.

    Parameters as in mamba_ssm: in_proj (2E, D) for [u; z]; conv1d (E, 1, d_conv); x_proj (R + 2N, E); dt_proj (E, R)
    with bias; A_log (E, N); D (E); out_proj (D, E). A_log, D and dt_proj.bias have no weight decay.
    Initialisation: A = -(1, ..., N) for each channel, D = 1; W_Δ uniform in ±dt_scale/sqrt(R), or that constant;
    softplus(b) log-uniform in [dt_min, dt_max], at least dt_init_floor; all else as in PyTorch.
    State: MambaState.
    """

    id = "S-mamba"
    aliases = ("S6", "selective_ssm")
    equation = "h_t = exp(Delta_t A) * h_{t-1} + (Delta_t u_t) B_t^T,  y = W_out ((h_t C_t + D * u_t) * SiLU(z_t))"
    source = (
        'Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752, '
        "algorithm 2 and figure 3"
    )
    op = "selective_scan"
    reads: ClassVar = {"conv1d": nn.Conv1d}
    takes: ClassVar = frozenset({"timespans"})
    sample: ClassVar = {"d_state": 3, "dt_rank": 2}
    residual_out = "out_proj"
    hints: ClassVar = dict.fromkeys(("dt_proj.bias", "A_log", "D"), UNDECAYED)

    def __init__(
        self,
        dim: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if min(dim, d_state, d_conv) < 1:
            raise ConfigError(f"mamba: dim, d_state, d_conv are {dim}, {d_state}, {d_conv}, expected at least 1")
        if int(expand * dim) < 1:
            raise ConfigError(f"mamba: expand is {expand}, expected at least 1/{dim} because of dim={dim}")
        if dt_rank != "auto" and (not isinstance(dt_rank, int) or dt_rank < 1):
            raise ConfigError(f"mamba: dt_rank is {dt_rank!r}, expected 'auto' or an integer of at least 1")
        check_step_range(self._who(), dt_min, dt_max)
        if dt_init not in ("random", "constant"):
            raise ConfigError(f"mamba: dt_init is {dt_init!r}, expected 'random' or 'constant'")
        self.dim = dim
        self.d_inner = int(expand * dim)
        self.d_state = d_state
        self.d_conv = d_conv
        self.norm_eps = norm_eps
        self.dt_rank = math.ceil(dim / 16) if isinstance(dt_rank, str) else dt_rank
        self.in_proj = nn.Linear(dim, 2 * self.d_inner, bias=bias)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1, bias=conv_bias
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = StepProjection(self.dt_rank, self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, dim, bias=bias)
        scale = dt_scale * self.dt_rank**-0.5
        with torch.no_grad():
            if dt_init == "random":
                self.dt_proj.weight.uniform_(-scale, scale)
            else:
                self.dt_proj.weight.fill_(scale)
            self.dt_proj.bias.copy_(time_step_bias(self.d_inner, dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MambaState:
        sizes = ((self.d_conv - 1, self.d_inner), (self.d_inner, self.d_state))
        return MambaState(
            *(self._zeros(batch_size, *size, device=device, dtype=dtype, at_least=torch.float32) for size in sizes)
        )

    def forward(
        self,
        x: Tensor,
        state: MambaState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, MambaState]:
        self._check(x, state, cu_seqlens)
        check_timespans(self._who(), timespans, x)
        u, z = self.in_proj(x).chunk(2, -1)
        y, state = self._read(u, z, state, cu_seqlens, timespans)
        return self.out_proj(y), state

    def _read(
        self, u: Tensor, z: Tensor, state: MambaState | None, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, MambaState]:
        """Return what lies between the two projections, and the state. u: main branch, z: gate."""
        parts = (self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D)
        return self._select(u, z, *parts, state, cu_seqlens, timespans)

    def _select(
        self,
        u: Tensor,
        z: Tensor,
        conv1d: nn.Conv1d,
        x_proj: nn.Linear,
        dt_proj: nn.Linear,
        A_log: Tensor,
        D: Tensor,
        state: MambaState | None,
        cu_seqlens: Tensor | None,
        timespans: Tensor | None,
    ) -> tuple[Tensor, MambaState]:
        """Do the same by the parts given."""
        conv, ssm = (None, None) if state is None else state
        u, conv = convolve(conv1d, u, conv, cu_seqlens=cu_seqlens, silu=True)
        low, B, C = x_proj(u).split([self.dt_rank, self.d_state, self.d_state], -1)
        if self.norm_eps is not None:
            low, B, C = (F.rms_norm(part, part.shape[-1:], None, self.norm_eps) for part in (low, B, C))
        delta = dt_proj(low)
        if timespans is not None:
            delta = F.softplus(delta) * widen(timespans)[..., None]
        A = -widen(A_log).exp()
        y, ssm = selective_scan(
            u, delta, A, B, C, widen(D), z, None, ssm, delta_softplus=timespans is None, cu_seqlens=cu_seqlens
        )
        return y, MambaState(conv, ssm)
