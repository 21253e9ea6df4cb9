"""Shallow piecewise-linear recurrent network: a hidden layer of ReLU in each step."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.rnn.plrnn import decaying_diagonal
from scanl.ops.cell import cell


@cell(
    "x: B T D, a: D, w_out: D H, w_in: H D, bias: H, state: B D -> B T D",
    equation="z_t = a * z_{t-1} + W_1 (ReLU(W_2 z_{t-1} + h_2) - ReLU(W_2 z_{t-1})) + x_t",
    source='Hess, Monfared, Brenner and Durstewitz, "Generalized Teacher Forcing for Learning Chaotic Dynamics", '
    "arXiv:2306.04406, eq. (2) and (3)",
)
def shallow_plrnn_cell(
    x: Tensor, a: Tensor, w_out: Tensor, w_in: Tensor, bias: Tensor, state: Tensor, *, clipped: bool = True
) -> tuple[Tensor, Tensor]:
    """Step a network with H hidden units that is linear where the same of them are active.

    x: the projected input, h_1 included, (B, T, D).   a: (D,), A's diagonal.   w_out, w_in, bias: W_1 (D, H), W_2 (H,
    D), h_2 (H,).   clipped: whether ReLU(W_2 z) is subtracted, so that each hidden unit is bounded.   state: z, (B, D).
    """
    pull = state @ w_in.T
    active = torch.relu(pull + bias)
    if clipped:
        active = active - torch.relu(pull)
    z = x + a * state + active @ w_out.T
    return z, z


cases(
    shallow_plrnn_cell,
    "D=3 H=5",
    "bias has shape (4,), expected (H,) with H=5 from w_out",
    "a has shape (4,), expected (D,) with D=3 from x",
    options=[{"clipped": False}],
)


@registry.register("shallow_plrnn")
class ShallowPLRNN(CellLayer):
    """Shallow PLRNN: z_t = A z_{t-1} + W_1 φ(z_{t-1}) + h_1 + C x_t, with A diagonal and H hidden units; y = z.

    If clipped, φ(z) = ReLU(W_2 z + h_2) - ReLU(W_2 z), and the state is bounded where |A| < 1. Else φ(z) = ReLU(W_2 z +
    h_2).

    Parameters as in the authors' program: A (D), without weight decay; W1 (D, H); W2 (H, D); h1 (D); h2 (H); and C (D,
    D) for the input.
    Initialisation as in that code: A the diagonal of (RᵀR/D + I)/λ_max, R N(0, 1); W1 U(±1/sqrt(H)); W2 and h2
    U(±1/sqrt(D)); h1 0. C as in PyTorch.
    """

    id = "S-plrnn"
    aliases = ("shPLRNN",)
    cell = shallow_plrnn_cell
    equation = "z_t = A z_{t-1} + W_1 (ReLU(W_2 z_{t-1} + h_2) - ReLU(W_2 z_{t-1})) + h_1 + C x_t"
    hints: ClassVar = {"A": UNDECAYED_HINT}
    sample: ClassVar = {"hidden_dim": 5}

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Annotated[options.HiddenDim | None, "H, hidden units; by default 2 D"] = None,
        clipped: Annotated[bool, "ReLU(W_2 z) is subtracted, so that the state is bounded"] = True,
    ) -> None:
        super().__init__()
        hidden_dim = 2 * dim if hidden_dim is None else hidden_dim
        self.dim, self.hidden_dim, self.clipped = dim, hidden_dim, clipped
        wide, narrow = 1 / math.sqrt(hidden_dim), 1 / math.sqrt(dim)
        self.A = nn.Parameter(decaying_diagonal(dim))
        self.W1 = nn.Parameter(torch.empty(dim, hidden_dim).uniform_(-wide, wide))
        self.W2 = nn.Parameter(torch.empty(hidden_dim, dim).uniform_(-narrow, narrow))
        self.h1 = nn.Parameter(torch.zeros(dim))
        self.h2 = nn.Parameter(torch.empty(hidden_dim).uniform_(-narrow, narrow))
        self.C = nn.Linear(dim, dim, bias=False)

    def operands(self, x: Tensor) -> list[Tensor | None]:
        return [self.C(x) + self.h1, self.A, self.W1, self.W2, self.h2]

    def options(self) -> dict[str, bool]:
        return {"clipped": self.clipped}
