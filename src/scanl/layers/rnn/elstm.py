"""LSTM with elementwise recurrence."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, as_widened, widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops.cell import cell


@cell(
    "x: B T 2 D, w: 2 D, state: B D -> B T D",
    equation="c_t = f_t * c_{t-1} + (1 - f_t) * tanh(x_z + w_z * c_{t-1}),  f_t = sigmoid(x_f + w_f * c_{t-1})",
    source='Irie, Gopalakrishnan and Schmidhuber, "Exploring the Promise and Limits of Real-Time Recurrent Learning", '
    "arXiv:2305.19044, sec. 3",
)
def elstm_cell(x, w, state):
    """Move each memory cell towards its candidate.

    x: the projected input of z and f, biases included, (B, T, 2, D).   w: weights of the state in z and f, (2, D).
    state: c, (B, D).
    """
    z, f = (x + w * state[:, None]).unbind(1)
    forget = torch.sigmoid(f)
    c = forget * state + (1 - forget) * torch.tanh(z)
    return c, c


cases(
    elstm_cell, "D=3", "w has shape (2, 2), expected (2, D) with D=3 from x", "w is missing, expected a tensor (2, D)"
)


@registry.register("elstm")
class ELSTM(ChannelwiseLayer, SolvedLayer):
    """eLSTM: an LSTM whose gates read their own memory cell alone, so real-time recurrent learning is cheap.

    As in the authors' program for reinforcement learning, the output gate reads x and the new memory, and no tanh is
    applied to the memory. Without the gate the output is the memory, as in their copy task.

    Parameters as in the authors' program: wm_z, wm_f (D, D); wv_z, wv_f, bias_z, bias_f (1, D); out_gate_linear
    (D, 2D) with bias, if there is a gate. wv_z and wv_f have no weight decay.
    Initialisation as in that code: N(0, 0.01), forget_bias added to bias_f; the gate as in PyTorch.
    """

    aliases = ("quasi_lstm", "elementwise_lstm")
    equation = (
        "c_t = f_t * c_{t-1} + (1 - f_t) * tanh(W_z x_t + w_z * c_{t-1} + b_z),  "
        "f_t = sigmoid(W_f x_t + w_f * c_{t-1} + b_f),  h_t = c_t * sigmoid(W_o [x_t; c_t] + b_o)"
    )
    source = elstm_cell.source
    op = "elstm_cell"
    state: ClassVar = StateAxes("dim", "c")
    hints: ClassVar = dict.fromkeys(("wv_z", "wv_f"), UNDECAYED_HINT)

    def __init__(
        self,
        dim: options.Dim,
        output_gate: options.OutputGate = True,
        forget_bias: Annotated[float, "added to the initial b_f; above 0 the memory is longer at the start"] = 0.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.wm_z, self.wm_f = (nn.Parameter(0.1 * torch.randn(dim, dim)) for _ in range(2))
        self.wv_z, self.wv_f = (nn.Parameter(0.1 * torch.randn(1, dim)) for _ in range(2))
        self.bias_z = nn.Parameter(0.1 * torch.randn(1, dim))
        self.bias_f = nn.Parameter(0.1 * torch.randn(1, dim) + forget_bias)
        self.out_gate_linear = nn.Linear(2 * dim, dim) if output_gate else None

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        weight = torch.cat([self.wm_z, self.wm_f])
        drive = Drive(F.linear(x, weight).unflatten(-1, (2, -1)), x, lambda: weight.t().unflatten(-1, (2, -1)))
        vectors = [each[0] for each in (self.bias_z, self.bias_f, self.wv_z, self.wv_f)]
        c, (last,) = self.advance([drive], vectors, [state], cu_seqlens)
        c = c.to(x.dtype)
        y = c if self.out_gate_linear is None else c * self.out_gate_linear(torch.cat([x, c], -1)).sigmoid()
        return y, last

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        bias, w = torch.stack(list(v[:2])), torch.stack(list(v[2:]))
        with as_widened(p[0]):
            c, last = self.run_cell(elstm_cell, widen(p[0]) + widen(bias), widen(w), states[0], cu_seqlens=cu_seqlens)
        return c, [last]
