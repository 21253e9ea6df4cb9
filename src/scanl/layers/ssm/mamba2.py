"""Mamba-2: a state space model with one decay per head, computed as linear attention."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.parts.time_step import time_step_bias
from scanl.ops import linear_attention
from scanl.options import at_least


class Mamba2State(NamedTuple):
    ssm: Annotated[Tensor, StateAxes("num_heads, state_dim, head_dim", "S")]
    conv: Annotated[Tensor, StateAxes("conv_size - 1, width + 2 * num_groups * state_dim", "the last inputs")]


@registry.register("mamba2")
class Mamba2(Layer):
    """Mamba-2, the SSD layer: convolved x, B and C, one scalar decay per head, and a norm after the gate.

    Parameters as in mamba_ssm: in_proj (2 E + 2 G N + H, D) for z, x, B, C and dt; conv1d.weight (E + 2 G N, 1, W) and
    its bias; dt_bias, A_log, D (H), without weight decay; norm.weight (E), for a norm over each group; out_proj (D, E).
    Initialisation: A_log = ln U(1, 16), dt_bias = softplus⁻¹(Δ), D 1, norm 1, the rest as in PyTorch.
    """

    id = "S-mamba2"
    aliases = ("SSD",)
    equation = (
        "S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T,  y_t = S_t^T C_t + D x_t,  dt_t = softplus(.);  "
        "out = W_out RMSNorm(y * SiLU(z))"
    )
    source = 'Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, eq. (16) and sec. 7.1'
    op = "linear_attention"
    reads: ClassVar = {"conv1d": nn.Conv1d}
    state: ClassVar = Mamba2State
    sample: ClassVar = {"state_dim": 3, "head_dim": 4, "num_groups": 2, "expand": 2}
    residual_out = "out_proj"
    hints: ClassVar = dict.fromkeys(("dt_bias", "A_log", "D"), UNDECAYED_HINT)

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "N, rows of the state"] = 128,
        conv_size: options.ConvSize = 4,
        expand: Annotated[int, at_least(1), "E = expand * dim channels, in H = E / P heads"] = 2,
        head_dim: options.ExpandedHeadDim = 64,
        num_groups: options.ExpandedGroups = 1,
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        dt_init_floor: options.StepFloor = 1e-4,
        bias: Annotated[options.Bias, "biases in in_proj and out_proj"] = False,
        conv_bias: options.ConvBias = True,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        width = expand * dim
        heads = width // head_dim
        self.dim, self.width, self.state_dim, self.conv_size = dim, width, state_dim, conv_size
        self.num_heads, self.head_dim, self.num_groups = heads, head_dim, num_groups
        self.widths = [width, num_groups * state_dim, num_groups * state_dim]
        convolved = sum(self.widths)
        self.in_proj = nn.Linear(dim, width + convolved + heads, bias=bias)
        self.conv1d = nn.Conv1d(convolved, convolved, conv_size, groups=convolved, bias=conv_bias)
        self.dt_bias = nn.Parameter(time_step_bias(heads, dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(width, norm_eps, gate_first=True, groups=num_groups)
        self.out_proj = nn.Linear(width, dim, bias=bias)

    def run(self, x: Tensor, state: Mamba2State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Mamba2State]:
        ssm, conv = state or (None, None)
        z, u, dt = self.in_proj(x).split([self.width, sum(self.widths), self.num_heads], -1)
        u, conv = convolve(self.conv1d, u, conv, cu_seqlens=cu_seqlens, silu=True)
        u, B, C = u.split(self.widths, -1)
        u = u.unflatten(-1, (self.num_heads, self.head_dim))
        B, C = (tensor.unflatten(-1, (self.num_groups, self.state_dim)) for tensor in (B, C))
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        g = dt * -widen(self.A_log).exp()
        y, ssm = linear_attention(C, B, dt[..., None] * u, g, state=ssm, scale=1.0, cu_seqlens=cu_seqlens)
        y = torch.addcmul(y, self.D[:, None], u).flatten(-2)
        return self.out_proj(self.norm(y, z).to(z.dtype)), Mamba2State(ssm, conv)
