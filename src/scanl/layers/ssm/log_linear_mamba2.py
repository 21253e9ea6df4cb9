r"""Log-linear Mamba-2: a memory for each of O(log T) blocks of the past, each read with a weight of its own.

.. math:: o_t = \sum_l \lambda_t^{(l)} S_t^{(l)\top} C_t, \quad
          \lambda_t^{(l)} = \mathrm{softplus}(L_l (W_\lambda x_t)_l)
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, register, widen
from scanl.layers.parts.levels import count_levels, divided, divisible, levels
from scanl.layers.parts.positions import check_length, positions
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.ssm.mamba2 import Mamba2
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention
from scanl.ops.offsets import sequences


class LogLinearMamba2State(NamedTuple):
    """State of `LogLinearMamba2`.

    ssm: S of levels 1 to L - 1, (B, H, L - 1, N, P).   conv: the last inputs of the convolution.
    position: (B, 1), the steps read.
    """

    ssm: Tensor
    conv: Tensor
    position: Tensor


@register("log_linear_mamba2")
class LogLinearMamba2(Mamba2):
    """Log-linear attention over Mamba-2: the past of a step is cut into blocks that double in length backwards.

    The blocks are the nodes of a Fenwick tree. The L - 1 levels are heads of one `linear_attention`. One bit of the
    position says at which steps a level writes and at which it reads, and a level forgets at the start of its block.
    Time is O(T log T). A sequence longer than `max_length` raises an error. In a compiled graph with a state the length
    is not known; there the highest level forgets older steps.

    Args:
        dim: D, model width.
        d_state, d_conv, expand, headdim, ngroups: N, W, d_inner = expand * D, P and G as of `mamba2`.
        max_length: length of the longest sequence; it takes L = ⌈log2 max_length⌉ + 1 levels.
        norm_eps: epsilon of the norm.

    Parameters as in flash-linear-attention: those of `mamba2`, where in_proj has H L further rows; L (H, L), without
    weight decay.
    Initialisation: as of `mamba2`, with A_log = ln 1, ln 2, ..., ln H; L 1.
    State: S of each level (B, H, L - 1, N, P), zeros, the last inputs of the convolution, and the position (B, 1).
    """

    id = "S-loglinear"
    equation = (
        "o_t = sum_l lambda_t^l (S_t^l)^T C_t,  S_t^l = sum_{s in block l of t} decay B_s (dt_s x_s)^T,  "
        "lambda_t^l = softplus(L_l (W_l x_t));  out = W_out RMSNorm((o + D x) * SiLU(z))"
    )
    source = 'Guo et al., "Log-Linear Attention", arXiv:2506.04761'
    sample: ClassVar = {"d_state": 3, "headdim": 4, "ngroups": 2, "expand": 2, "max_length": 80}
    hints: ClassVar = {"L": UNDECAYED}

    def __init__(
        self,
        dim: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        max_length: int = 16384,
        norm_eps: float = 1e-5,
    ) -> None:
        if max_length < 1:
            raise ConfigError(f"{self._who()}: max_length is {max_length}, expected at least 1")
        super().__init__(dim, d_state, d_conv, expand, headdim, ngroups, norm_eps=norm_eps)
        self.max_length, self.levels = max_length, count_levels(max_length)
        self.in_proj = nn.Linear(dim, self.in_proj.out_features + self.heads * self.levels, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, self.heads + 1).log())
        self.L = nn.Parameter(torch.ones(self.heads, self.levels))

    def init_state(  # type: ignore[override]
        self, batch_size: int, *, device: Device = None, dtype: DType = None
    ) -> LogLinearMamba2State:
        ssm, conv = super().init_state(batch_size, device=device, dtype=dtype)
        several = ssm.new_zeros(batch_size, self.heads, self.levels - 1, self.d_state, self.headdim)
        return LogLinearMamba2State(several, conv, torch.zeros(batch_size, 1, dtype=torch.int64, device=ssm.device))

    def forward(  # type: ignore[override]
        self, x: Tensor, state: LogLinearMamba2State | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LogLinearMamba2State]:
        self._check(x, state, cu_seqlens)
        check_length(self._who(), x, None if state is None else state.position, cu_seqlens, self.max_length)
        begins = state is None and cu_seqlens is None
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        sizes = [self.widths[0], sum(self.widths), self.heads, self.heads * self.levels]
        z, u, dt, weights = self.in_proj(x).split(sizes, -1)
        u, conv = convolve(self.conv1d, u, state.conv, cu_seqlens=cu_seqlens, silu=True)
        u, B, C = (widen(part) for part in u.split(self.widths, -1))
        u = u.unflatten(-1, (self.heads, self.headdim))
        B, C = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (B, C))
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        weights = F.softplus(widen(self.L) * widen(weights).unflatten(-1, (self.heads, self.levels)))
        written = dt[..., None] * u
        decay = dt * -widen(self.A_log).exp()
        places, position = positions(state.position, x.shape[1], cu_seqlens)
        if begins and divisible(C, B, written, decay, weights):
            y, ssm = divided(C, B, written, decay, weights)
            y = y + widen(self.D)[:, None] * u
            y = self.out_proj(self.norm(y.flatten(-2), z).to(z.dtype))
            return y, LogLinearMamba2State(ssm, conv, position)
        at = levels(places, self.levels)
        g = decay[..., None].masked_fill(at.begins[:, :, None], -torch.inf)
        values = torch.where(at.writes[:, :, None, :, None], written[:, :, :, None], 0)
        o, ssm = linear_attention(
            C,
            B,
            values.flatten(2, 3),
            g.flatten(2, 3),
            state=state.ssm.flatten(1, 2),
            scale=1.0,
            cu_seqlens=cu_seqlens,
        )
        read = torch.where(at.reads[:, :, None], weights[..., 1:], 0)
        y = (read[..., None] * o.unflatten(2, (self.heads, -1))).sum(3)
        own = (C * B).sum(-1).repeat_interleave(self.heads // self.ngroups, 2)
        y = y + (weights[..., 0] * own)[..., None] * written + widen(self.D)[:, None] * u
        y = self.out_proj(self.norm(y.flatten(-2), z).to(z.dtype))
        return y, LogLinearMamba2State(ssm.unflatten(1, (self.heads, -1)), conv, position)
