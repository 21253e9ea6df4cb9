"""Long expressive memory: two coupled states, each with a time scale for each channel and step."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell


@cell(
    "x: B T 4 D, dt: B T 1, u: 3 D D, w: D D, state: B 2 D -> B T D",
    equation="z_t = (1 - a) * z_{t-1} + a * tanh(x4_t + U_3 y_{t-1}), "
    "y_t = (1 - b) * y_{t-1} + b * tanh(x3_t + W z_t), "
    "b = dt sigmoid(x1_t + U_1 y_{t-1}), a = dt sigmoid(x2_t + U_2 y_{t-1})",
    source='Rusch, Mishra, Erichson and Mahoney, "Long Expressive Memory for Sequence Modeling", arXiv:2110.04744',
)
def lem_cell(x, dt, u, w, state):
    """Move y and z by one step of length dt, (B, T, 1).

    x: the projected input, biases included, of the gate of y, the gate of z, y and z, (B, T, 4, D).
    u: weights of y for the gate of y, the gate of z, and z, (3, D, D).   w: weights of z for y, (D, D).
    state: y and z, (B, 2, D).
    """
    y, z = state.unbind(1)
    fast = dt * torch.sigmoid(x[:, 0] + y @ u[0].T)
    slow = dt * torch.sigmoid(x[:, 1] + y @ u[1].T)
    z = (1 - slow) * z + slow * torch.tanh(x[:, 3] + y @ u[2].T)
    y = (1 - fast) * y + fast * torch.tanh(x[:, 2] + z @ w.T)
    return y, torch.stack([y, z], 1)


cases(
    lem_cell,
    "D=3",
    "u has shape (2, 3, 3), expected (3, D, D) with D=3 from x",
    "x has shape (2, 5, 3, 3), expected (B, T, 4, D)",
    dt=Tensor.abs,
)


@registry.register("lem")
class LEM(TimedCell):
    """LEM: a fast and a slow state, coupled, with learned time scales. y is the output.

    Parameters as in the authors' program: inp2hid (4D, D), rows for the gate of y, the gate of z, y, and z; hid2hid
    (3D, D), rows for the gate of y, the gate of z, and z; transform_z (D, D), from z to y. All have biases.
    Initialisation: all U(±1/sqrt(D)).
    """

    id = "S-lem"
    aliases = ("long_expressive_memory",)
    equation = (
        "z_t = (1 - dt_t) * z_{t-1} + dt_t * tanh(W_z y_{t-1} + V_z x_t + b_z),  "
        "y_t = (1 - dt'_t) * y_{t-1} + dt'_t * tanh(W_y z_t + V_y x_t + b_y),  "
        "dt_t = dt sigmoid(W_1 y_{t-1} + V_1 x_t + b_1),  dt'_t = dt sigmoid(W_2 y_{t-1} + V_2 x_t + b_2)"
    )
    cell = lem_cell
    state: ClassVar = StateAxes("2, dim", "y and z")
    reads: ClassVar = {"hid2hid": nn.Linear, "transform_z": nn.Linear}

    def __init__(self, dim: options.Dim, dt: Annotated[options.TimeStep, "Δt, the largest step"] = 1.0) -> None:
        super().__init__()
        self.dim, self.dt = dim, dt
        self.inp2hid = nn.Linear(dim, 4 * dim)
        self.hid2hid = nn.Linear(dim, 3 * dim)
        self.transform_z = nn.Linear(dim, dim)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(dim), 1 / math.sqrt(dim))

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor]:
        gates, z = self.hid2hid.bias.split([2 * self.dim, self.dim])
        inputs = self.inp2hid(x) + torch.cat([gates, self.transform_z.bias, z])
        u = self.hid2hid.weight.unflatten(0, (3, -1))
        return [inputs.unflatten(-1, (4, -1)), self.dt * spans, u, self.transform_z.weight]
