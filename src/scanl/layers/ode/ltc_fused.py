"""Liquid time-constant network with one nonlinearity, solved by the fused semi-implicit step."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import above


@cell(
    "x: B T D, dt: B T 1, u: D D, rate: D, a: D, state: B D -> B T D",
    equation="h <- (h + dt f A) / (1 + dt (1 / tau + f)),  f = sigmoid(x_t + U h), several times a step",
    source='Hasani et al., "Liquid Time-constant Networks", arXiv:2006.04439, eq. (1) and (3)',
)
def ltc_fused_cell(
    x: Tensor, dt: Tensor, u: Tensor, rate: Tensor, a: Tensor, state: Tensor, *, substeps: int = 6
) -> tuple[Tensor, Tensor]:
    """Take `substeps` fused steps of length dt with the input held. x: W x + b.   rate: 1/τ.   a: A."""
    for _ in range(substeps):
        f = torch.sigmoid(x + state @ u.T)
        state = (state + dt * f * a) / (1 + dt * (rate + f))
    return state, state


cases(
    ltc_fused_cell,
    "D=3",
    "rate has shape (2,), expected (D,) with D=3",
    "a has shape (1,), expected (D,) with D=3",
    options=[{"substeps": 2}],
    dt=Tensor.abs,
    rate=Tensor.abs,
)


@registry.register("ltc_fused")
class LTCFused(TimedCell):
    """Liquid time-constant network whose f is one layer: h stays between 0 and A, its time constant is τ / (1 + τ f).

    Parameters: input_map (W and b), recurrent_map (U), (D, D) each; A (D), log_tau (D), the natural logarithm of τ.
    Initialisation: there is no program of the authors with this f. W, U and b as in `nn.Linear`, A ±1 evenly.
    """

    id = "S-ltc"
    equation = "dh/dt = -(1 / tau + f) h + f A,  f = sigmoid(W x_t + U h + b)"
    cell = ltc_fused_cell
    reads: ClassVar = {"recurrent_map": nn.Linear}
    sample: ClassVar = {"substeps": 2}

    def __init__(
        self,
        dim: options.Dim,
        substeps: Annotated[options.Substeps, "fused steps for each input"] = 6,
        tau: Annotated[float, above(0), "initial time constant τ of every channel"] = 1.0,
    ) -> None:
        super().__init__()
        self.dim, self.substeps = dim, substeps
        self.input_map, self.recurrent_map = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.A = nn.Parameter(torch.where(torch.rand(dim) < 0.5, 1.0, -1.0))
        self.log_tau = nn.Parameter(torch.full((dim,), math.log(tau)))

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        return [self.input_map(x), spans / self.substeps, self.recurrent_map.weight, torch.exp(-self.log_tau), self.A]
