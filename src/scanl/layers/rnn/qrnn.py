r"""Quasi-recurrent neural network.

.. math::
   z_t = \tanh(W_z * x), \; f_t = \sigma(W_f * x), \; o_t = \sigma(W_o * x), \quad
   c_t = f_t \odot c_{t-1} + (1 - f_t) \odot z_t, \quad h_t = o_t \odot c_t
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import Layer, register, widen
from scanl.layers.parts.window import WindowState, windows
from scanl.layers.state import Device, DType
from scanl.ops import linear_scan

POOLINGS = {"f": 2, "fo": 3, "ifo": 4}  # projections of each


@register("qrnn")
class QRNN(Layer):
    """QRNN: a causal convolution over a few steps gives candidates and gates, and a linear recurrence pools them.

    Differs: zoneout is omitted, as dropout is in every layer.

    Args:
        dim: D, inputs and state.
        pooling: "f", the output is c; "fo", an output gate; "ifo", also an input gate in place of 1 - f.
        window: W, steps that the convolution reads.
        gate: what the gate F multiplies in "f" and "fo": "old", the state, as in the paper; or "new", the candidate, as
            in the authors' program.

    Parameters as in the authors' program: linear (2D to 4D, W D) with a bias; rows of Z, F, O and I, columns of x_t,
    x_{t-1} and so on.
    Initialisation: as in PyTorch, also in the authors' program.
    State: WindowState: c (B, D), and the last W-1 inputs, zeros at the start.
    """

    id = "S-qrnn"
    aliases = ("quasi_rnn",)
    equation = "c_t = f_t * c_{t-1} + (1 - f_t) * z_t,  h_t = o_t * c_t,  z, f, o from x_t and x_{t-1}"
    source = 'Bradbury, Merity, Xiong and Socher, "Quasi-Recurrent Neural Networks", arXiv:1611.01576, eq. (1) to (5)'
    op = "linear_scan"
    sample: ClassVar = {"window": 3}

    def __init__(self, dim: int, pooling: str = "fo", window: int = 2, gate: str = "old") -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"qrnn: dim is {dim}, expected at least 1")
        if pooling not in POOLINGS:
            raise nearest("pooling of qrnn", pooling, POOLINGS)
        if window < 1:
            raise ConfigError(f"qrnn: window is {window}, expected at least 1")
        if gate not in ("old", "new"):
            raise nearest("gate of qrnn", gate, ["old", "new"])
        self.dim, self.pooling, self.window, self.gate = dim, pooling, window, gate
        self.linear = nn.Linear(window * dim, POOLINGS[pooling] * dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> WindowState:
        kind = {"device": device, "dtype": dtype, "at_least": torch.float32}
        recurrent = self._zeros(batch_size, self.dim, **kind)
        return WindowState(
            recurrent, self._zeros(batch_size, self.window - 1, self.dim, **kind) if self.window > 1 else ()
        )

    def forward(
        self, x: Tensor, state: WindowState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, WindowState]:
        self._check(x, state, cu_seqlens)
        recurrent, inputs = (None, None) if state is None else state
        seen, inputs = windows(x, self.window, inputs, cu_seqlens=cu_seqlens)
        z, f, *more = widen(self.linear(seen)).chunk(POOLINGS[self.pooling], -1)
        keep = f if self.gate == "old" else -f
        write = more[1] if self.pooling == "ifo" else -keep
        c, last = linear_scan(write.sigmoid() * z.tanh(), keep.sigmoid(), recurrent, cu_seqlens=cu_seqlens)
        y = more[0].sigmoid() * c if more else c
        return y.to(x.dtype), WindowState(last, inputs)
