"""DLR: a diagonal linear recurrent network without a discretization."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.layers.parts.time_step import log_uniform
from scanl.layers.ssm._base import DiagonalLayer
from scanl.options import one_of

VARIANTS = {"real": 1.0, "imag": -1.0j, "sum": 1.0 - 1.0j}  # Re(factor z) is Re z, Im z or Re z + Im z


class DLRKernel(Module):
    """Parameters of DLR's systems: Lambda_log_neg_re = a, Lambda_im = θ (N); W (1, D, N, 2), pairs of real numbers."""

    discretization = "dirac"

    def __init__(self, dim: int, state_dim: int, variant: str, dt_min: float, dt_max: float) -> None:
        super().__init__()
        self.factor = VARIANTS[variant] / 2
        self.Lambda_im = nn.Parameter(
            2 * math.pi / state_dim * torch.arange(state_dim, dtype=torch.get_default_dtype())
        )
        self.Lambda_log_neg_re = nn.Parameter((log_uniform(state_dim, dt_min, dt_max).exp() / 2).sqrt())
        self.W = nn.Parameter(torch.randn(1, dim, state_dim, 2) / state_dim)

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A and B (1, N), C (D, N) and steps of 1."""
        A = torch.complex(-widen(self.Lambda_log_neg_re).square(), widen(self.Lambda_im))[None]
        C = self.factor * torch.view_as_complex(widen(self.W[0]))
        return A, torch.ones_like(A), C, torch.ones_like(A.real[0, :1])


@registry.register("dlr")
class DLR(DiagonalLayer):
    """DLR: N complex numbers for each channel, one spectrum near the unit circle for all, then GELU and a linear map.

    The frequencies start as those of a Fourier transform over N steps, so N modes can form any kernel of N steps. A
    long sequence is computed as a convolution, a few steps as the recurrence. Both give the same function.

    Differs: the released code can also multiply the real part of a kernel by the imaginary part. No recurrence with
    this state can do that, so this option is left out.

    Parameters as in the released code: D (1, D); kernel: Lambda_log_neg_re, in fact a, and Lambda_im, θ (N), W
    (1, D, N, 2) as pairs of real numbers; output_linear (D, D), there `output_linear.0`. Those of the kernel have no
    weight decay.
    Initialisation: 2 a² log-uniform in [dt_min, dt_max]; θ_m = 2π m/N; w N(0, 1/N²) in each part; D N(0, 1); the linear
    map as in PyTorch.
    """

    id = "S-dlr"
    aliases = ("diagonal_linear_rnn",)
    equation = "s_t = Lambda * s_{t-1} + u_t,  y = W GELU(Re(w s) + D * u) + b,  Lambda = exp(-a^2 + i theta)"
    source = (
        'Gupta, Mehta and Berant, "Simplifying and Understanding State Space Models with Diagonal Linear RNNs", '
        "arXiv:2212.00768, sec. 3, and its code"
    )
    sample: ClassVar = {"state_dim": 3}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "N, complex modes of each channel; the paper takes 128 to 4,096"] = 128,
        variant: Annotated[
            str, one_of(VARIANTS), 'what is read of the complex kernel: "real", "imag", or "sum", Re plus Im'
        ] = "real",
        dt_min: Annotated[options.StepMin, "lower end of the range of the initial 2 a², the decay of a mode"] = 1e-4,
        dt_max: Annotated[options.StepMax, "upper end of this range"] = 0.1,
        lr: Annotated[options.LearningRate, "learning rate of Λ and w; None for the optimizer's"] = 1e-4,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.lr = dim, state_dim, lr
        self.kernel = DLRKernel(dim, state_dim, variant, dt_min, dt_max)
        self._end()

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]: there is no Δ that timespans could multiply
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return super().run(x, state, cu_seqlens)
