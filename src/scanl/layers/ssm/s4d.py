"""S4D: a diagonal state space model for each channel."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, widen
from scanl.layers.channelwise import ChannelwiseLayer
from scanl.layers.initial_state import StateAxes
from scanl.layers.module import Module
from scanl.layers.parts.diagonal_ssm import MAX_RECURRENT_STEPS, diagonal_ssm, diagonal_ssms_at, read
from scanl.layers.parts.diagonal_start import diagonal_systems
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.state import State
from scanl.ops import discretize, linear_scan

MAX_PLACES = 64  # at which outputs are sums over all steps; for more a convolution is faster


class S4DKernel(Module):
    """Parameters of S4D's systems.

    log_dt (D); C (D, N/2, 2) as pairs of real numbers; log_A_real and A_imag (D, N/2).
    """

    def __init__(self, dim: int, state_dim: int, init: str, dt_min: float, dt_max: float) -> None:
        super().__init__()
        start = diagonal_systems(dim, state_dim, init, dt_min, dt_max)
        self.C = nn.Parameter(start.C)
        self.log_dt = nn.Parameter(start.log_dt)
        self.log_A_real = nn.Parameter(start.log_A_real)
        self.A_imag = nn.Parameter(start.A_imag)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return A and C, complex (D, N/2), and Δ (D), in float32 or wider."""
        A = torch.complex(-widen(self.log_A_real).exp(), widen(self.A_imag))
        return A, torch.view_as_complex(widen(self.C)), widen(self.log_dt).exp()


class PointwiseConvolution(nn.Conv1d):
    """A convolution of width 1. For a transposed view it is one product of matrices, and copies nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.mT, self.weight[..., 0], self.bias).mT


class GatedDiagonalLayer(Layer):
    """Diagonal systems with the parameters of S4D, GELU and a gated linear map: S4D and its kin. Abstract."""

    op = "linear_scan"
    state: ClassVar = StateAxes("dim, state_dim // 2", dtype=torch.complex64)
    sample: ClassVar = {"state_dim": 4}
    hints: ClassVar = dict.fromkeys(
        ("kernel.log_dt", "kernel.log_A_real", "kernel.A_imag"), Hint(weight_decay=False, lr="lr")
    )

    def __init__(
        self,
        dim: options.Dim,
        state_dim: options.EvenStateDim = 64,
        init: options.DiagonalInit = "lin",
        dt_min: options.StepMin = 0.001,
        dt_max: options.StepMax = 0.1,
        discretization: options.Discretization = "zoh",
        lr: options.LearningRate = 1e-3,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.discretization, self.lr = dim, state_dim, discretization, lr
        self.D = nn.Parameter(torch.randn(dim))
        self.kernel = S4DKernel(dim, state_dim, init, dt_min, dt_max)
        self.output_linear = nn.Sequential(PointwiseConvolution(dim, 2 * dim, 1), nn.GLU(-2))

    def _read_out(self, y: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
        """Return GLU(W GELU(y + D u)) in `dtype`; y: what the systems read, u: their input, (B, T, D)."""
        y = F.gelu(torch.addcmul(y, u, widen(self.D))).to(dtype)
        return self.output_linear(y.mT).mT


@registry.register("s4d")
class S4D(ChannelwiseLayer, GatedDiagonalLayer):
    """S4D: a time-invariant recurrence on N/2 complex numbers per channel, then GELU and a gated linear map.

    A long sequence is computed as a convolution with the system's kernel, a few steps as the recurrence. Both give the
    same function. B is 1, as in the released s4d.py; C includes it, so for "legs" C starts with HiPPO's B as a factor.

    Parameters as in the released s4d.py: D (D); kernel: C (D, N/2, 2), log_dt (D), log_A_real, A_imag (D, N/2);
    output_linear.0, a convolution of width 1, (2D, D, 1), for the gated linear unit. A and Δ have no weight decay.
    Initialisation: Δ log-uniform in [dt_min, dt_max]; -Re A = 1/2 and, for n = 0, 1, ..., Im A = π n (lin),
    (N/π)(N/(2n+1) - 1) (inv), or that of the eigenvalues of HiPPO-LegS without its rank-one part (legs); C complex
    N(0, 1), for legs times HiPPO's B with Im B clipped to ±2; D N(0, 1); the linear map as in PyTorch.
    """

    id = "S-s4d"
    aliases = ("diagonal_s4",)
    equation = "s_t = exp(Delta A) * s_{t-1} + (exp(Delta A) - 1)/A * u_t,  y = GLU(W GELU(2 Re(C s) + D * u))"
    source = (
        'Gu, Gupta, Goel and Ré, "On the Parameterization and Initialization of Diagonal State Space Models", '
        "arXiv:2206.11893, eq. (2) to (9)"
    )
    excused: ClassVar = BY_CONVOLUTION

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        A, C, dt = self.kernel.system()
        u, B = widen(x), torch.ones_like(A)
        if self.watcher is None or timespans is not None:
            y, last = diagonal_ssm(
                u, A, B, C, dt, state,
                discretization=self.discretization, cu_seqlens=cu_seqlens, timespans=timespans,
            )  # fmt: skip
        else:  # a watcher needs the recurrence, in which no system acts on another
            h, (last,) = self.advance([u[..., None]], discretize(A, B, dt, self.discretization), [state], cu_seqlens)
            y = read(h, C)
        return self._read_out(y, u, x.dtype), last

    @classmethod
    def at_places(
        cls, layers: Sequence[Layer], x: Tensor, states: Sequence[State], places: range
    ) -> tuple[Sequence[Tensor], Sequence[State]]:
        few = 0 < len(places) <= MAX_PLACES and places.start < places.step and x.shape[1] > MAX_RECURRENT_STEPS
        alike = [layer for layer in layers if isinstance(layer, S4D) and layer.watcher is None]
        one_rule = len(alike) == len(layers) and len({layer.discretization for layer in alike}) == 1
        if not (few and one_rule) or torch.compiler.is_exporting():
            return super().at_places(layers, x, states, places)
        u = widen(x)
        systems = [(A, torch.ones_like(A), C, dt) for A, C, dt in (layer.kernel.system() for layer in alike)]
        ys, lasts = diagonal_ssms_at(u, systems, states, places, discretization=alike[0].discretization)
        there = u[:, places.start : places.stop : places.step]
        return [layer._read_out(y, there, x.dtype) for layer, y in zip(alike, ys, strict=True)], lasts

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        h, last = linear_scan(v[1] * p[0], v[0], states[0], cu_seqlens=cu_seqlens)
        return h, [last]
