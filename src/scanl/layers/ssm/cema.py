"""Complex moving average of Megalodon."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.ssm._base import BY_CONVOLUTION


@registry.register("cema")
class ComplexEMA(Layer):
    """Complex moving average of Megalodon: N leaky sums per channel, which rotate and are added with complex weights.

    The sums of a channel rotate by multiples of one angle. As in the released code, p is real. In the paper p x is
    rotated, too.

    Parameters as in the released code: alpha, delta (D, N, 1), the logits of the step p and of the damping; theta
    (D, 1, 1); gamma (D, N, 2), real and imaginary part; omega (D, 1).
    Initialisation as in that code: alpha, delta N(0, 0.2²); sigmoid(theta) = D^(-j/D), j = 1 to D in random order;
    gamma N(0, 1), its imaginary part 0; omega normal with deviation 0.25, cut off at 1.
    """

    id = "S-megalodon"
    equation = (
        "h_t = q * h_{t-1} + p x_t,  p = sigmoid(alpha),  q_n = (1 - p sigmoid(delta)) "
        "exp(2 pi i n sigmoid(theta) / N),  y_t = Re sum_n gamma_n h_{t,n} / sqrt(N) + omega x_t"
    )
    source = (
        'Ma et al., "Megalodon: Efficient LLM Pretraining and Inference with Unlimited Context Length", '
        "arXiv:2404.08801, sec. 3.1, and its code"
    )
    op = "linear_scan"
    excused: ClassVar = BY_CONVOLUTION
    state: ClassVar = StateAxes("dim, state_dim", dtype=torch.complex64)
    sample: ClassVar = {"state_dim": 3}

    def __init__(
        self, dim: options.Dim, state_dim: Annotated[options.StateDim, "N, leaky sums of each channel"] = 16
    ) -> None:
        super().__init__()
        self.dim, self.state_dim = dim, state_dim
        self.alpha, self.delta = (nn.Parameter(0.2 * torch.randn(dim, state_dim, 1)) for _ in range(2))
        turns = torch.exp(-(1 + torch.randperm(dim)) * math.log(dim) / dim)
        self.theta = nn.Parameter(torch.logit(turns, 1e-6).view(dim, 1, 1))  # of one channel the logit is not finite
        self.gamma = nn.Parameter(torch.stack([torch.randn(dim, state_dim), torch.zeros(dim, state_dim)], -1))
        self.omega = nn.Parameter(nn.init.trunc_normal_(torch.empty(dim, 1), std=0.25, a=-1.0, b=1.0))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        p = widen(self.alpha)[..., 0].sigmoid()
        turn = torch.arange(1, self.state_dim + 1, device=x.device) * widen(self.theta)[..., 0].sigmoid()
        A = torch.complex(torch.log1p(-p * widen(self.delta)[..., 0].sigmoid()), turn * (2 * math.pi / self.state_dim))
        C = torch.view_as_complex(widen(self.gamma)) / (2 * math.sqrt(self.state_dim))  # `diagonal_ssm` reads 2 Re C h
        u = widen(x)
        average, last = diagonal_ssm(
            u, A, p.to(A.dtype), C, torch.ones_like(p[:, 0]), state, discretization="dirac", cu_seqlens=cu_seqlens
        )
        return torch.addcmul(average, u, widen(self.omega)[:, 0]).to(x.dtype), last
