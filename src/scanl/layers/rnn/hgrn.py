"""Hierarchically gated recurrent unit."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import ChannelwiseLayer, driven
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.lower_bound import LowerBoundedLayer
from scanl.ops import linear_scan
from scanl.ops.fused.gated import gated


@registry.register("hgrn")
class HGRN(ChannelwiseLayer, LowerBoundedLayer):
    """HGRU, the token mixer of HGRN: a complex recurrence with a lower bound on its forget gate.

    The bound γ rises with depth, see `LowerBoundedLayer`. The SiLU gate multiplies after the norm, as in the released
    code; the paper norms the gated state.

    Parameters as in the released code: input_proj (2D, D) for c = SiLU(.), real and imaginary parts adjacent;
    lambda_proj (D, D); theta (1, 1, D); gate (2D, D); norm (2D); out_proj (D, 2D).
    Initialisation: theta_k = 10000^(-2k/D), Γ = 0, the projections as in PyTorch.
    """

    id = "S-hgru"
    aliases = ("=HGRU", "HRGN", "hierarchically_gated_rnn")
    equation = (
        "h_t = lambda_t e^{i theta} * h_{t-1} + (1 - lambda_t) * c_t,  lambda_t = gamma + (1 - gamma) sigmoid(W x_t),  "
        "y_t = W_o (LN([Re h_t; Im h_t]) * SiLU(W_g x_t))"
    )
    source = (
        'Qin, Yang and Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence Modeling", '
        "arXiv:2311.04823, sec. 3.2"
    )
    op = "linear_scan"
    state: ClassVar = StateAxes("dim", dtype=torch.complex64)
    residual_out = "out_proj"

    def __init__(self, dim: options.Dim, bias: options.Bias = True) -> None:
        super().__init__()
        self.dim = dim
        self.input_proj = nn.Linear(dim, 2 * dim, bias=bias)
        self.lambda_proj = nn.Linear(dim, dim, bias=bias)
        self.gate = nn.Linear(dim, 2 * dim, bias=bias)
        self.out_proj = nn.Linear(2 * dim, dim, bias=bias)
        self.norm = nn.LayerNorm(2 * dim)
        self.theta = nn.Parameter((10000 ** (-2 / dim * torch.arange(dim))).reshape(1, 1, -1))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        bound = self.lower_bound()
        _, keep = driven(self.lambda_proj, x, lambda rows: rows)
        _, c = driven(self.input_proj, x, lambda rows: rows.unflatten(-1, (-1, 2)).movedim(-1, -2))
        vectors = [self.theta.flatten(), *([bound] if isinstance(bound, Tensor) else [])]
        h, (last,) = self.advance([keep, c], vectors, [state], cu_seqlens)
        feature = self.norm(torch.cat([h.real, h.imag], -1).to(x.dtype))
        return self.out_proj(gated(self.gate(x), feature)), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        theta, bound = widen(v[0]), v[1] if len(v) > 1 else 0.0
        keep = bound + (1 - bound) * widen(p[0]).sigmoid()
        u = torch.complex(*((1 - keep)[..., None, :] * widen(F.silu(p[1]))).unbind(-2))
        h, last = linear_scan(u, torch.polar(keep, theta.expand_as(keep)), states[0], cu_seqlens=cu_seqlens)
        return h, [last]
