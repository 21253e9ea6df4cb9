r"""Wave-RNN: a rectified network whose recurrent weights are a circular convolution, so that its state is a wave.

.. math:: h_t = \mathrm{ReLU}(u \star h_{t-1} + V x_t + b)
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import register
from scanl.layers.parts.cell_layer import CellLayer, at_least, samples
from scanl.ops.cell import cell
from scanl.ops.registry import Sample

SOURCE = 'Keller, Muller, Sejnowski and Welling, "Traveling Waves Encode the Recent Past", arXiv:2309.08045'
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "ident": lambda h: h}
INITS = ("fwd", "eye", "rand")


@cell(
    "x: B T C N, w: C C K, state: B C N -> B T C N",
    equation="h_t = phi(u * h_{t-1} + x_t), where * is a circular correlation over N",
    source=SOURCE,
)
def wrnn_cell(x, w, state, *, act: str = "relu"):
    """Move C channels on a ring of N sites by one step.

    x: the projected input, biases included, (B, T, C, N).   w: the kernel, outputs before inputs, of an odd size K,
    (C, C, K).   state: h, (B, C, N).   act: "relu", "tanh" or "ident".
    """
    size = w.shape[2]
    pull = x
    for k in range(size):
        pull = pull + torch.einsum("bin,oi->bon", torch.roll(state, size // 2 - k, 2), w[:, :, k])
    h = ACTIVATIONS[act](pull)
    return h, h


@wrnn_cell.samples
def _samples() -> Iterator[Sample]:
    return samples(
        lambda draw, batch, steps, rows: {
            "x": draw(batch, steps, 2, 4),
            "w": draw(2, 2, 3) / 2,
            "state": draw(rows, 2, 4),
        },
        act="tanh",
    )


@wrnn_cell.errors
def _errors() -> Iterator[tuple[Sample, str]]:
    x, w = torch.zeros(2, 5, 2, 4), torch.zeros(2, 2, 3)
    yield Sample({"x": x, "w": w[:1]}), "w has shape (1, 2, 3), expected (C, C, K) with C=2 from x"
    yield Sample({"x": x, "w": w, "state": x[:, 0, 0]}), "state has shape (2, 4), expected (B, C, N)"


@register("wrnn")
class WaveRNN(CellLayer):
    """Wave-RNN: the input travels around a ring, one site per step. The kernel learns how it fades.

    Args:
        dim: D, model width.
        n_hid: N, sites of the ring; by default D / n_ch, rounded down.
        n_ch: C, channels, each on a ring of its own.
        ksize: K, size of the kernel, an odd number.
        act: "relu", "tanh" or "ident".
        init: initial kernel: "fwd" moves each channel by one site, to the lower index; "eye" keeps it where it is;
            "rand" is PyTorch's.
        solo_init: the input enters at site 0 of each channel, with weight 1 for each of its numbers. Both `init` and
            `solo_init` set only initial values.

    Parameters as in the authors' program: Wx (C N, D), Wy (C, C, K), readout (D, C N), all with biases.
    Initialisation: Wx.weight 0 but for the 1s at sites 0, and Wx.bias 0; without solo_init Wx.weight N(0, 0.001²). The
    rest, the bias of Wy too, as in PyTorch. In the authors' program the defaults of init and solo_init are "eye" and
    False; here they are those that make waves.
    State: h (B, C, N).
    """

    id = "S-wrnn"
    equation = "h_t = ReLU(u * h_{t-1} + V x_t + b),  * a circular convolution"
    source = SOURCE
    cell = wrnn_cell
    reads: ClassVar = {"Wy": nn.Conv1d}
    sample: ClassVar = {"n_hid": 5, "n_ch": 2}
    residual_out = "readout"

    def __init__(
        self,
        dim: int,
        n_hid: int | None = None,
        n_ch: int = 1,
        ksize: int = 3,
        act: str = "relu",
        init: str = "fwd",
        solo_init: bool = True,
    ) -> None:
        super().__init__()
        n_hid = dim // max(n_ch, 1) if n_hid is None else n_hid
        at_least("wrnn", 1, n_ch=n_ch, n_hid=n_hid)
        if ksize < 1 or ksize % 2 == 0:
            raise ConfigError(f"wrnn: ksize is {ksize}, expected an odd number above 0")
        if act not in ACTIVATIONS:
            raise nearest("act of wrnn", act, ACTIVATIONS)
        if init not in INITS:
            raise nearest("init of wrnn", init, INITS)
        self.dim, self.n_hid, self.n_ch, self.ksize = dim, n_hid, n_ch, ksize
        self.act, self.init, self.solo_init = act, init, solo_init
        self.Wx = nn.Linear(dim, n_hid * n_ch)
        self.Wy = nn.Conv1d(n_ch, n_ch, ksize)  # it holds the kernel; the cell applies it
        self.readout = nn.Linear(n_hid * n_ch, dim)
        with torch.no_grad():
            if solo_init:
                self.Wx.weight.zero_().unflatten(0, (n_ch, n_hid))[:, 0] = 1
                self.Wx.bias.zero_()
            else:
                self.Wx.weight.normal_(std=0.001)
            if init != "rand":
                nn.init.dirac_(self.Wy.weight)
            if init == "fwd":
                self.Wy.weight.copy_(self.Wy.weight.roll(1, -1))

    def state_shape(self) -> tuple[int, ...]:
        return (self.n_ch, self.n_hid)

    def operands(self, x: Tensor) -> list[Tensor]:
        assert self.Wy.bias is not None
        given = self.Wx(x).unflatten(-1, (self.n_ch, self.n_hid))
        return [given + self.Wy.bias[:, None], self.Wy.weight]

    def options(self) -> dict[str, str]:
        return {"act": self.act}

    def output(self, h: Tensor) -> Tensor:
        return self.readout(h.flatten(2))
