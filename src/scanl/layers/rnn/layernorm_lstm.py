"""Long short-term memory with layer norms inside the cell."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.parts.chrono import ForgetBias, LongestMemory, init_memory
from scanl.ops import cell


@cell(
    "x: B T 4 D, u: 4 D D, norm_h: 2 4 D, norm_c: 2 D, state: B 2 D -> B T D",
    equation="i, f, g, o = LN_i(W x_t) + LN_h(U h_{t-1}),  c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g),  "
    "h_t = sigmoid(o) * tanh(LN_c(c_t))",
    source='Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. (20) to (22)',
)
def layernorm_lstm_cell(
    x: Tensor,
    u: Tensor,
    norm_h: Tensor,
    norm_c: Tensor,
    state: Tensor,
    *,
    carry_normed: bool = False,
    norm_eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Step an LSTM that normalises what the state gives to all gates together, and the memory before it is read.

    x: the normalised input of i, f, g and o, (B, T, 4, D).   u: recurrent weights.   norm_h, norm_c: gain and bias of
    the two norms.   carry_normed: the next step gets the normalised c.   norm_eps: ε of both norms.   state: h and c.
    """
    h, c = state.unbind(1)
    recurrent = F.layer_norm(torch.einsum("bd,ged->bge", h, u), x.shape[1:], norm_h[0], norm_h[1], norm_eps)
    i, f, g, o = (x + recurrent).unbind(1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    normed = F.layer_norm(c, c.shape[1:], norm_c[0], norm_c[1], norm_eps)
    h = o.sigmoid() * normed.tanh()
    return h, torch.stack([h, normed if carry_normed else c], 1)


cases(
    layernorm_lstm_cell,
    "D=5",
    "norm_h is missing, expected a tensor (2, 4, D)",
    "norm_c has shape (2, 4), expected (2, D) with D=5 from x",
    options=[{"carry_normed": True}],
)


@registry.register("layernorm_lstm")
class LayerNormLSTM(CellLayer):
    """LSTM with three layer norms: over the input's part of all gates, over the state's part, and over c.

    Parameters as in PyTorch's LayerNormLSTMCell (benchmarks/fastrnns), gates in the order i, f, g, o: weight_ih,
    weight_hh (4D, D); weight and bias of layernorm_i, layernorm_h (4D) and layernorm_c (D).
    Initialisation: norms 1 and 0; weights U(±1/sqrt(D)) as in `torch.nn.LSTM`. The norms remove their scale.
    """

    id = "S-layernorm"
    kind: ClassVar = {"gated": True}
    cell = layernorm_lstm_cell
    state: ClassVar = StateAxes("2, dim", "h and c")
    reads: ClassVar = {"layernorm_h": nn.LayerNorm, "layernorm_c": nn.LayerNorm}

    def __init__(
        self,
        dim: options.Dim,
        carry_normed: Annotated[
            bool,
            "the next step gets the normalized c, as in PyTorch's program; in the paper only the output uses it",
        ] = False,
        norm_eps: options.NormEps = 1e-5,
        forget_bias: ForgetBias | None = None,
        t_max: LongestMemory | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.carry_normed, self.norm_eps = dim, carry_normed, norm_eps
        limit = 1 / math.sqrt(dim)
        self.weight_ih = nn.Parameter(torch.empty(4 * dim, dim).uniform_(-limit, limit))
        self.weight_hh = nn.Parameter(torch.empty(4 * dim, dim).uniform_(-limit, limit))
        self.layernorm_i, self.layernorm_h = nn.LayerNorm(4 * dim, norm_eps), nn.LayerNorm(4 * dim, norm_eps)
        self.layernorm_c = nn.LayerNorm(dim, norm_eps)
        biases = self.layernorm_i.bias, self.layernorm_h.bias
        init_memory(biases, slice(dim, 2 * dim), slice(0, dim), forget_bias, t_max)

    def operands(self, x: Tensor) -> list[Tensor]:
        gates = self.layernorm_i(F.linear(x, self.weight_ih)).unflatten(-1, (4, -1))
        norm_h, norm_c = (torch.stack([norm.weight, norm.bias]) for norm in (self.layernorm_h, self.layernorm_c))
        return [gates, self.weight_hh.unflatten(0, (4, -1)), norm_h.unflatten(1, (4, -1)), norm_c]
