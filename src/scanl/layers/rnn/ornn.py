"""Orthogonal recurrent networks: the recurrent matrix is a function of a skew-symmetric one, so it keeps lengths."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.module import Module
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops.cell import cell
from scanl.options import between

EXPRNN = (
    'Lezcano-Casado and Martínez-Rubio, "Cheap Orthogonal Constraints in Neural Networks: A Simple Parametrization of '
    'the Orthogonal and Unitary Group", arXiv:1901.08428'
)
SCORNN = (
    'Helfrich, Willmott and Ye, "Orthogonal Recurrent Neural Networks with Scaled Cayley Transform", arXiv:1707.09520'
)


@cell(
    "x: B T D, w: D D, b: D, state: B D -> B T D",
    equation="h_t = modReLU(W h_{t-1} + x_t), modReLU(z) = sign(z) ReLU(|z| + b)",
    source=EXPRNN,
)
def ornn_cell(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of a network with modReLU. x: the projected input.   w: (D, D).   b: threshold, (D)."""
    z = x + state @ w.T
    h = torch.sign(z) * torch.relu(torch.abs(z) + b)
    return h, h


cases(
    ornn_cell,
    "D=3",
    "w has shape (2, 3), expected (D, D) with D=3 from x",
    "b is missing, expected a tensor (D,)",
    w=lambda w: w / 2,
    b=lambda b: b / 4,
)


def skew(m: Tensor) -> Tensor:
    """Return the skew-symmetric matrix of the upper triangle of m."""
    upper = widen(m).triu(1)
    return upper - upper.T


def skew_blocks(dim: int, init: str, low: float = -math.pi, high: float = math.pi) -> Tensor:
    """Return a skew-symmetric matrix of 2 × 2 blocks.

    init: "henaff" for blocks of U(low, high), or "cayley" for -sqrt((1 - cos θ) / (1 + cos θ)) with θ ~ U(0, π/2).
    """
    place = torch.rand(dim // 2)
    blocks = -torch.tan(place * math.pi / 4) if init == "cayley" else low + (high - low) * place
    upper = torch.diag_embed(torch.stack([blocks, torch.zeros_like(blocks)], 1).flatten()[: dim - 1], 1)
    return upper - upper.T


class Threshold(Module):
    """The threshold b of modReLU, initially U(±limit)."""

    def __init__(self, dim: int, limit: float = 0.01) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.empty(dim).uniform_(-limit, limit))


class OrthogonalMatrix(Module):
    """An orthogonal matrix: base, times a function of the skew-symmetric matrix of A, its last columns negated."""

    def __init__(self, dim: int, variant: str, init: str, negative: int) -> None:
        super().__init__()
        self.variant, self.negative = variant, negative
        self.A = nn.Parameter(skew_blocks(dim, init))
        self.register_buffer("base", torch.eye(dim))

    def unsigned(self) -> Tensor:
        """Return base times the function of A (D, D), in float32 or wider."""
        a, base = skew(self.A), widen(self.get_buffer("base"))
        eye = torch.eye(len(a), dtype=a.dtype, device=a.device)
        with as_widened(a):
            return base @ (torch.matrix_exp(a) if self.variant == "exp" else torch.linalg.solve(eye + a, eye - a))

    def forward(self) -> Tensor:
        matrix = self.unsigned()
        columns = torch.arange(len(matrix), device=matrix.device)
        return torch.where(columns < len(matrix) - self.negative, matrix, -matrix)


@registry.register("ornn")
class OrthogonalRNN(CellLayer):
    """A network with modReLU and an orthogonal recurrent matrix, which keeps the length of the state and of gradients.

    Parameters as in the authors' program: recurrent_kernel.A (D, D), of which only what is above the diagonal counts;
    input_kernel (D, D), without bias; nonlinearity.b (D). recurrent_kernel.base is a buffer. W multiplies a row h from
    the right, as there. The authors give A a tenth of the learning rate.
    """

    id = "S-ornn"
    aliases = ("orthogonal",)
    equation = "h_t = modReLU(W h_{t-1} + V x_t),  W = exp(A) or (I + A)^-1 (I - A) D,  A = -A^T"
    source = f"{EXPRNN}; {SCORNN}"
    cell = ornn_cell

    def __init__(
        self,
        dim: options.Dim,
        variant: Annotated[
            Literal["exp", "cayley"], 'the function of A: "exp", or "cayley" for (I + A)^-1 (I - A)'
        ] = "exp",
        init: Annotated[
            Literal["henaff", "cayley"],
            'initial values of expRNN or of scoRNN. "henaff": A of 2 × 2 blocks with angles U(±π), V Kaiming normal, '
            'b ~ U(±0.01). "cayley": the blocks are -sqrt((1 - cos θ) / (1 + cos θ)) with θ ~ U(0, π/2), '
            "V ~ U(±0.01), b = 0",
        ] = "henaff",
        negative: Annotated[float, between(0, 1), "share of the columns of W that are negated, the last ones"] = 0.0,
        dynamic: Annotated[
            bool,
            "W = base exp(A), where base takes up the initial W, and A starts at 0. Call `rebase` every hundred or so "
            "steps of the optimizer",
        ] = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.recurrent_kernel = OrthogonalMatrix(dim, variant, init, round(negative * dim))
        self.input_kernel = nn.Linear(dim, dim, bias=False)
        if init == "henaff":
            nn.init.kaiming_normal_(self.input_kernel.weight, nonlinearity="relu")
        else:
            nn.init.uniform_(self.input_kernel.weight, -0.01, 0.01)
        self.nonlinearity = Threshold(dim, 0.01 if init == "henaff" else 0.0)
        if dynamic:
            self.rebase()

    @torch.no_grad()
    def rebase(self) -> None:
        """Move W into base, as the nearest orthogonal matrix, and set A to 0. W stays the same."""
        kernel = self.recurrent_kernel
        u, _, v = torch.linalg.svd(kernel.unsigned())
        kernel.get_buffer("base").copy_(u @ v)
        kernel.A.zero_()

    def operands(self, x: Tensor) -> list[Tensor]:
        return [self.input_kernel(x), self.recurrent_kernel().T, self.nonlinearity.b]


@registry.preset("exprnn", variant="exp")
class ExpRNN(OrthogonalRNN):
    """expRNN: an orthogonal network whose matrix is the exponential of a skew-symmetric one."""

    id = "S-ornn"
    aliases = ("exponential_rnn",)
    equation = "h_t = modReLU(exp(A) h_{t-1} + V x_t),  A = -A^T"
    source = EXPRNN


@registry.preset("dtriv", dynamic=True)
class DTriv(OrthogonalRNN):
    """dtriv: expRNN around a base point that moves. Call `rebase` every hundred steps of the optimiser.

    The authors project the base onto the orthogonal matrices at every thirtieth call. `rebase` does so at every call.
    """

    id = "S-ornn"
    equation = "h_t = modReLU(base exp(A) h_{t-1} + V x_t),  A = -A^T"
    source = 'Lezcano-Casado, "Trivializations for Gradient-Based Optimization on Manifolds", arXiv:1909.09501'


@registry.preset("scornn", variant="cayley", init="cayley", negative=0.5)
class ScoRNN(OrthogonalRNN):
    """scoRNN: an orthogonal network by the Cayley transform, scaled by signs. The authors tune the share of -1."""

    id = "S-ornn"
    aliases = ("scaled_cayley_orthogonal_rnn",)
    equation = "h_t = modReLU(W h_{t-1} + V x_t),  W = (I + A)^-1 (I - A) D,  A = -A^T,  D = diag(1, ..., -1, ...)"
    source = SCORNN
