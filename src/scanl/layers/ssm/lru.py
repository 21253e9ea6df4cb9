"""Linear recurrent unit."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive
from scanl.layers.initial_state import StateAxes
from scanl.ops import discretize, linear_scan
from scanl.options import at_least, between


@registry.register("lru")
class LRU(ChannelwiseLayer):
    """LRU: a complex diagonal recurrence, stable by construction, with a linear readout.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. A step of duration n
    equals n steps with the same input: Λ^n and γ (Λ^n - 1)/(Λ - 1). n need not be a whole number.

    Parameters as in the reference program: nu_log, theta_log, gamma_log (E); B_re, B_im (E, D);
    C_re, C_im (D, E); D (D).
    Initialisation: with u1, u2 uniform in (0, 1), nu_log = ln(-ln(u1 (r_max² - r_min²) + r_min²) / 2),
    theta_log = ln(max_phase u2), gamma_log = ln sqrt(1 - |Λ|²); B N(0, 1/(2D)) in each part, C N(0, 1/E),
    D N(0, 1).
    """

    id = "S-lru"
    aliases = ("linear_recurrent_unit",)
    equation = (
        "h_t = Lambda * h_{t-1} + gamma * (B x_t),  y_t = Re(C h_t) + D * x_t,  Lambda = exp(-exp(nu) + i exp(theta))"
    )
    source = (
        'Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences", arXiv:2303.06349, eq. (3), (7)'
    )
    op = "linear_scan"
    state: ClassVar = StateAxes("state_dim", dtype=torch.complex64)
    sample: ClassVar = {"state_dim": 6}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "E, complex numbers in the state; by default D"] = None,
        r_min: Annotated[
            float, at_least(0), "initial Λ are uniform over the ring r_min <= |Λ| <= r_max, by area"
        ] = 0.0,
        r_max: Annotated[float, between(0, 1), "outer radius of this ring, above r_min"] = 1.0,
        max_phase: Annotated[float, at_least(0), "initial phases are uniform in [0, max_phase] radians"] = 2 * math.pi,
    ) -> None:
        super().__init__()
        if not r_min < r_max:
            self._refuse("r_max", r_max, f"more than r_min={r_min}")
        self.dim = dim
        self.state_dim = size = state_dim or dim
        # 1 - U is never 0, so the logarithms are finite.
        u1, u2 = 1 - torch.rand(size), 1 - torch.rand(size)
        square = u1 * (r_max**2 - r_min**2) + r_min**2
        square = square.clamp(max=1 - torch.finfo(square.dtype).eps)  # |Λ| = 1 would make gamma 0
        self.nu_log = nn.Parameter(torch.log(-0.5 * torch.log(square)))
        self.theta_log = nn.Parameter(torch.log(max_phase * u2))
        self.gamma_log = nn.Parameter(0.5 * torch.log(1 - square))
        self.B_re = nn.Parameter(torch.randn(size, dim) / math.sqrt(2 * dim))
        self.B_im = nn.Parameter(torch.randn(size, dim) / math.sqrt(2 * dim))
        self.C_re = nn.Parameter(torch.randn(dim, size) / math.sqrt(size))
        self.C_im = nn.Parameter(torch.randn(dim, size) / math.sqrt(size))
        self.D = nn.Parameter(torch.randn(dim))

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rate, phase = widen(self.nu_log).exp(), widen(self.theta_log).exp()
        eigenvalues = torch.polar((-rate).exp(), phase)
        # Real and imaginary parts are adjacent, so one real matrix product makes complex numbers and one reads them.
        into = torch.stack([self.B_re, self.B_im], 1) * self.gamma_log.exp()[:, None, None]
        out_of = torch.stack([self.C_re, -self.C_im], 2).flatten(1)
        u = torch.view_as_complex(widen(x @ into.flatten(0, 1).t()).unflatten(-1, (-1, 2)))
        if timespans is not None:
            log, one = torch.complex(-rate, phase), torch.ones_like(eigenvalues)
            unit = discretize(log, one, torch.ones_like(rate[:1]))[1][0]
            held = discretize(log, one, timespans.to(rate.dtype).flatten())
            eigenvalues, gain = (tensor.unflatten(0, x.shape[:2]) for tensor in held)
            h, last = linear_scan(u * (gain / unit), eigenvalues, state, cu_seqlens=cu_seqlens)
        else:
            drive = Drive(u, x, lambda: torch.complex(into[:, 0], into[:, 1]).t())
            h, (last,) = self.advance([drive], [eigenvalues], [state], cu_seqlens)
        y = torch.view_as_real(h).flatten(-2).to(x.dtype) @ out_of.t()
        return torch.addcmul(y, x, self.D), last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        h, last = linear_scan(p[0], v[0], states[0], cu_seqlens=cu_seqlens)
        return h, [last]
