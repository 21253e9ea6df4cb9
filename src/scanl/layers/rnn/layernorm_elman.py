"""Elman network with a layer norm inside the cell."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops import cell


@cell(
    "x: B T D, u: D D, norm: 2 D, state: B D -> B T D",
    equation="h_t = phi(LN(x_t + U h_{t-1}))",
    source='Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. (4)',
)
def layernorm_elman_cell(
    x: Tensor, u: Tensor, norm: Tensor, state: Tensor, *, activation: str = "tanh", norm_eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Step h = φ(LN(x + U h)).

    x: the projected input, (B, T, D).   u: recurrent weights.   norm: gain and bias of the norm.
    activation: φ, "tanh" or "relu".   norm_eps: ε of the norm.   state: h.
    """
    normed = F.layer_norm(x + state @ u.T, x.shape[1:], norm[0], norm[1], norm_eps)
    h = normed.tanh() if activation == "tanh" else normed.relu()
    return h, h


cases(
    layernorm_elman_cell,
    "D=5",
    "u has shape (3, 4), expected (D, D) with D=5 from x",
    "norm is missing, expected a tensor (2, D)",
    options=[{"activation": "relu"}],
)


@registry.register("layernorm_elman")
class LayerNormElman(CellLayer):
    """Elman network that normalises the sum of input and recurrent part, so the scale of W and U has no effect.

    Parameters: weight_ih, weight_hh (D, D); layernorm.weight and layernorm.bias (D).
    Initialisation: the norm 1 and 0; weights U(±1/sqrt(D)) as in `torch.nn.RNN`.
    """

    id = "S-layernorm"
    equation = "h_t = phi(LN(W x_t + U h_{t-1}))"
    cell = layernorm_elman_cell
    state: ClassVar = StateAxes("dim")
    reads: ClassVar = {"layernorm": nn.LayerNorm}

    def __init__(
        self,
        dim: options.Dim,
        activation: Annotated[Literal["tanh", "relu"], "φ"] = "tanh",
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        self.dim, self.activation, self.norm_eps = dim, activation, norm_eps
        limit = 1 / math.sqrt(dim)
        self.weight_ih = nn.Parameter(torch.empty(dim, dim).uniform_(-limit, limit))
        self.weight_hh = nn.Parameter(torch.empty(dim, dim).uniform_(-limit, limit))
        self.layernorm = nn.LayerNorm(dim, norm_eps)

    def operands(self, x: Tensor) -> list[Tensor]:
        norm = torch.stack([self.layernorm.weight, self.layernorm.bias])
        return [F.linear(x, self.weight_ih), self.weight_hh, norm]
