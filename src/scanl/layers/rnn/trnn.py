"""Strongly typed recurrent networks: T-RNN, T-GRU and T-LSTM."""

from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.parts.window import WindowState, windows
from scanl.ops import linear_scan

SOURCE = 'Balduzzi and Ghifary, "Strongly-Typed Recurrent Neural Networks", arXiv:1602.02218, sec. 3'


@registry.register("trnn")
class TRNN(Layer):
    """T-RNN: a running average of projected inputs whose weights come from the input, so the state keeps its type.

    Parameters: z_proj, f_proj and, except for "rnn", o_proj: (D, D), or (D, 2D) with the columns of x_t first; all with
    biases except z_proj of "rnn".
    Initialisation: as in PyTorch; the paper has none.
    """

    id = "S-trnn"
    aliases = ("strongly_typed_rnn", "strongly_typed")
    equation = "h_t = f_t * h_{t-1} + (1 - f_t) * z_t,  z_t = W x_t,  f_t = sigmoid(V x_t + b)"
    source = SOURCE
    op = "linear_scan"
    state: ClassVar = WindowState

    def __init__(
        self,
        dim: options.Dim,
        variant: Annotated[
            Literal["rnn", "gru", "lstm"],
            'the gates of "gru" and "lstm" read x_t and x_{t-1}: "gru" writes z_t * tanh(o_t) in place of '
            '(1 - f_t) * z_t, and "lstm" multiplies the state by tanh(o_t) to give the output',
        ] = "rnn",
    ) -> None:
        super().__init__()
        self.dim, self.variant = dim, variant
        self.past = 0 if variant == "rnn" else 1
        window = self.past + 1
        self.z_proj = nn.Linear(window * dim, dim, bias=variant != "rnn")
        self.f_proj = nn.Linear(window * dim, dim)
        self.o_proj = None if variant == "rnn" else nn.Linear(window * dim, dim)

    def run(self, x: Tensor, state: WindowState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, WindowState]:
        recurrent, inputs = state or (None, None)
        seen, inputs = windows(x, self.past + 1, inputs, cu_seqlens=cu_seqlens)
        z, f = widen(self.z_proj(seen)), widen(self.f_proj(seen))
        o = None if self.o_proj is None else widen(self.o_proj(seen)).tanh()
        written = z * o if o is not None and self.variant == "gru" else (-f).sigmoid() * z
        h, last = linear_scan(written, f.sigmoid(), recurrent, cu_seqlens=cu_seqlens)
        y = h * o if o is not None and self.variant == "lstm" else h
        return y.to(x.dtype), WindowState(last, inputs)


@registry.preset("tgru", variant="gru")
class TGRU(TRNN):
    """T-GRU: an update gate scales the z_t that is written. All gates read x_t and x_{t-1}."""

    id = "S-trnn"
    aliases = ("strongly_typed_gru",)
    equation = "h_t = f_t * h_{t-1} + z_t * tanh(o_t),  z_t, f_t, o_t from x_t and x_{t-1}"
    source = SOURCE


@registry.preset("tlstm", variant="lstm")
class TLSTM(TRNN):
    """T-LSTM: a T-RNN with an output gate; all gates read x_t and x_{t-1}."""

    id = "S-trnn"
    aliases = ("strongly_typed_lstm",)
    equation = "c_t = f_t * c_{t-1} + (1 - f_t) * z_t,  h_t = c_t * tanh(o_t),  z_t, f_t, o_t from x_t and x_{t-1}"
    source = SOURCE
