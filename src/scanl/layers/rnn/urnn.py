"""Unitary evolution network: its recurrent matrix is a product of simple unitary matrices, so it keeps lengths."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellLayer
from scanl.layers.state import Device, DType
from scanl.ops.cell import cell
from scanl.ops.offsets import sequences


@cell(
    "x: B T 2 N, w: 2 N N, b: N, state: B 2 N -> B T 2 N",
    equation="h_t = modReLU(W h_{t-1} + x_t), modReLU(z) = z ReLU(|z| + b) / (|z| + 1e-5)",
    source='Arjovsky, Shah and Bengio, "Unitary Evolution Recurrent Neural Networks", arXiv:1511.06464, eq. (6), (7)',
)
def urnn_cell(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of a complex network; complex numbers are pairs of real and imaginary part.

    x: the projected input, (B, T, 2, N).   w: the recurrent matrix, outputs before inputs, (2, N, N).
    b: threshold of the modulus, (N).   state: h, (B, 2, N).
    """
    re, im = state.unbind(1)
    re, im = x[:, 0] + re @ w[0].T - im @ w[1].T, x[:, 1] + re @ w[1].T + im @ w[0].T
    square = re**2 + im**2
    modulus = torch.where(square > 0, torch.sqrt(torch.where(square > 0, square, 1)), 0)  # its slope at 0 is 0
    h = torch.stack([re, im], 1) * (torch.relu(modulus + b) / (modulus + 1e-5))[:, None]
    return h, h


cases(
    urnn_cell,
    "N=3",
    "w has shape (1, 3, 3), expected (2, N, N) with N=3 from x",
    "b is missing, expected a tensor (N,)",
    w=lambda w: w / 2,
    b=lambda b: b / 4,
)


def glorot(inputs: int, outputs: int) -> nn.Parameter:
    limit = math.sqrt(6 / (inputs + outputs))
    return nn.Parameter(torch.empty(inputs, outputs).uniform_(-limit, limit))


@registry.register("urnn")
class URNN(CellLayer):
    """uRNN: a unitary matrix multiplies a complex state, and a threshold is applied to the moduli.

    Parameters as in the authors' program: V (D, 2N); U (2N, D), out_bias (D); hidden_bias (N); theta (3, N), phases of
    the D; reflection (2, 2N), vectors of the R, real parts first; h_0 (1, 2N), the initial state, which is learned. The
    permutation Π is a buffer. R is I - 2 v̄ vᵀ / |v|², as in that code; in the paper v* and v are the other way round.
    Initialisation as in that code: V, U and reflection Glorot uniform; theta U(±π); hidden_bias U(±0.01); h_0
    U(±sqrt(3/(2N))); out_bias 0.
    """

    id = "S-urnn"
    aliases = ("unitary", "unitary_rnn", "unitary_evolution_rnn")
    equation = "h_t = modReLU(W h_{t-1} + V x_t),  W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1,  y_t = U [Re h_t; Im h_t] + b"
    cell = urnn_cell
    state: ClassVar = StateAxes("2, width", "h, real and imaginary parts; h_0 at the start")
    sample: ClassVar = {"width": 5}

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[options.Width | None, "N, complex channels of the state; by default D"] = None,
    ) -> None:
        super().__init__()
        width = width or dim
        self.dim, self.width = dim, width
        limit = math.sqrt(1.5 / width)
        self.V, self.U = glorot(dim, 2 * width), glorot(2 * width, dim)
        self.reflection = glorot(2, 2 * width)
        self.hidden_bias = nn.Parameter(torch.empty(width).uniform_(-0.01, 0.01))
        self.theta = nn.Parameter(torch.empty(3, width).uniform_(-math.pi, math.pi))
        self.h_0 = nn.Parameter(torch.empty(1, 2 * width).uniform_(-limit, limit))
        self.out_bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("permutation", torch.randperm(width))

    def recurrent_matrix(self) -> Tensor:
        """Return W (N, N), complex and unitary: its factors, applied to the rows of the identity, and transposed."""
        turns = torch.polar(torch.ones_like(widen(self.theta)), widen(self.theta))
        mirrors = torch.complex(*widen(self.reflection).chunk(2, 1))

        def reflected(rows: Tensor, v: Tensor) -> Tensor:
            return rows - 2 / v.abs().square().sum() * torch.outer(rows @ v, v.conj())

        rows = torch.fft.fft(torch.diag(turns[0]), norm="ortho")
        rows = reflected(rows, mirrors[0])[:, self.get_buffer("permutation")] * turns[1]
        rows = reflected(torch.fft.ifft(rows, norm="ortho"), mirrors[1])
        return (rows * turns[2]).mT

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        zeros = super().init_state(batch_size, device=device, dtype=dtype)
        return zeros + self.h_0.to(zeros).unflatten(1, (2, -1))

    def operands(self, x: Tensor) -> list[Tensor]:
        w = self.recurrent_matrix()
        return [(x @ self.V).unflatten(-1, (2, -1)), torch.stack([w.real, w.imag]), self.hidden_bias]

    def output(self, h: Tensor) -> Tensor:
        return h.flatten(2) @ self.U + self.out_bias

    def _run(
        self, x: Tensor, operands: Sequence[Tensor | None], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if state is None:
            rows = sequences(x, cu_seqlens)
            state = self.init_state(rows, device=x.device, dtype=x.dtype)
        return super()._run(x, operands, state, cu_seqlens)
