"""Mamba: a short convolution, then a selective state space model."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive, affine
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.parts.time_step import time_step_bias
from scanl.ops import linear_scan, selective_scan
from scanl.ops.fused.gated import gated


class MambaState(NamedTuple):
    conv: Annotated[Tensor, StateAxes("conv_size - 1, width", "the last inputs of the convolution")]
    ssm: Annotated[Tensor, StateAxes("width, state_dim", "h")]


System = tuple[nn.Conv1d, nn.Linear, nn.Linear, Tensor, Tensor]  # conv1d, x_proj, dt_proj, A_log and D


class StepProjection(nn.Linear):
    """The linear map to the step sizes, whose result is in float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        # The bias is added in float32. It sets the time scale, and half precision would round it by up to 0.4 %.
        return F.linear(input, self.weight) + widen(self.bias)


@registry.register("mamba")
class Mamba(ChannelwiseLayer):
    """Mamba (S6): a diagonal recurrence whose step size, input and output depend on the input.

    B is discretized as Δ B, as in the released code. The zero-order hold of the paper's eq. (4) differs by O(Δ²).

    Parameters as in mamba_ssm: in_proj (2E, D) for [u; z]; conv1d (E, 1, W); x_proj (R + 2N, E); dt_proj (E, R)
    with bias; A_log (E, N); D (E); out_proj (D, E). A_log, D and dt_proj.bias have no weight decay.
    Initialisation: A = -(1, ..., N) for each channel, D = 1; W_Δ uniform in ±1/sqrt(R), or that constant;
    softplus(b) log-uniform in [dt_min, dt_max], at least dt_init_floor; all else as in PyTorch.
    """

    id = "S-mamba"
    aliases = ("S6", "selective_ssm", "selective_state_space")
    equation = (
        "h_t = exp(Delta_t A) * h_{t-1} + (Delta_t u_t) B_t^T,  y = W_out ((h_t C_t + D * u_t) * SiLU(z_t)),  "
        "u = SiLU(conv(W_u x)),  [delta; B; C] = W_x u,  Delta = softplus(W_Delta delta + b)"
    )
    source = (
        'Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752, '
        "algorithm 2 and figure 3"
    )
    op = "selective_scan"
    reads: ClassVar = {"conv1d": nn.Conv1d}
    state: ClassVar = MambaState
    sample: ClassVar = {"state_dim": 3, "rank": 2}
    residual_out = "out_proj"
    left_out = ("in_proj", "conv1d", "x_proj", "dt_proj.weight")
    hints: ClassVar = dict.fromkeys(("dt_proj.bias", "A_log", "D"), UNDECAYED_HINT)

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "N, state of each channel"] = 16,
        conv_size: options.ConvSize = 4,
        expand: Annotated[options.Expand, "E = expand * dim channels"] = 2,
        rank: Annotated[options.Rank | None, "R, rank of the map to Δ; by default dim/16, rounded up"] = None,
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        dt_init: Annotated[Literal["random", "constant"], "initial W_Δ"] = "random",
        dt_init_floor: options.StepFloor = 1e-4,
        conv_bias: options.ConvBias = True,
        bias: Annotated[options.Bias, "biases in in_proj and out_proj"] = False,
        norm_eps: Annotated[
            options.NormEps | None,
            "ε of RMS norms without weights over δ, B and C, as in Falcon-Mamba; None for no norm",
        ] = None,
    ) -> None:
        super().__init__()
        width = int(expand * dim)
        if width < 1:
            self._refuse("expand", expand, f"at least 1/{dim} because of dim={dim}")
        self.dim, self.width, self.state_dim, self.conv_size = dim, width, state_dim, conv_size
        self.norm_eps = norm_eps
        self.rank = math.ceil(dim / 16) if rank is None else rank
        self.in_proj = nn.Linear(dim, 2 * width, bias=bias)
        self.conv1d = nn.Conv1d(width, width, conv_size, groups=width, padding=conv_size - 1, bias=conv_bias)
        self.x_proj = nn.Linear(width, self.rank + 2 * state_dim, bias=False)
        self.dt_proj = StepProjection(self.rank, width)
        self.out_proj = nn.Linear(width, dim, bias=bias)
        scale = self.rank**-0.5
        with torch.no_grad():
            if dt_init == "random":
                self.dt_proj.weight.uniform_(-scale, scale)
            else:
                self.dt_proj.weight.fill_(scale)
            self.dt_proj.bias.copy_(time_step_bias(width, dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.arange(1.0, state_dim + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))

    def run(
        self, x: Tensor, state: MambaState | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, MambaState]:
        u, z = self.in_proj(x).chunk(2, -1)
        y, state = self._read(u, z, state, cu_seqlens, timespans)
        return self.out_proj(y), state

    def _read(
        self, u: Tensor, z: Tensor, state: MambaState | None, cu_seqlens: Tensor | None, timespans: Tensor | None
    ) -> tuple[Tensor, MambaState]:
        """Compute the layer between its two projections; return the result and the state. u: main branch, z: gate."""
        system = self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D
        return self._select(u, z, system, state, cu_seqlens, timespans)

    def _select(
        self,
        u: Tensor,
        z: Tensor,
        system: System,
        state: MambaState | None,
        cu_seqlens: Tensor | None,
        timespans: Tensor | None,
    ) -> tuple[Tensor, MambaState]:
        """Do the same by the modules and parameters of a system."""
        (conv1d, x_proj, dt_proj, A_log, D), (conv, ssm) = system, state or (None, None)
        u, conv = convolve(conv1d, u, conv, cu_seqlens=cu_seqlens, silu=True)
        low, B, C = x_proj(u).split([self.rank, self.state_dim, self.state_dim], -1)
        if self.norm_eps is not None:
            low, B, C = (F.rms_norm(tensor, tensor.shape[-1:], None, self.norm_eps) for tensor in (low, B, C))
        delta = dt_proj(low)
        if timespans is not None:
            delta = F.softplus(delta) * widen(timespans)[..., None]
        A = -widen(A_log).exp()
        if self.watcher is not None and timespans is None:
            parts = u[..., None], _spread(delta, affine(dt_proj, low), self.state_dim), widen(B)[:, :, None]
            h, (ssm,) = self.advance(parts, [A], [ssm], cu_seqlens)
            y = torch.addcmul((h * C[:, :, None]).sum(-1), u, widen(D)).to(u.dtype)
            return gated(z, y, "silu"), MambaState(conv, ssm)
        y, ssm = selective_scan(
            u, delta, A, B, C, widen(D), z, None, ssm, delta_softplus=timespans is None, cu_seqlens=cu_seqlens
        )
        return y, MambaState(conv, ssm)

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        (u, delta, B), (A,) = p, v
        delta = F.softplus(delta)
        h, last = linear_scan(delta * u * B, (delta * A).exp(), states[0], cu_seqlens=cu_seqlens)
        return h, [last]


def _spread(delta: Tensor, weights: Callable[[], tuple[Tensor, Tensor | None]], state_dim: int) -> Drive:
    """Return Δ before the softplus as the drive of a channel's numbers. Of its map, the bias alone is the channel's."""

    def bias() -> Tensor | None:
        offset = weights()[1]
        return None if offset is None else widen(offset)[:, None].expand(-1, state_dim)

    return Drive(delta[..., None].expand(*delta.shape, state_dim), delta, bias=bias)
