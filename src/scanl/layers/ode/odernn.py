"""ODE-RNN: the state follows an ordinary differential equation between the inputs, which enter through a GRU."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.ode._field import METHODS, Field, FieldDepth, FieldWidth, derivative, evolve
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.ops.cell import cell
from scanl.options import one_of


@cell(
    "x: B T 3 D, dt: B T 1, u: 3 D D, u_bias: 3 D, first_bias: U, first: U D, deep?: L U U, deep_bias?: L U, "
    "last: D U, last_bias: D, state: B D -> B T D",
    equation="h' = h_{t-1} + integral of f(h) over the time since the last input,  h_t = GRU(x_t, h')",
    source='Rubanova, Chen and Duvenaud, "Latent ODEs for Irregularly-Sampled Time Series", arXiv:1907.03907, '
    "algorithm 1",
    static=("L",),
)
def odernn_cell(
    x: Tensor,
    dt: Tensor,
    u: Tensor,
    u_bias: Tensor,
    first_bias: Tensor,
    first: Tensor,
    deep: Tensor | None,
    deep_bias: Tensor | None,
    last: Tensor,
    last_bias: Tensor,
    state: Tensor,
    *,
    method: str = "euler",
    substeps: int = 4,
) -> tuple[Tensor, Tensor]:
    """Let the state evolve for dt, then step a GRU. x: what the input gives to its gates r, z and n.   u: recurrent.

    first, deep, last: the perceptron f.
    """
    h = evolve(
        lambda h: derivative(h, first_bias, first, deep, deep_bias, last, last_bias), state, dt, method, substeps
    )  # fmt: skip
    from_h = torch.einsum("bd,ged->bge", h, u) + u_bias
    r, z = torch.sigmoid(x[:, 0] + from_h[:, 0]), torch.sigmoid(x[:, 1] + from_h[:, 1])
    h = (1 - z) * torch.tanh(x[:, 2] + r * from_h[:, 2]) + z * h
    return h, h


cases(
    odernn_cell,
    "D=3 L=1 U=4",
    "u_bias has shape (3, 4), expected (3, D) with D=3 from x",
    "first has shape (3, 5), expected (U, D) with U=4 from first_bias",
    options=[{"substeps": 2}],
    dt=Tensor.abs,
)


@registry.register("odernn")
class ODERNN(TimedCell):
    """ODE-RNN: a GRU whose state changes between inputs by a differential equation, for irregularly sampled series.

    `forward` also takes `timespans` (B, T), the time since the input before, or since the start.

    Parameters: GRU_update as `torch.nn.GRUCell`: weight_ih, weight_hh (3D, D), bias_ih, bias_hh (3D), gates r, z, n;
    ode_func.first (U, D), ode_func.deep.0 (U, U) and further ones, ode_func.last (D, U).
    Initialisation: f as in the authors' program, N(0, 0.01), biases 0; the GRU as in PyTorch.
    Differs: the authors' GRU carries a standard deviation beside the mean, has a hidden layer in each gate and no tanh
    in the candidate, and takes a mask of observed features; their number of Euler steps grows with the time.
    """

    added: ClassVar = {}  # its cell has solvers of its own, so the steps run one after another
    id = "S-odernn"
    aliases = ("latent_ode",)
    cell = odernn_cell
    reads: ClassVar = {"GRU_update": nn.GRUCell, "ode_func": nn.Linear}
    sample: ClassVar = {"hidden_dim": 6, "substeps": 2}

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: FieldWidth = 100,
        depth: FieldDepth = 1,
        method: Annotated[options.Method, one_of(METHODS), 'steps of f, "euler", "midpoint" or "rk4"'] = "euler",
        substeps: Annotated[options.Substeps, "steps of f between two inputs"] = 4,
    ) -> None:
        super().__init__()
        self.dim, self.method, self.substeps = dim, method, substeps
        self.GRU_update = nn.GRUCell(dim, dim)
        self.ode_func = Field(dim, 0, hidden_dim, depth)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor | None]:
        gru = self.GRU_update
        gates = F.linear(x, gru.weight_ih, gru.bias_ih).unflatten(-1, (3, -1))
        recurrent = [gru.weight_hh.unflatten(0, (3, -1)), gru.bias_hh.unflatten(0, (3, -1))]
        return [gates, spans, *recurrent, self.ode_func.first.bias, *self.ode_func.operands()]
