"""Linear-surrogate LSTM: the output of a GILR replaces the fed-back output of the LSTM, so every gate is known at
once.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.rnn.gilr import GILR
from scanl.ops import linear_scan


class GLRUState(NamedTuple):
    surrogate: Annotated[Tensor, StateAxes("dim", "l")]
    memory: Annotated[Tensor, StateAxes("dim", "c")]


@registry.register("glru_scan")
class GLRUScan(Layer):
    """GILR-LSTM: the gates read the output of a GILR in place of the LSTM's own, so two linear scans compute it.

    Parameters: gilr.linear (2D, D); linear (4D, 2D) with a bias, columns of l and then of x, rows of f, i, o and z,
    as in the authors' program.
    Initialisation as in that code: both weights U(±0.05), the bias of f 5, other biases 0.
    """

    id = "S-glru-scan"
    aliases = ("GILR_LSTM", "linear_surrogate", "linear_surrogate_rnn", "LS_LSTM", "linear_surrogate_lstm")
    equation = (
        "c_t = f_t * c_{t-1} + i_t * z_t,  h_t = o_t * c_t,  f, i, o = sigmoid(W x_t + U l_{t-1} + b),  "
        "z = tanh(same),  l = GILR(x)"
    )
    source = (
        'Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", '
        "arXiv:1709.04057, sec. 3.2"
    )
    op = "linear_scan"
    state: ClassVar = GLRUState
    excused: ClassVar = {"default_sizes_are_in_proportion": "the GILR below the gates adds two matrices to eight"}

    def __init__(
        self,
        dim: options.Dim,
        shifted: Annotated[
            bool, "the gates read l_{t-1}, as in the paper; if False l_t, as in the authors' program"
        ] = True,
        activation: Annotated[
            Literal["identity", "tanh"],
            '"identity", h = o * c, as in the paper and the program; or "tanh", h = o * tanh(c), as in an LSTM',
        ] = "identity",
    ) -> None:
        super().__init__()
        self.gilr = GILR(dim, "tanh")
        self.dim, self.shifted, self.activation = dim, shifted, activation
        self.linear = nn.Linear(2 * dim, 4 * dim)
        nn.init.uniform_(self.linear.weight, -0.05, 0.05)
        nn.init.zeros_(self.linear.bias)
        nn.init.constant_(self.linear.bias[:dim], 5.0)

    def run(self, x: Tensor, state: GLRUState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, GLRUState]:
        previous, memory = state or (None, None)
        surrogate, after = self.gilr(x, previous, cu_seqlens=cu_seqlens)
        if self.shifted:
            start = None if previous is None else previous[:, None]
            surrogate, _ = token_shift(surrogate, start, cu_seqlens=cu_seqlens)
        f, i, o, z = widen(self.linear(torch.cat([surrogate, x], -1))).chunk(4, -1)
        c, memory = linear_scan(i.sigmoid() * z.tanh(), f.sigmoid(), memory, cu_seqlens=cu_seqlens)
        y = o.sigmoid() * (c.tanh() if self.activation == "tanh" else c)
        return y.to(x.dtype), GLRUState(after, memory)
