"""UR-LSTM: a second gate refines the forget gate of an LSTM, and the initial forget gates cover memories of every
length.
"""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops.cell import cell
from scanl.options import at_least


@cell(
    "x: B T 4 D, w: 4 D D, state: B 2 D -> B T D",
    equation="c_t = g_t * c_{t-1} + (1 - g_t) * tanh(u_t), h_t = sigmoid(o_t) * tanh(c_t), "
    "g_t = 2 r_t f_t + (1 - 2 r_t) f_t^2",
    source='Gu, Gulcehre, Paine, Hoffman and Pascanu, "Improving the Gating Mechanism of Recurrent Neural Networks", '
    "arXiv:1910.09890",
)
def urlstm_cell(x: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of an LSTM with a refined forget gate.

    x: the projected input, biases included, of the gates f and r, the candidate u and the gate o, (B, T, 4, D).
    w: weights of h for each of them, (4, D, D).   state: h and c, (B, 2, D).
    """
    h, c = state.unbind(1)
    f, r, u, o = (x + torch.einsum("bi,koi->bko", h, w)).unbind(1)
    f, r = torch.sigmoid(f), torch.sigmoid(r)
    g = 2 * r * f + (1 - 2 * r) * f**2
    c = g * c + (1 - g) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.stack([h, c], 1)


cases(
    urlstm_cell,
    "D=3",
    "w has shape (3, 3, 3), expected (4, D, D) with D=3 from x",
    "state has shape (2, 3), expected (B, 2, D)",
)


@registry.register("urlstm")
class URLSTM(CellLayer):
    """UR-LSTM: r sets the forget gate g between f² and 1 - (1 - f)², and the new value enters with weight 1 - g.

    Parameters: weight_ih, weight_hh (4D, D) and bias (4D), rows of f, r, u and o; forget_bias (D), which is added to f
    and subtracted from r. There is no program of the authors.
    Initialisation: forget_bias = -ln(1/u - 1) with u ~ U(1/D, 1 - 1/D), so that the first values of f are uniform; the
    bias 0; the weights U(±1/sqrt(D)), as in PyTorch's LSTM.
    """

    id = "S-urlstm"
    aliases = ("refine_gate", "uniform_gate_initialization", "uniform_gate_initialisation")
    equation = (
        "c_t = g_t * c_{t-1} + (1 - g_t) * tanh(u_t),  h_t = sigmoid(o_t) * tanh(c_t),  "
        "g_t = 2 r_t f_t + (1 - 2 r_t) f_t^2,  f_t = sigmoid(f'_t + b_f),  r_t = sigmoid(r'_t - b_f)"
    )
    cell = urlstm_cell
    state: ClassVar = StateAxes("2, dim", "h, which is the output, and c")

    def __init__(self, dim: Annotated[options.Dim, at_least(2), "D, model width, at least 2"]) -> None:
        super().__init__()
        self.dim = dim
        limit = 1 / math.sqrt(dim)
        self.weight_ih = nn.Parameter(torch.empty(4 * dim, dim).uniform_(-limit, limit))
        self.weight_hh = nn.Parameter(torch.empty(4 * dim, dim).uniform_(-limit, limit))
        self.bias = nn.Parameter(torch.zeros(4 * dim))
        self.forget_bias = nn.Parameter(torch.empty(dim).uniform_(1 / dim, 1 - 1 / dim).logit())

    def operands(self, x: Tensor) -> list[Tensor]:
        f, r, others = self.bias.split([self.dim, self.dim, 2 * self.dim])
        inputs = F.linear(x, self.weight_ih, torch.cat([f + self.forget_bias, r - self.forget_bias, others]))
        return [inputs.unflatten(-1, (4, -1)), self.weight_hh.unflatten(0, (4, -1))]
