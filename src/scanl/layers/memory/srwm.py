"""Self-referential weight matrix: one matrix computes the output and its own changes."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops.cell import cell


@cell(
    "x: B T H K, w: H K J, state: B H K J -> B T H K",
    equation="(y_t, q_t, k_t, b_t) = W_{t-1}^T x_t,  f = softmax,  "
    "W_t = W_{t-1} + f(k_t) (sigmoid(b_t) * W_{t-1}^T (f(q_t) - f(k_t)))^T",
    source='Irie, Schlag, Csordas and Schmidhuber, "A Modern Self-Referential Weight Matrix That Learns to Modify '
    "Itself\", arXiv:2202.05780, eq. (5) to (8), as in the authors' program",
)
def srwm_cell(x: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Read y, then let the matrix change itself.

    w: trained weights, J = 3K + 4 columns.   state: what was added to them.
    """
    width = x.shape[-1]
    parts = (w + state).split([width, width, width, 4], -1)
    y, q, k, b = ((x[..., None] * columns).sum(2) for columns in parts)
    q, k = torch.softmax(q, -1), torch.softmax(k, -1)
    changes = (((q - k)[..., None] * columns).sum(2) for columns in parts)
    rates = torch.sigmoid(b).split(1, -1)  # of the columns that give y, q, k and b
    change = torch.cat([rate * delta for rate, delta in zip(rates, changes, strict=True)], -1)
    return y, state + k[..., None] * change[:, :, None]


cases(srwm_cell, "H=2 J=13 K=3", "w has shape (2, 4, 13), expected (H, K, J) with H=2 from x")


@registry.register("srwm")
class SRWM(CellLayer):
    """Self-referential weight matrix: its columns give the output, a query, a key and four learning rates.

    The learning rates are those of the columns of y, q, k and of the rates themselves. The output is read before the
    change. The feedback is not linear, so the steps cannot be computed in parallel.

    Parameters as in the authors' program: W_y, W_q, W_k (1, H, K, K), w_b (1, H, K, 4), each (inputs, outputs);
    out_linear (D, D).
    Initialisation: W_y, W_q, W_k and w_b N(0, 1/K), out_linear as in PyTorch.
    """

    id = "S-srwm"
    aliases = ("self_referential_weight_matrix",)
    cell = srwm_cell
    state: ClassVar = StateAxes("num_heads, head_dim, 3 * head_dim + 4", "what was added to the weights")
    residual_out = "out_linear"
    sample: ClassVar = {"num_heads": 3}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[
            options.Heads, "H heads, each of which reads K = D / H channels of x without a projection; a divisor of dim"
        ] = 8,
        softmax: Annotated[
            bool, "softmax of the input of each head, as in the authors' reinforcement learning"
        ] = False,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.softmax, width = softmax, dim // num_heads
        self.W_y, self.W_q, self.W_k = (nn.Parameter(torch.empty(1, num_heads, width, width)) for _ in range(3))
        self.w_b = nn.Parameter(torch.empty(1, num_heads, width, 4))
        self.out_linear = nn.Linear(dim, dim, bias=False)
        for weight in (self.W_y, self.W_q, self.W_k, self.w_b):
            nn.init.normal_(weight, std=width**-0.5)

    def operands(self, x: Tensor) -> list[Tensor]:
        weights = torch.cat([self.W_y, self.W_q, self.W_k, self.w_b], -1)[0]
        x = widen(x).unflatten(-1, (self.num_heads, -1))
        return [x.softmax(-1) if self.softmax else x, weights]

    def output(self, h: Tensor) -> Tensor:
        return self.out_linear(h.flatten(-2))
