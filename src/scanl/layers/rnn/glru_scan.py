r"""Linear-surrogate LSTM: the output of a GILR replaces the fed-back output of the LSTM, so every gate is known at
once.

.. math::
   f_t, i_t, o_t = \sigma(W x_t + U l_{t-1} + b), \quad z_t = \tanh(W x_t + U l_{t-1} + b), \quad
   c_t = f_t \odot c_{t-1} + i_t \odot z_t, \quad h_t = o_t \odot c_t
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers.base import Layer, register, widen
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.rnn.gilr import GILR
from scanl.layers.state import Device, DType
from scanl.ops import linear_scan


class GLRUState(NamedTuple):
    """State of `GLRUScan`: the surrogate's l and the memory c, (B, D) each."""

    surrogate: Tensor
    memory: Tensor


@register("glru_scan")
class GLRUScan(Layer):
    """GILR-LSTM: the gates read the output of a GILR in place of the LSTM's own, so two linear scans compute it.

    Args:
        dim: D, inputs and state.
        shifted: True: the gates read l_{t-1}, as in the paper. False: they read l_t, as in the authors' program.
        squash: h = o * tanh(c), as in an LSTM; the paper and the program have h = o * c.

    Parameters: gilr.linear (2D, D); linear (4D, 2D) with a bias, columns of l and then of x, rows of f, i, o and z,
    as in the authors' program.
    Initialisation as there: both weights U(±0.05), the bias of f 5, other biases 0.
    State: GLRUState, 2D numbers per sequence.
    """

    id = "S-glru-scan"
    equation = (
        "c_t = f_t * c_{t-1} + i_t * z_t,  h_t = o_t * c_t,  f, i, o = sigmoid(W x_t + U l_{t-1} + b),  "
        "z = tanh(same),  l = GILR(x)"
    )
    source = (
        'Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", '
        "arXiv:1709.04057, sec. 3.2"
    )
    op = "linear_scan"
    excused: ClassVar = {"default_sizes_are_in_proportion": "the GILR below the gates adds two matrices to eight"}

    def __init__(self, dim: int, shifted: bool = True, squash: bool = False) -> None:
        super().__init__()
        self.gilr = GILR(dim, "tanh")
        self.dim, self.shifted, self.squash = dim, shifted, squash
        self.linear = nn.Linear(2 * dim, 4 * dim)
        nn.init.uniform_(self.linear.weight, -0.05, 0.05)
        nn.init.zeros_(self.linear.bias)
        nn.init.constant_(self.linear.bias[:dim], 5.0)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> GLRUState:
        zeros = self.gilr.init_state(batch_size, device=device, dtype=dtype)
        return GLRUState(zeros, zeros.clone())

    def forward(
        self, x: Tensor, state: GLRUState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, GLRUState]:
        self._check(x, state, cu_seqlens)
        before, memory = (None, None) if state is None else state
        surrogate, after = self.gilr(x, before, cu_seqlens=cu_seqlens)
        if self.shifted:
            surrogate, _ = token_shift(surrogate, None if before is None else before[:, None], cu_seqlens=cu_seqlens)
        f, i, o, z = widen(self.linear(torch.cat([surrogate, x], -1))).chunk(4, -1)
        c, memory = linear_scan(i.sigmoid() * z.tanh(), f.sigmoid(), memory, cu_seqlens=cu_seqlens)
        y = o.sigmoid() * (c.tanh() if self.squash else c)
        return y.to(x.dtype), GLRUState(after, memory)
