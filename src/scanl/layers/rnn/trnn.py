r"""Strongly typed recurrent networks: T-RNN, T-GRU and T-LSTM.

.. math:: z_t = W x_t, \quad f_t = \sigma(V x_t + b), \quad h_t = f_t \odot h_{t-1} + (1 - f_t) \odot z_t
"""

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import Layer, preset, register, widen
from scanl.layers.parts.window import WindowState, windows
from scanl.layers.state import Device, DType
from scanl.ops import linear_scan

SOURCE = 'Balduzzi and Ghifary, "Strongly-Typed Recurrent Neural Networks", arXiv:1602.02218, sec. 3'


@register("trnn")
class TRNN(Layer):
    """T-RNN: a running average of projected inputs whose weights come from the input, so the state keeps its type.

    Args:
        dim: D, inputs and state.
        kind: "rnn"; or "gru" and "lstm", whose gates read x_t and x_{t-1}: "gru" writes z_t * tanh(o_t) in place of
            (1 - f_t) * z_t, and "lstm" multiplies the state by tanh(o_t) to give the output.

    Parameters: z_proj, f_proj and, except for "rnn", o_proj: (D, D), or (D, 2D) with the columns of x_t first; all with
    biases except z_proj of "rnn".
    Initialisation: as in PyTorch; the paper has none.
    State: WindowState: h or c (B, D), and x_{t-1} (B, 1, D), () for "rnn".
    """

    id = "S-trnn"
    equation = "h_t = f_t * h_{t-1} + (1 - f_t) * z_t,  z_t = W x_t,  f_t = sigmoid(V x_t + b)"
    source = SOURCE
    op = "linear_scan"

    def __init__(self, dim: int, kind: str = "rnn") -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"{self._who()}: dim is {dim}, expected at least 1")
        if kind not in ("rnn", "gru", "lstm"):
            raise nearest(f"kind of {self._who()}", kind, ["rnn", "gru", "lstm"])
        self.dim, self.kind = dim, kind
        self.window = 1 if kind == "rnn" else 2
        self.z_proj = nn.Linear(self.window * dim, dim, bias=kind != "rnn")
        self.f_proj = nn.Linear(self.window * dim, dim)
        self.o_proj = None if kind == "rnn" else nn.Linear(self.window * dim, dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> WindowState:
        kind = {"device": device, "dtype": dtype, "at_least": torch.float32}
        recurrent = self._zeros(batch_size, self.dim, **kind)
        return WindowState(recurrent, self._zeros(batch_size, 1, self.dim, **kind) if self.window > 1 else ())

    def forward(
        self, x: Tensor, state: WindowState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, WindowState]:
        self._check(x, state, cu_seqlens)
        recurrent, inputs = (None, None) if state is None else state
        seen, inputs = windows(x, self.window, inputs, cu_seqlens=cu_seqlens)
        z, f = widen(self.z_proj(seen)), widen(self.f_proj(seen))
        o = None if self.o_proj is None else widen(self.o_proj(seen)).tanh()
        written = z * o if o is not None and self.kind == "gru" else (-f).sigmoid() * z
        h, last = linear_scan(written, f.sigmoid(), recurrent, cu_seqlens=cu_seqlens)
        y = h * o if o is not None and self.kind == "lstm" else h
        return y.to(x.dtype), WindowState(last, inputs)


@preset("tgru", kind="gru")
class TGRU(TRNN):
    """T-GRU: an update gate scales the z_t that is written. All gates read x_t and x_{t-1}."""

    id = "S-trnn"
    equation = "h_t = f_t * h_{t-1} + z_t * tanh(o_t),  z_t, f_t, o_t from x_t and x_{t-1}"
    source = SOURCE


@preset("tlstm", kind="lstm")
class TLSTM(TRNN):
    """T-LSTM: a T-RNN with an output gate; all gates read x_t and x_{t-1}."""

    id = "S-trnn"
    equation = "c_t = f_t * c_{t-1} + (1 - f_t) * z_t,  h_t = c_t * tanh(o_t),  z_t, f_t, o_t from x_t and x_{t-1}"
    source = SOURCE
