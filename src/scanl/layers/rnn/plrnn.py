"""Piecewise-linear recurrent networks: plain and dendritic."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops.cell import cell
from scanl.options import at_least


@cell(
    "x: B T D, a: D, w: D D, slopes?: N, thresholds?: N D, state: B D -> B T D",
    equation="z_t = a * z_{t-1} + W ReLU(z_{t-1}) + x_t;  dendritic: W sum_n slope_n ReLU(z_{t-1} - threshold_n)",
    source='Durstewitz, "A state space approach for piecewise-linear recurrent neural networks", PLoS Computational '
    'Biology 13(6), 2017; dendritic: Brenner et al., "Tractable Dendritic RNNs for Reconstructing Nonlinear Dynamical '
    'Systems", arXiv:2207.02542, eq. (2) and (3)',
)
def plrnn_cell(
    x: Tensor, a: Tensor, w: Tensor, slopes: Tensor | None, thresholds: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Step a network that is linear in each region of its state where the same units are active.

    x: the projected input, h included, (B, T, D).   a: (D,), A's diagonal.   w: W, (D, D), (outputs, inputs).
    slopes, thresholds: of the N branches of a dendrite, (N,) and (N, D); None for one branch with 1 and 0.
    state: z, (B, D).
    """
    if thresholds is None:
        active = torch.relu(state)
    else:
        assert slopes is not None
        active = (slopes[:, None] * torch.relu(state[:, None] - thresholds)).sum(1)
    z = x + a * state + active @ w.T
    return z, z


cases(
    plrnn_cell,
    "D=3 N=2",
    "w has shape (2, 3), expected (D, D) with D=3 from x",
    "a has shape (4,), expected (D,) with D=3 from x",
)


def decaying_diagonal(dim: int) -> Tensor:
    """Return the diagonal of (RᵀR / D + I) / λ_max, with R of standard normal numbers: (D,), each in (0, 1]."""
    R = torch.randn(dim, dim)
    matrix = R.T @ R / dim + torch.eye(dim)
    return (matrix / torch.linalg.eigvalsh(matrix)[-1]).diagonal().clone()


@registry.register("plrnn")
class PLRNN(CellLayer):
    """Piecewise-linear RNN: z_t = A z_{t-1} + W φ(z_{t-1}) + h + C x_t, with A diagonal; y = z.

    φ is ReLU. With `branches` it is Σ_n α_n ReLU(z - h_n), which bends at N thresholds in each unit (dendritic). In
    each region of its state the network is a linear map, so fixed points and cycles are solutions of linear systems.

    Parameters: A (D), without weight decay; W (D, D), whose diagonal is not used, as A has that part; h (D); C (D, D);
    with branches alphas (N) and thresholds (N, D).
    Initialisation as in the authors' program: A the diagonal of (RᵀR/D + I)/λ_max, R N(0, 1); W U(±1/sqrt(D)); h 0;
    alphas U(±1/sqrt(N)); thresholds N(0, 1). C as in PyTorch.
    """

    id = "S-plrnn"
    aliases = ("piecewise_linear_rnn", "dendritic_plrnn")
    cell = plrnn_cell
    equation = "z_t = A z_{t-1} + W phi(z_{t-1}) + h + C x_t,  phi(z) = ReLU(z), or sum_n alpha_n ReLU(z - h_n)"
    hints: ClassVar = {"A": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        branches: Annotated[int, at_least(0), "N, thresholds in each unit of a dendritic network; 0 for φ = ReLU"] = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.A = nn.Parameter(decaying_diagonal(dim))
        self.W = nn.Parameter(torch.empty(dim, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim)))
        self.h = nn.Parameter(torch.zeros(dim))
        self.C = nn.Linear(dim, dim, bias=False)
        bound = 1 / math.sqrt(max(branches, 1))
        self.alphas = nn.Parameter(torch.empty(branches).uniform_(-bound, bound)) if branches else None
        self.thresholds = nn.Parameter(torch.randn(branches, dim)) if branches else None

    def operands(self, x: Tensor) -> list[Tensor | None]:
        off_diagonal = self.W - torch.diag(self.W.diagonal())
        return [self.C(x) + self.h, self.A, off_diagonal, self.alphas, self.thresholds]
