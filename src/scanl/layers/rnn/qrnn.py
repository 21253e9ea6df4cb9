"""Quasi-recurrent neural network."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.channelwise import ChannelwiseLayer, driven
from scanl.layers.parts.window import WindowState, windows
from scanl.ops import linear_scan
from scanl.options import one_of

POOLINGS = {"f": 2, "fo": 3, "ifo": 4}  # projections of each


@registry.register("qrnn")
class QRNN(ChannelwiseLayer):
    """QRNN: a causal convolution over a few steps gives candidates and gates, and a linear recurrence pools them.

    Differs: zoneout is omitted, as dropout is in every layer.

    Parameters as in the authors' program: linear (2D to 4D, W D) with a bias; rows of Z, F, O and I, columns of x_t,
    x_{t-1} and so on.
    Initialisation: as in PyTorch, also in the authors' program.
    """

    id = "S-qrnn"
    aliases = ("quasi_rnn", "quasi_recurrent_neural_network", "quasi_recurrent")
    equation = "c_t = f_t * c_{t-1} + (1 - f_t) * z_t,  h_t = o_t * c_t,  z, f, o from x_t and x_{t-1}"
    source = 'Bradbury, Merity, Xiong and Socher, "Quasi-Recurrent Neural Networks", arXiv:1611.01576, eq. (1) to (5)'
    op = "linear_scan"
    state: ClassVar = WindowState
    sample: ClassVar = {"conv_size": 3}

    def __init__(
        self,
        dim: options.Dim,
        pooling: Annotated[
            str,
            one_of(POOLINGS),
            '"f", the output is c; "fo", an output gate; "ifo", also an input gate in place of 1 - f',
        ] = "fo",
        conv_size: options.ConvSize = 2,
        variant: Annotated[
            Literal["old", "new"],
            'what the gate F multiplies in "f" and "fo": "old", the state, as in the paper; or "new", the candidate, '
            "as in the authors' program",
        ] = "old",
    ) -> None:
        super().__init__()
        self.dim, self.pooling, self.past, self.variant = dim, pooling, conv_size - 1, variant
        self.linear = nn.Linear(conv_size * dim, POOLINGS[pooling] * dim)

    def run(self, x: Tensor, state: WindowState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, WindowState]:
        recurrent, inputs = state or (None, None)
        seen, inputs = windows(x, self.past + 1, inputs, cu_seqlens=cu_seqlens)
        rows = [0, 1, 3] if self.pooling == "ifo" else slice(2)  # those of O, row 2, do not act on the state

        def layout(every: Tensor) -> Tensor:
            return every.unflatten(-1, (-1, self.dim))[..., rows, :]

        every, drive = driven(self.linear, seen, layout)
        c, (last,) = self.advance([drive], [], [recurrent], cu_seqlens)
        y = c if self.pooling == "f" else widen(every.chunk(POOLINGS[self.pooling], -1)[2]).sigmoid() * c
        return y.to(x.dtype), WindowState(last, inputs)

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        z, f, *i = widen(p[0]).unbind(2)
        keep = f if self.variant == "old" else -f
        write = i[0] if i else -keep
        c, last = linear_scan(write.sigmoid() * z.tanh(), keep.sigmoid(), states[0], cu_seqlens=cu_seqlens)
        return c, [last]
