"""Coupled oscillatory recurrent network: damped, driven oscillators, coupled through a nonlinearity."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import at_least


@cell(
    "x: B T D, dt: B T 1, w: 2 D D, state: B 2 D -> B T D",
    equation="z_t = z_{t-1} + dt (tanh(x_t + W_y y_{t-1} + W_z z_{t-1}) - gamma y_{t-1} - epsilon z), "
    "y_t = y_{t-1} + dt z_t",
    source='Rusch and Mishra, "Coupled Oscillatory Recurrent Neural Network (coRNN)", arXiv:2010.00951',
)
def cornn_cell(x, dt, w, state, *, gamma: float = 2.7, epsilon: float = 4.7, implicit: bool = False):
    """Move coupled oscillators by one step of length dt, (B, T, 1).

    x: the projected input, bias included, (B, T, D).   w: weights of z, then of y, (2, D, D).
    state: y and z, (B, 2, D).   implicit: the damping reads the new z instead of the old one.
    """
    y, z = state.unbind(1)
    force = torch.tanh(x + z @ w[0].T + y @ w[1].T) - gamma * y
    z = (z + dt * force) / (1 + dt * epsilon) if implicit else z + dt * (force - epsilon * z)
    y = y + dt * z
    return y, torch.stack([y, z], 1)


cases(
    cornn_cell,
    "D=3",
    "w has shape (1, 3, 3), expected (2, D, D) with D=3 from x",
    "state has shape (2, 3), expected (B, 2, D)",
    options=[{"implicit": True}],
    dt=Tensor.abs,
)


@registry.register("cornn")
class CoRNN(TimedCell):
    """coRNN: a network of oscillators whose displacements y are the output.

    Parameters as in the authors' program: i2h (D, 3D) with bias, columns of x, z and y.
    Initialisation: as in PyTorch. The defaults of dt, gamma and damping are the authors' for sMNIST.
    """

    id = "S-cornn"
    aliases = ("coupled_oscillatory_rnn", "coupled_oscillatory")
    equation = (
        "z_t = z_{t-1} + dt (tanh(W y_{t-1} + W' z_{t-1} + V x_t + b) - gamma y_{t-1} - epsilon z_{t-1}),  "
        "y_t = y_{t-1} + dt z_t"
    )
    cell = cornn_cell
    state: ClassVar = StateAxes("2, dim", "y and z")
    reads: ClassVar = {"i2h": nn.Linear}

    def __init__(
        self,
        dim: options.Dim,
        dt: Annotated[options.TimeStep, "Δt, the length of a step"] = 0.042,
        gamma: Annotated[float, at_least(0), "γ, stiffness of an oscillator without coupling"] = 2.7,
        damping: Annotated[float, at_least(0), "ε, damping"] = 4.7,
        variant: Annotated[
            Literal["explicit", "implicit"],
            '"explicit" as in the authors\' program, or "implicit": the damping reads the new velocity',
        ] = "explicit",
    ) -> None:
        super().__init__()
        self.dim, self.dt, self.gamma, self.damping, self.variant = dim, dt, gamma, damping, variant
        self.i2h = nn.Linear(3 * dim, dim)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor]:
        into, *w = self.i2h.weight.split(self.dim, 1)
        return [nn.functional.linear(x, into, self.i2h.bias), self.dt * spans, torch.stack(w)]

    def options(self) -> dict[str, float | bool]:
        return {"gamma": self.gamma, "epsilon": self.damping, "implicit": self.variant == "implicit"}
