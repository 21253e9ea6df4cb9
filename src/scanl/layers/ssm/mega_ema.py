"""Multi-dimensional damped exponential moving average."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.ssm._base import BY_CONVOLUTION


@registry.register("mega_ema")
class MegaEMA(Layer):
    """Moving average of MEGA: N leaky sums per channel, added with learned weights.

    This is the moving average alone, without MEGA's gated attention. As in the released code, the paper's sum is
    divided by sqrt(N), ω x is added, and a SiLU follows. A long sequence is computed as a convolution, a few steps as
    the recurrence. Both give the same function. Differs: the released code can truncate its kernels after `truncation`
    steps.

    Parameters as in the released code: alpha, delta, beta (D, N, 1); gamma (D, N); omega (D). There `delta` is the
    logit of the step p and `alpha` that of the damping; the paper uses the letters the other way round.
    Initialisation: alpha, delta N(0, 0.2²); beta 1, -1, 1, ... plus N(0, 0.02²); gamma, omega N(0, 1).
    """

    id = "S-mega"
    aliases = ("EMA", "exponential_moving_average")
    equation = (
        "h_t = q * h_{t-1} + p beta x_t,  p = sigmoid(delta),  q = 1 - p sigmoid(alpha),  "
        "y_t = SiLU(sum_n gamma_n h_{t,n} / sqrt(N) + omega x_t)"
    )
    source = 'Ma et al., "Mega: Moving Average Equipped Gated Attention", arXiv:2209.10655, sec. 3.1, and its code'
    op = "linear_scan"
    excused: ClassVar = BY_CONVOLUTION
    state: ClassVar = StateAxes("dim, state_dim")
    sample: ClassVar = {"state_dim": 3}

    def __init__(
        self, dim: options.Dim, state_dim: Annotated[options.StateDim, "N, leaky sums of each channel"] = 16
    ) -> None:
        super().__init__()
        self.dim, self.state_dim = dim, state_dim
        self.alpha = nn.Parameter(0.2 * torch.randn(dim, state_dim, 1))
        self.delta = nn.Parameter(0.2 * torch.randn(dim, state_dim, 1))
        sign = 1.0 - 2.0 * (torch.arange(state_dim) % 2)
        self.beta = nn.Parameter(sign[:, None] + 0.02 * torch.randn(dim, state_dim, 1))
        self.gamma = nn.Parameter(torch.randn(dim, state_dim))
        self.omega = nn.Parameter(torch.randn(dim))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        p = widen(self.delta)[..., 0].sigmoid()
        A = torch.log1p(-p * widen(self.alpha)[..., 0].sigmoid())  # ln q: the system of steps of length 1
        C, u = widen(self.gamma) / math.sqrt(self.state_dim), widen(x)
        average, last = diagonal_ssm(
            u, A, p * self.beta[..., 0], C, torch.ones_like(p[:, 0]), state,
            discretization="dirac", cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return F.silu(torch.addcmul(average, u, widen(self.omega))).to(x.dtype), last
