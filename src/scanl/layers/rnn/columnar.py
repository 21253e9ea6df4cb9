"""Columnar network: independent columns, each a scalar LSTM."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, as_widened, widen
from scanl.layers.channelwise import ChannelwiseLayer, Drive, driven
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.ops.cell import cell
from scanl.options import at_least


@cell(
    "x: B T 4 D, u: 4 D, state: B 2 D -> B T D",
    equation="c_t = f_t * c_{t-1} + i_t * tanh(g_t),  h_t = o_t * tanh(c_t),  (i, f, g, o)_t = x_t + u * h_{t-1}",
    source='Javed, Shah, Sutton and White, "Scalable Real-Time Recurrent Learning Using Columnar-Constructive '
    'Networks", JMLR 24, 2023, arXiv:2302.05326',
)
def columnar_cell(x, u, state):
    """Advance scalar LSTMs, each with one number h and one number c.

    x: the projected input of i, f, g and o, biases included, (B, T, 4, D).   u: weights of h in them, (4, D).
    state: h and c, (B, 2, D).
    """
    h, c = state.unbind(1)
    i, f, g, o = (x + u * h[:, None]).unbind(1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.stack([h, c], 1)


cases(
    columnar_cell,
    "D=3",
    "u has shape (4, 2), expected (4, D) with D=3 from x",
    "u is missing, expected a tensor (4, D)",
)


class ColumnarState(NamedTuple):
    h: Annotated[Tensor, StateAxes("width", "the output of each column")]
    c: Annotated[Tensor, StateAxes("width", "the memory of each column")]


class ScalarLSTMs(ChannelwiseLayer, SolvedLayer):
    """Scalar LSTMs that read the same inputs: (B, T, dim) to (B, T, width). See `Columnar` for the parameters."""

    op = "columnar_cell"
    state: ClassVar = ColumnarState
    hints: ClassVar = {"recurrent": UNDECAYED_HINT}

    def __init__(self, dim: int, width: int, init_scale: float) -> None:
        super().__init__()
        self.dim, self.width = dim, width
        self.gates = nn.Linear(dim, 4 * width)
        self.recurrent = nn.Parameter(torch.empty(4, width))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_scale, init_scale)

    def run(self, x: Tensor, state: ColumnarState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ColumnarState]:
        _, drive = driven(self.gates, x, lambda rows: rows.unflatten(-1, (4, -1)))
        return self.driven_by(drive, x, state, cu_seqlens)

    def driven_by(
        self, drive: Drive | Tensor, x: Tensor, state: ColumnarState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, ColumnarState]:
        """Return the outputs and the state. drive: W x + b, (B, T, 4, width).   The outputs have the dtype of x."""
        h, last = self.advance([drive], self.recurrent.unbind(0), state or (None, None), cu_seqlens)
        return h.to(x.dtype), ColumnarState(*last)

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        known = [state for state in states if state is not None]
        before = torch.stack(known, 1) if known else None
        with as_widened(p[0]):
            u = widen(torch.stack(list(v)))
            h, last = self.run_cell(columnar_cell, widen(p[0]), u, before, cu_seqlens=cu_seqlens)
        return h, [each.clone() for each in last.unbind(1)]  # nobody may change views of one tensor in place


InitScale = Annotated[float, at_least(0), "largest absolute value of the initial parameters"]


@registry.register("columnar")
class Columnar(ScalarLSTMs):
    """Columnar network: columns that see the input and their own output, so real-time recurrent learning is cheap.

    The authors normalise the input of each column and its output by running means and variances, as
    `columnar_constructive` does. Here the norms of a stack do this.

    Parameters: gates (4D, D) with bias, rows of i, f, g and o; recurrent (4, D), without weight decay.
    Initialisation as in the authors' program: U(±init_scale).
    """

    carried_by = "turns"
    equation = columnar_cell.equation.replace("x_t + u", "W x_t + b + u")
    aliases = ("Col_NN",)
    source = columnar_cell.source

    def __init__(self, dim: options.Dim, init_scale: InitScale = 0.01) -> None:
        super().__init__(dim, dim, init_scale)
