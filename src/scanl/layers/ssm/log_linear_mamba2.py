"""Log-linear Mamba-2: a memory for each of O(log T) blocks of the past, each read with a weight of its own."""

from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.levels import count_levels, divided, divisible, levels
from scanl.layers.parts.positions import check_length, positions
from scanl.layers.parts.short_convolution import convolve
from scanl.layers.ssm.mamba2 import Mamba2
from scanl.ops import linear_attention
from scanl.ops.offsets import row_ends


class LogLinearMamba2State(NamedTuple):
    ssm: Annotated[Tensor, StateAxes("num_heads, levels - 1, state_dim, head_dim", "S of levels 1 to L - 1")]
    conv: Annotated[Tensor, StateAxes("conv_size - 1, width + 2 * num_groups * state_dim", "the last inputs")]
    position: Annotated[Tensor, StateAxes("1", "the steps read", dtype=torch.int64, after=torch.add)]


@registry.register("log_linear_mamba2")
class LogLinearMamba2(Mamba2):
    """Log-linear attention over Mamba-2: the past of a step is cut into blocks that double in length backwards.

    The blocks are the nodes of a Fenwick tree. The L - 1 levels are heads of one `linear_attention`. One bit of the
    position says at which steps a level writes and at which it reads, and a level forgets at the start of its block.
    Time is O(T log T). A sequence longer than `max_length` raises an error. In a compiled graph with a state the length
    is not known; there the highest level forgets older steps.

    Parameters as in flash-linear-attention: `mamba2`'s, where in_proj has H L further rows; L (H, L), without
    weight decay.
    Initialisation: as in `mamba2`, with A_log = ln 1, ln 2, ..., ln H; L 1.
    """

    id = "S-loglinear"
    cost = ("T log T", "log T")
    equation = (
        "o_t = sum_l lambda_t^l (S_t^l)^T C_t,  S_t^l = sum_{s in block l of t} decay B_s (dt_s x_s)^T,  "
        "lambda_t^l = softplus(L_l (W_l x_t));  out = W_out RMSNorm((o + D x) * SiLU(z))"
    )
    source = 'Guo et al., "Log-Linear Attention", arXiv:2506.04761'
    state: ClassVar = LogLinearMamba2State
    sample: ClassVar = {"state_dim": 3, "head_dim": 4, "num_groups": 2, "expand": 2, "max_length": 80}
    hints: ClassVar = {"L": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        max_length: Annotated[
            options.MaxLength, "length of the longest sequence; it takes L = ⌈log2 max_length⌉ + 1 levels"
        ] = 16384,
        **mamba2: Any,
    ) -> None:
        super().__init__(dim, **mamba2)
        self.longest, self.levels = max_length, count_levels(max_length)
        rows = self.in_proj.out_features + self.num_heads * self.levels
        self.in_proj = nn.Linear(dim, rows, bias=self.in_proj.bias is not None)
        self.A_log = nn.Parameter(torch.arange(1.0, self.num_heads + 1).log())
        self.L = nn.Parameter(torch.ones(self.num_heads, self.levels))

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]: its state is another
        self, x: Tensor, state: LogLinearMamba2State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LogLinearMamba2State]:
        check_length(self._who(), x, None if state is None else state.position, cu_seqlens, self.longest)
        if state is None and row_ends(cu_seqlens) is not None:
            assert cu_seqlens is not None
            return each_alone(self.forward, x, None, cu_seqlens)  # pyright: ignore[reportReturnType]
        begins = state is None and cu_seqlens is None
        state = self._begin(x, state, cu_seqlens)
        sizes = [self.width, sum(self.widths), self.num_heads, self.num_heads * self.levels]
        z, u, dt, weights = self.in_proj(x).split(sizes, -1)
        u, conv = convolve(self.conv1d, u, state.conv, cu_seqlens=cu_seqlens, silu=True)
        u, B, C = (widen(tensor) for tensor in u.split(self.widths, -1))
        u = u.unflatten(-1, (self.num_heads, self.head_dim))
        B, C = (tensor.unflatten(-1, (self.num_groups, self.state_dim)) for tensor in (B, C))
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        weights = F.softplus(widen(self.L) * widen(weights).unflatten(-1, (self.num_heads, self.levels)))
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
        shares = torch.where(at.reads[:, :, None], weights[..., 1:], 0)
        y = (shares[..., None] * o.unflatten(2, (self.num_heads, -1))).sum(3)
        present = (C * B).sum(-1).repeat_interleave(self.num_heads // self.num_groups, 2)
        y = y + (weights[..., 0] * present)[..., None] * written + widen(self.D)[:, None] * u
        y = self.out_proj(self.norm(y.flatten(-2), z).to(z.dtype))
        return y, LogLinearMamba2State(ssm.unflatten(1, (self.num_heads, -1)), conv, position)
