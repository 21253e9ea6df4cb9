"""Continuous-time recurrent network."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops import linear_scan
from scanl.ops.cell import cell
from scanl.options import above


@cell(
    "x: B T D, dt: B T 1, rate: 1, u: D D, state: B D -> B T D",
    equation="h <- h + dt (tanh(x_t + U h) - h / tau), several times a step",
    source="Hasani et al., arXiv:2006.04439, eq. (2)",
)
def ctrnn_cell(
    x: Tensor, dt: Tensor, rate: Tensor, u: Tensor, state: Tensor, *, substeps: int = 6
) -> tuple[Tensor, Tensor]:
    """Take `substeps` Euler steps of length dt with the input held. x: W x + b.   rate: 1/τ."""
    for _ in range(substeps):
        state = state + dt * (torch.tanh(x + state @ u.T) - rate * state)
    return state, state


cases(
    ctrnn_cell,
    "D=3",
    "dt has shape (2, 5), expected (B, T, 1)",
    "u has shape (2, 3), expected (D, D) with D=3 from x",
    options=[{"substeps": 2}],
    dt=lambda dt: dt.abs() / 4,
    rate=Tensor.abs,
)


@registry.register("ctrnn")
class CTRNN(TimedCell):
    """Continuous-time recurrent network, by a few Euler steps for each input.

    Parameters: weight_ih, weight_hh (D, D), bias (D), raw_tau (1), whose softplus is τ.
    Initialisation as in the authors' program: one Glorot-uniform matrix (D, 2D) for W and U, biases 0.
    Differs: the authors' program has global_feedback=False by default, and never uses the τ that it trains.
    With substeps=1, dt=1 and tau=1 the layer is an Elman network.
    """

    id = "S-ctrnn"
    aliases = ("continuous_time", "continuous_time_rnn")
    equation = "h <- h + dt (tanh(W x_t + U h + b) - h / tau), several times a step"
    source = (
        'Funahashi and Nakamura, "Approximation of dynamical systems by continuous time recurrent neural networks", '
        "Neural Networks 6, 1993; Euler steps: program of Hasani et al., arXiv:2006.04439"
    )
    cell = ctrnn_cell
    sample: ClassVar = {"substeps": 2}

    def __init__(
        self,
        dim: options.Dim,
        substeps: Annotated[options.Substeps, "Euler steps for each input"] = 6,
        dt: Annotated[options.TimeStep, "length of an Euler step"] = 0.1,
        tau: Annotated[float, above(0), "time constant τ"] = 1.0,
        trained: Annotated[options.Trained, "τ is trained"] = False,
        global_feedback: Annotated[
            bool, "the state enters the tanh. If False, the equation is linear in h, and h averages tanh(W x + b)"
        ] = True,
    ) -> None:
        super().__init__()
        self.dim, self.substeps, self.dt = dim, substeps, dt
        limit = math.sqrt(6 / ((3 if global_feedback else 2) * dim))
        self.weight_ih = nn.Parameter(torch.empty(dim, dim).uniform_(-limit, limit))
        self.weight_hh = nn.Parameter(torch.empty(dim, dim).uniform_(-limit, limit)) if global_feedback else None
        self.bias = nn.Parameter(torch.zeros(dim))
        raw = torch.full((1,), math.log(math.expm1(tau)))
        if trained:
            self.raw_tau = nn.Parameter(raw)
        else:
            self.register_buffer("raw_tau", raw)

    def time_constant(self) -> Tensor:
        """Return τ (1), which softplus keeps above 0."""
        return F.softplus(self.raw_tau)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        return [F.linear(x, self.weight_ih, self.bias), self.dt * spans, 1 / self.time_constant(), self.weight_hh]

    def _scan(self, x: Tensor, spans: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.weight_hh is not None:
            return super()._scan(x, spans, state, cu_seqlens)
        drive = torch.tanh(widen(F.linear(x, self.weight_ih, self.bias)))
        tau = self.time_constant()
        decay = (1 - self.dt * spans / tau) ** self.substeps
        return linear_scan((1 - decay) * tau * drive, decay, state, cu_seqlens=cu_seqlens)
