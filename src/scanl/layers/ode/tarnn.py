"""Time adaptive RNN: the input and the state decide how far each step moves the state."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._timed import ACTIVATIONS
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.parts.timespans import durations
from scanl.ops.cell import cell
from scanl.options import one_of

SOURCE = 'Kag and Saligrama, "Time Adaptive Recurrent Neural Network", CVPR 2021; the equation is that of their program'


@cell(
    "x: B T 3 D, dt: B T 1, u1: D D, u: 3 D D, rate: K, state: B D -> B T D",
    equation="z <- z + a_k (phi(U_1 z + U_2 h + x^1_t) - 2 z - h + B_1 x_t + B_2 h), K times;  h_t = (1 - g) h + g z",
    source=SOURCE,
    static=("K",),
)
def tarnn_cell(
    x: Tensor,
    dt: Tensor,
    u1: Tensor,
    u: Tensor,
    rate: Tensor,
    state: Tensor,
    *,
    variant: str = "b",
    activation: str = "relu",
) -> tuple[Tensor, Tensor]:
    """Move the state by K Euler rounds from where it is. u1: U_1.   rate: a, of each round.   dt: how long they last.

    x, u: what the input and the state give, fixed over the rounds: into φ; into the gate; and beside φ.
    """
    inside, gate, beside = (x + torch.einsum("bd,gde->bge", state, u)).unbind(1)
    g, z, leak, pace = torch.sigmoid(gate), state, 2, dt
    if variant == "plain":
        leak, pace = 1, dt * g
    for size in rate.unbind(0):
        z = z + size * pace * (ACTIVATIONS[activation](z @ u1 + inside) - leak * z - state + beside)
    h = z if variant == "plain" else (1 - g) * state + g * z
    return h, h


cases(
    tarnn_cell,
    "D=4 K=2",
    "u has shape (3, 4, 3), expected (3, D, D) with D=4 from x",
    "dt has shape (2, 5), expected (B, T, 1)",
    dt=Tensor.abs,
    rate=lambda rate: rate / 4,
)


class TARNNState(NamedTuple):
    h: Annotated[Tensor, StateAxes("dim")]
    shift: Annotated[Tensor, StateAxes("1, dim", "the last input")]


@registry.register("tarnn")
class TARNN(SolvedLayer):
    """Time adaptive RNN: a closed gate skips an input, so noise does not change the state.

    Parameters as in the authors' PyTorch program, for row vectors, x W1: W1, W2, Wg, U1, U2, Ug, B1, B2 (D, D); b1,
    bg (D); A1 (K, 1), the lengths a.
    Initialisation as in that code: matrices N(0, 0.01), b1 = 0, bg = -3 (0 in "plain"), a = 0.01. Differs: the authors'
    A1 has a column for each step, so their sequences have one length. The input before the first is 0, as in their
    TensorFlow program; their PyTorch program takes the first input twice.
    """

    id = "S-tarnn"
    aliases = ("time_adaptive",)
    equation = (
        "h_t = (1 - g) h_{t-1} + g z,  "
        "dz/ds = phi(U_1 z + U_2 h_{t-1} + W_1 x_t + W_2 x_{t-1} + b) - 2 z - h_{t-1} + B_1 x_t + B_2 h_{t-1},  "
        "g = sigmoid(U_g h_{t-1} + W_g x_t + b_g)"
    )
    source = SOURCE
    op = "tarnn_cell"
    state: ClassVar = TARNNState
    sample: ClassVar = {"substeps": 2}

    W1: Tensor
    W2: Tensor
    Wg: Tensor
    U1: Tensor
    U2: Tensor
    Ug: Tensor
    B1: Tensor
    B2: Tensor

    def __init__(
        self,
        dim: options.Dim,
        substeps: Annotated[options.Substeps, "K, Euler rounds for each input"] = 1,
        variant: Annotated[
            Literal["b", "plain"],
            '"b", with g between the old state and the new; or "plain", with g in each round and a leak -z in place of '
            "-2 z",
        ] = "b",
        activation: Annotated[options.Activation, one_of(ACTIVATIONS), 'φ, "relu" or "tanh"'] = "relu",
    ) -> None:
        super().__init__()
        self.dim, self.variant, self.activation = dim, variant, activation
        for name in ("W1", "W2", "Wg", "U1", "U2", "Ug", "B1", "B2"):
            self.register_parameter(name, nn.Parameter(torch.empty(dim, dim).normal_(0, 0.1)))
        self.b1 = nn.Parameter(torch.zeros(dim))
        self.bg = nn.Parameter(torch.full((dim,), -3.0 if variant == "b" else 0.0))
        self.A1 = nn.Parameter(torch.full((substeps, 1), 0.01))

    def run(
        self, x: Tensor, state: TARNNState | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, TARNNState]:
        spans = durations(timespans, x)
        h, shift = state or (None, None)
        previous, shift = token_shift(x, shift, cu_seqlens=cu_seqlens)
        bias = F.pad(torch.cat([self.b1, self.bg]), (0, self.dim))
        drive = F.linear(x, torch.cat([self.W1, self.Wg, self.B1], 1).T, bias).unflatten(-1, (3, -1))
        drive = drive + F.pad((previous @ self.W2)[..., None, :], (0, 0, 0, 2))
        operands = [drive, spans, self.U1, torch.stack([self.U2, self.Ug, self.B2]), self.A1[:, 0]]
        options = {"variant": self.variant, "activation": self.activation}
        with as_widened(x):
            y, h = self.run_cell(tarnn_cell, *map(widen, operands), h, cu_seqlens=cu_seqlens, **options)
        return y.to(x.dtype), TARNNState(h, shift)
