"""Base class of layers with a diagonal system for each channel, and then an activation and a linear map."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.base import Hint, Layer, widen
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.state import Device, DType

BY_CONVOLUTION = {
    "earlier_outputs_are_the_same_to_the_bit": "many steps are a convolution through the FFT, which rounds every "
    "output by the largest input of the call"
}


class Systems(Protocol):
    """Diagonal systems, with the rule that discretises them."""

    discretization: str

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A, B, C and dt as `diagonal_ssm` takes them."""
        ...


class DiagonalLayer(Layer):
    """y = W GELU(K * x + D x) + b, with K the kernels of diagonal systems. A subclass makes `kernel` and calls `_end`.

    Its state has N complex numbers for each channel.
    """

    op = "linear_scan"
    excused: ClassVar = BY_CONVOLUTION
    hints: ClassVar = {"kernel": Hint(weight_decay=False, lr="lr")}

    d_state: int
    kernel: Systems

    def _end(self) -> None:
        """Make what follows the systems: D (1, dim), N(0, 1), and the linear map."""
        self.D = nn.Parameter(torch.randn(1, self.dim))
        self.output_linear = nn.Linear(self.dim, self.dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, self.dim, self.d_state, device=device, dtype=dtype, at_least=torch.complex64)

    def _run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        u = widen(x)
        y, last = diagonal_ssm(
            u, *self.kernel.system(), state,
            discretization=self.kernel.discretization, cu_seqlens=cu_seqlens, timespans=timespans,
        )  # fmt: skip
        return self.output_linear(F.gelu(torch.addcmul(y, u, widen(self.D))).to(x.dtype)), last
