"""Non-normal network: its recurrent matrix is given by a Schur form, of rotations and a strictly triangular part."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.rnn.ornn import Threshold, ornn_cell, skew, skew_blocks
from scanl.options import multiple_of


@registry.register("nnrnn")
class NonNormalRNN(CellLayer):
    """nnRNN: eigenvalues near the unit circle, as in an orthogonal matrix, and transients, which such a matrix cannot
    have.

    Parameters as in the authors' program: U (D, D), without bias; log_P (D, D), of which only what is above the
    diagonal counts, as skew-symmetric A; UppT (D, D), T above its diagonal; nonlinearity.b (D). Their scalars theta_j
    and alpha_j are vectors here, theta and alpha (D/2): the angles and factors of the rotations in Θ. W multiplies a
    row h from the right, as in that code, where P takes Riemannian steps. Here log_P is trained as any parameter.
    Initialisation: U Xavier normal; UppT 0; alpha 1; theta U(0, 2π); b U(±0.01).
    """

    id = "S-nnrnn"
    aliases = ("non_normal",)
    equation = "h_t = modReLU(W h_{t-1} + U x_t),  W = P (Theta + T) P^T,  P = exp(A),  A = -A^T"
    source = (
        'Kerg et al., "Non-normal Recurrent Neural Network (nnRNN): learning long time dependencies while improving '
        'expressivity with transient dynamics", arXiv:1905.12080'
    )
    cell = ornn_cell

    def __init__(
        self,
        dim: Annotated[options.Dim, multiple_of(2), "D, model width, even"],
        init: Annotated[
            Literal["henaff", "cayley"],
            'initial A, of 2 × 2 blocks: "henaff", of angles U(-π, 0), or "cayley", -sqrt((1 - cos θ) / (1 + cos θ)) '
            "with θ ~ U(0, π/2)",
        ] = "henaff",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.U = nn.Linear(dim, dim, bias=False)
        nn.init.xavier_normal_(self.U.weight)
        self.log_P = nn.Parameter(skew_blocks(dim, init, -math.pi, 0.0))
        self.UppT = nn.Parameter(torch.zeros(dim, dim))
        self.theta = nn.Parameter(torch.empty(dim // 2).uniform_(0, 2 * math.pi))
        self.alpha = nn.Parameter(torch.ones(dim // 2))
        self.nonlinearity = Threshold(dim)

    def penalty(self) -> Tensor:
        """Return the sum of (alpha_j - 1)². The authors add 1e-4 to 1 times it to the loss."""
        return (self.alpha - 1).square().sum()

    def recurrent_matrix(self) -> Tensor:
        """Return W (D, D), which multiplies a row h from the right, in float32 or wider."""
        theta, alpha = widen(self.theta), widen(self.alpha)
        cos, sin = alpha * theta.cos(), alpha * theta.sin()
        blocks = torch.diag_embed(torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]))  # (2, 2, D/2, D/2)
        rotations = blocks.permute(2, 0, 3, 1).reshape(self.dim, self.dim)
        with as_widened(theta):
            p = torch.matrix_exp(skew(self.log_P))
            return p @ (widen(self.UppT).triu(1) + rotations) @ p.T

    def operands(self, x: Tensor) -> list[Tensor]:
        return [self.U(x), self.recurrent_matrix().T, self.nonlinearity.b]
