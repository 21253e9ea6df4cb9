"""Base class of layers with a diagonal system for each channel, and then an activation and a linear map."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.base import Hint, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.diagonal_ssm import diagonal_ssm

BY_CONVOLUTION = {
    "earlier_outputs_are_the_same_to_the_bit": "many steps are a convolution through the FFT, which rounds every "
    "output by the largest input of the call",
    "bits_are_the_same_in_any_company": "many steps are a convolution through the FFT, and few are not",
}


class Systems(Protocol):
    """Diagonal systems, with the rule that discretizes them."""

    discretization: str

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A, B, C and dt as `diagonal_ssm` takes them."""
        ...


class DiagonalLayer(Layer):
    """y = W GELU(K * x + D x) + b, with K the kernels of diagonal systems.

    A subclass makes `kernel` and calls `_end`.
    Its options have `state_dim`, N complex numbers for each channel.
    """

    state: ClassVar = StateAxes("dim, state_dim", dtype=torch.complex64)
    op = "linear_scan"
    excused: ClassVar = BY_CONVOLUTION
    hints: ClassVar = {"kernel": Hint(weight_decay=False, lr="lr")}

    state_dim: int
    kernel: Systems

    def _end(self) -> None:
        """Make the parameters after the systems: D (1, dim), N(0, 1), and the linear map."""
        self.D = nn.Parameter(torch.randn(1, self.dim))
        self.output_linear = nn.Linear(self.dim, self.dim)

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u = widen(x)
        y, last = diagonal_ssm(
            u, *self.kernel.system(), state,
            discretization=self.kernel.discretization, cu_seqlens=cu_seqlens, timespans=timespans,
        )  # fmt: skip
        return self.output_linear(F.gelu(torch.addcmul(y, u, widen(self.D))).to(x.dtype)), last
