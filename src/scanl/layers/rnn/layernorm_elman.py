r"""Elman network with a layer norm inside the cell.

.. math:: h_t = \phi(\mathrm{LN}(W x_t + U h_{t-1}))
"""

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options
from scanl.layers.base import as_widened, register, widen
from scanl.layers.initial_state import Axes
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops import cell
from scanl.ops._frame.draws import Draws
from scanl.ops.registry import Sample

SOURCE = 'Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. (4)'


@cell(
    "x: B T D, u: D D, norm: 2 D, state: B D -> B T D",
    equation="h_t = phi(LN(x_t + U h_{t-1}))",
    source=SOURCE,
)
def layernorm_elman_cell(
    x: Tensor, u: Tensor, norm: Tensor, state: Tensor, *, activation: str = "tanh", eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Step h = φ(LN(x + U h)).

    x: the projected input, (B, T, D).   u: recurrent weights.   norm: gain and bias of the norm.
    activation: φ, "tanh" or "relu".   eps: ε of the norm.   state: h.
    """
    normed = F.layer_norm(x + state @ u.T, x.shape[1:], norm[0], norm[1], eps)
    h = normed.tanh() if activation == "tanh" else normed.relu()
    return h, h


@layernorm_elman_cell.samples
def _samples() -> Iterator[Sample]:
    draw = Draws()
    weights = {"u": draw(5, 5), "norm": draw(2, 5)}
    yield Sample({"x": draw(2, 6, 5), **weights, "state": draw(2, 5)}, {"activation": "relu"})
    yield Sample({"x": draw(1, 7, 5), **weights, "state": draw(3, 5)}, {"cu_seqlens": torch.tensor([0, 2, 2, 7])})


@layernorm_elman_cell.errors
def _errors() -> Iterator[tuple[Sample, str]]:
    x = torch.zeros(2, 4, 3)
    yield Sample({"x": x, "u": torch.zeros(3, 4)}), "u has shape (3, 4), expected (D, D) with D=3 from x"
    yield Sample({"x": x, "u": torch.zeros(3, 3)}), "norm is missing, expected a tensor (2, D)"


@register("layernorm_elman")
class LayerNormElman(SolvedLayer):
    """Elman network that normalises the sum of input and recurrent part, so the scale of W and U has no effect.

    Parameters: weight_ih, weight_hh (D, D); layernorm.weight and layernorm.bias (D).
    Initialisation: the norm 1 and 0; weights U(±1/sqrt(D)) as in `torch.nn.RNN`.
    """

    id = "S-layernorm"
    equation = "h_t = phi(LN(W x_t + U h_{t-1}))"
    source = SOURCE
    op = "layernorm_elman_cell"
    state: ClassVar = Axes("dim")
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

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        given = widen(F.linear(x, self.weight_ih))
        norm = torch.stack([self.layernorm.weight, self.layernorm.bias])
        with as_widened(x):
            y, last = self.run_cell(
                layernorm_elman_cell, given, self.weight_hh, norm, state,
                activation=self.activation, eps=self.norm_eps, cu_seqlens=cu_seqlens,
            )  # fmt: skip
        return y.to(x.dtype), last
