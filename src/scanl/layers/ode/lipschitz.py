"""Lipschitz recurrent network: a linear and a nonlinear part, both nearly skew-symmetric."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.ode._timed import TimedCell, part_skew, square_normal
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least, between


@cell(
    "x: B T D, dt: B T 1, a: D D, w: D D, gate?: B T D, state: B D -> B T D",
    equation="h_t = h_{t-1} + dt (A h + tanh(W h + x_t)), with h = h_{t-1}, or the state half a step on",
    source='Erichson, Azencot, Queiruga, Hodgkinson and Mahoney, "Lipschitz Recurrent Neural Networks", '
    "arXiv:2006.12070",
)
def lipschitz_cell(x, dt, a, w, gate, state, *, midpoint: bool = False):
    """Move h by one step of length dt, (B, T, 1).

    x: the projected input, bias included, (B, T, D).   a, w: weights of the linear and of the nonlinear part, (D, D).
    gate: the projected input of the gate, (B, T, D); None for no gate.   state: h, (B, D).
    midpoint: a Runge-Kutta step of second order instead of an Euler step.
    """

    def slope(h):
        pull = h @ w.T
        change = h @ a.T + torch.tanh(pull + x)
        return change if gate is None else change * torch.sigmoid(pull + gate)

    h = state + dt * slope(state + dt / 2 * slope(state) if midpoint else state)
    return h, h


cases(
    lipschitz_cell,
    "D=3",
    "a has shape (2, 3), expected (D, D) with D=3 from x",
    "dt has shape (2, 4, 1), expected (B, T, 1)",
    options=[{"midpoint": True}],
    dt=lambda dt: dt.abs() / 2,
)


@registry.register("lipschitz")
class Lipschitz(TimedCell):
    """Lipschitz RNN: a system in continuous time, which is stable if its symmetric parts are small enough.

    Parameters as in the authors' program: B, C (D, D); E (D, D) with bias; E_gate likewise if gated. A and W multiply a
    row h from the right, as in that code. The authors' D is the readout of their task, which is no part of this layer.
    Initialisation: B and C N(0, (init_std / D)²), with 0.1 as in the authors' commands; E as in PyTorch.
    """

    id = "S-lipschitz"
    equation = (
        "h_t = h_{t-1} + dt (alpha A h_{t-1} + tanh(W h_{t-1} + E x_t + b)),  "
        "A = (1 - beta) (B + B^T) + beta (B - B^T) - gamma I,  W the same of C"
    )
    cell = lipschitz_cell

    def __init__(
        self,
        dim: options.Dim,
        dt: Annotated[options.TimeStep, "ε, the length of a step"] = 0.03,
        beta: Annotated[float, between(0, 1), "β, skew-symmetric share of A and W, from 0 (symmetric) to 1"] = 0.75,
        gamma: Annotated[float, at_least(0), "γ, damping, subtracted from the diagonals of A and W"] = 0.001,
        alpha: Annotated[float, "α, factor of A"] = 1.0,
        method: Annotated[
            Literal["euler", "midpoint"], '"euler", or "midpoint", a Runge-Kutta step of second order'
        ] = "euler",
        gated: Annotated[bool, "the slope is multiplied by σ(W h + E_gate x)"] = False,
        init_std: Annotated[options.InitStd, "scale of the initial B and C"] = 0.1,
    ) -> None:
        super().__init__()
        self.dim, self.dt, self.beta, self.gamma, self.alpha, self.method = dim, dt, beta, gamma, alpha, method
        self.E = nn.Linear(dim, dim)
        self.E_gate = nn.Linear(dim, dim) if gated else None
        self.B, self.C = square_normal(dim, init_std), square_normal(dim, init_std)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        a, w = (part_skew(m, self.beta, self.gamma).T for m in (self.B, self.C))
        return [self.E(x), self.dt * spans, self.alpha * a, w, None if self.E_gate is None else self.E_gate(x)]

    def options(self) -> dict[str, bool]:
        return {"midpoint": self.method == "midpoint"}
