"""Wave-RNN: a rectified network whose recurrent weights are a circular convolution, so that its state is a wave."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.ops._frame.context import late
from scanl.ops.cell import cell
from scanl.options import Range, at_least, one_of

ACTIVATIONS = {"relu": torch.relu, "tanh": late(torch, "tanh"), "ident": lambda h: h}
odd = Range("an odd number of at least 1", lambda value, _: value > 0 and value % 2 == 1)


@cell(
    "x: B T C N, w: C C K, state: B C N -> B T C N",
    equation="h_t = phi(u * h_{t-1} + x_t), where * is a circular correlation over N",
    source='Keller, Muller, Sejnowski and Welling, "Traveling Waves Encode the Recent Past", arXiv:2309.08045',
)
def wrnn_cell(x, w, state, *, activation: str = "relu"):
    """Move C channels on a ring of N sites by one step.

    x: the projected input, biases included, (B, T, C, N).   w: the kernel, outputs before inputs, of an odd size K,
    (C, C, K).   state: h, (B, C, N).   activation: "relu", "tanh" or "ident".
    """
    size = w.shape[2]
    pull = x
    for k in range(size):
        pull = pull + torch.einsum("bin,oi->bon", torch.roll(state, size // 2 - k, 2), w[:, :, k])
    h = ACTIVATIONS[activation](pull)
    return h, h


cases(
    wrnn_cell,
    "C=2 K=3 N=4",
    "w has shape (1, 2, 3), expected (C, C, K) with C=2 from x",
    "state has shape (2, 4), expected (B, C, N)",
    options=[{"activation": "tanh"}],
    w=lambda w: w / 2,
)


@registry.register("wrnn")
class WaveRNN(CellLayer):
    """Wave-RNN: the input travels around a ring, one site per step. The kernel learns how it fades.

    Parameters as in the authors' program: Wx (C N, D), Wy (C, C, K), readout (D, C N), all with biases.
    Initialisation: Wx.weight 0 but for the 1s at sites 0, so that the input enters there, and Wx.bias 0. The rest, the
    bias of Wy too, as in PyTorch. In the authors' program init is "eye" and Wx.weight N(0, 0.001²) by default; here the
    defaults are those that make waves.
    """

    id = "S-wrnn"
    equation = "h_t = ReLU(u * h_{t-1} + V x_t + b),  * a circular convolution"
    cell = wrnn_cell
    reads: ClassVar = {"Wy": nn.Conv1d}
    state: ClassVar = StateAxes("num_channels, width", "h")
    sample: ClassVar = {"width": 5, "num_channels": 2}
    residual_out = "readout"

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[options.Width | None, "N, sites of a ring; by default D / C, rounded down"] = None,
        num_channels: Annotated[int, at_least(1), "C, channels, each on a ring of its own"] = 1,
        conv_size: Annotated[options.ConvSize, odd, "K, size of the kernel, an odd number"] = 3,
        activation: Annotated[options.Activation, one_of(ACTIVATIONS)] = "relu",
        init: Annotated[
            Literal["fwd", "eye", "rand"],
            'the initial kernel: "fwd" moves each channel by one site, to the lower index; "eye" keeps it where it is; '
            '"rand" is PyTorch\'s',
        ] = "fwd",
    ) -> None:
        super().__init__()
        if width is None:
            width = dim // num_channels
            if not width:
                self._refuse("num_channels", num_channels, f"at most dim={dim} where width is None")
        self.dim, self.width, self.num_channels, self.activation = dim, width, num_channels, activation
        self.Wx = nn.Linear(dim, width * num_channels)
        self.Wy = nn.Conv1d(num_channels, num_channels, conv_size)  # it holds the kernel; the cell applies it
        self.readout = nn.Linear(width * num_channels, dim)
        with torch.no_grad():
            self.Wx.weight.zero_().unflatten(0, (num_channels, width))[:, 0] = 1
            self.Wx.bias.zero_()
            if init != "rand":
                nn.init.dirac_(self.Wy.weight)
            if init == "fwd":
                self.Wy.weight.copy_(self.Wy.weight.roll(1, -1))

    def operands(self, x: Tensor) -> list[Tensor]:
        assert self.Wy.bias is not None
        drive = self.Wx(x).unflatten(-1, (self.num_channels, self.width))
        return [drive + self.Wy.bias[:, None], self.Wy.weight]

    def output(self, h: Tensor) -> Tensor:
        return self.readout(h.flatten(2))
