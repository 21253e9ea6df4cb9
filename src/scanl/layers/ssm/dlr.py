r"""DLR: a diagonal linear recurrent network without a discretisation.

.. math:: s_t = \Lambda \odot s_{t-1} + u_t, \quad y_t = \mathrm{Re}(w \cdot s_t) + D u_t, \quad
          \Lambda = e^{-a^2 + i\theta}
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, unknown
from scanl.layers.base import register, widen
from scanl.layers.module import Module
from scanl.layers.parts.time_step import check_step_range, log_uniform
from scanl.layers.ssm._base import DiagonalLayer

PARTS = {"real": 1.0, "imag": -1.0j, "sum": 1.0 - 1.0j}  # Re(factor z) is Re z, Im z or Re z + Im z


class DLRKernel(Module):
    """Parameters of DLR's systems: Lambda_log_neg_re = a, Lambda_im = θ (N); W (1, D, N, 2), pairs of real numbers."""

    discretization = "dirac"

    def __init__(self, dim: int, d_state: int, part: str, dt_min: float, dt_max: float) -> None:
        super().__init__()
        self.factor = PARTS[part] / 2
        self.Lambda_im = nn.Parameter(2 * math.pi / d_state * torch.arange(d_state, dtype=torch.get_default_dtype()))
        self.Lambda_log_neg_re = nn.Parameter((log_uniform(d_state, dt_min, dt_max).exp() / 2).sqrt())
        self.W = nn.Parameter(torch.randn(1, dim, d_state, 2) / d_state)

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return A and B (1, N), C (D, N) and steps of 1."""
        A = torch.complex(-widen(self.Lambda_log_neg_re).square(), widen(self.Lambda_im))[None]
        C = self.factor * torch.view_as_complex(widen(self.W[0]))
        return A, torch.ones_like(A), C, torch.ones_like(A.real[0, :1])


@register("dlr")
class DLR(DiagonalLayer):
    """DLR: N complex numbers for each channel, one spectrum near the unit circle for all, then GELU and a linear map.

    The frequencies start as those of a Fourier transform over N steps, so N modes can form any kernel of N steps. A
    long sequence is computed as a convolution, a few steps as the recurrence. Both give the same function.

    Differs: the released code can also multiply the real part of a kernel by the imaginary part. No recurrence with
    this state can do that, so this option is left out.

    Args:
        dim: D, model width.
        d_state: N, complex modes of each channel. The paper takes 128 to 4,096.
        part: what is read of the complex kernel: "real", "imag" or "sum", the real plus the imaginary part.
        dt_min, dt_max: range of the initial 2 a², the rate at which a mode decays.
        lr: learning rate of Λ and w; None for the optimiser's own.

    Parameters as in the released code: D (1, D); kernel: Lambda_log_neg_re, in fact a, and Lambda_im, θ (N), W
    (1, D, N, 2) as pairs of real numbers; output_linear (D, D), there `output_linear.0`. Those of the kernel have no
    weight decay.
    Initialisation: 2 a² log-uniform in [dt_min, dt_max]; θ_m = 2π m/N; w N(0, 1/N²) in each part; D N(0, 1); the linear
    map as in PyTorch.
    State: (B, D, N) complex.
    """

    id = "S-dlr"
    aliases = ("diagonal_linear_rnn",)
    equation = "s_t = Lambda * s_{t-1} + u_t,  y = W GELU(Re(w s) + D * u) + b,  Lambda = exp(-a^2 + i theta)"
    source = (
        'Gupta, Mehta and Berant, "Simplifying and Understanding State Space Models with Diagonal Linear RNNs", '
        "arXiv:2212.00768, sec. 3, and its code"
    )
    sample: ClassVar = {"d_state": 3}

    def __init__(
        self,
        dim: int,
        d_state: int = 128,
        part: str = "real",
        dt_min: float = 1e-4,
        dt_max: float = 0.1,
        lr: float | None = 1e-4,
    ) -> None:
        super().__init__()
        if d_state < 1:
            raise ConfigError(f"dlr: d_state is {d_state}, expected at least 1")
        if part not in PARTS:
            raise ConfigError(f"dlr: {unknown('part', part, PARTS)}")
        check_step_range("dlr", dt_min, dt_max)
        self.dim, self.d_state, self.part, self.lr = dim, d_state, part, lr
        self.kernel = DLRKernel(dim, d_state, part, dt_min, dt_max)
        self._end()

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._run(x, state, cu_seqlens)
