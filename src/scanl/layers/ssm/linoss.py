"""LinOSS: forced harmonic oscillators between dense input and output matrices."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.ode._timed import TimedCell
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.timespans import durations
from scanl.ops.cell import cell

SOURCE = 'Rusch and Rus, "Oscillatory State-Space Models", arXiv:2410.03943, '


@cell(
    "x: B T E, span: B T 1, a: E, dt: E, state: B 2 E -> B T E",
    equation="z_t = z_{t-1} + dt (x_t - a y), y_t = y_{t-1} + dt z_t, with y_t or y_{t-1} in the place of y",
    source=SOURCE + "eq. (3) and (5)",
)
def linoss_cell(x, span, a, dt, state, *, implicit: bool = True):
    """Move uncoupled oscillators by one step, of length span dt.

    x: the force, (B, T, E).   a: squared frequencies, (E,), at least 0.   dt: (E,).   span: (B, T, 1).
    state: z and y, (B, 2, E).   implicit: the force of the spring is that of y_t, otherwise of y_{t-1}.
    """
    z, y = state.unbind(1)
    step = span * dt
    z = z + step * (x - a * y)
    if implicit:
        z = z / (1 + step * step * a)
    y = y + step * z
    return y, torch.stack([z, y], 1)


cases(
    linoss_cell,
    "E=4",
    "a has shape (2,), expected (E,) with E=4 from x",
    "state has shape (2, 4), expected (B, 2, E)",
    options=[{"implicit": True}, {"implicit": False}],
    span=Tensor.abs,
    a=Tensor.abs,
    dt=Tensor.sigmoid,
)


@registry.register("linoss")
class LinOSS(TimedCell):
    """LinOSS: P uncoupled oscillators with complex displacements, then GELU and a gated linear map.

    With "IM" the spring's force is that of the new displacement, so an oscillator loses energy: its eigenvalues have
    the squared modulus 1/(1 + Δ² A). With "IMEX" it is that of the old displacement. Then, where Δ² A < 4, the
    eigenvalues are on the unit circle, and without input z² + A y² - Δ A z y is constant. Steps run one after the
    other. The matrices are real, so an oscillator is two pairs of real numbers. Equal eigenvalues, as for A = 0, need
    no special care.

    Parameters as in the authors' program: A_diag and steps (P), with A = ReLU(A_diag) and Δ = σ(steps); B (P, D, 2) and
    C (D, P, 2) as pairs of real numbers; D (D); w1, w2 (D, D), the linear maps of the gate, in the program `glu.w1` and
    `glu.w2`.
    Initialisation: A_diag and steps U(0, 1); B U(-1, 1)/sqrt(D) and C U(-1, 1)/sqrt(P) in each part; D N(0, 1); the
    linear maps as in PyTorch.
    """

    id = "S-linoss"
    aliases = ("linear_oscillatory_state_space",)
    equation = (
        "z_t = z_{t-1} + Delta (B x_t - A y_t),  y_t = y_{t-1} + Delta z_t,  o_t = Re(C y_t) + D * x_t,  "
        "out = W_1 GELU(o) * sigmoid(W_2 GELU(o))"
    )
    source = SOURCE + "eq. (3), (5) and (6)"
    cell = linoss_cell
    state: ClassVar = StateAxes(
        "2, 2 * state_dim", "z and y; the first P numbers are real parts, the others imaginary parts"
    )
    sample: ClassVar = {"state_dim": 5}

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim | None, "P, oscillators; by default D"] = None,
        discretization: Annotated[Literal["IM", "IMEX"], '"IM", implicit, or "IMEX", implicit and explicit'] = "IM",
    ) -> None:
        super().__init__()
        size = dim if state_dim is None else state_dim
        self.dim, self.state_dim, self.discretization = dim, size, discretization
        self.A_diag = nn.Parameter(torch.rand(size))
        self.steps = nn.Parameter(torch.rand(size))
        self.B = nn.Parameter((2 * torch.rand(size, dim, 2) - 1) / math.sqrt(dim))
        self.C = nn.Parameter((2 * torch.rand(dim, size, 2) - 1) / math.sqrt(size))
        self.D = nn.Parameter(torch.randn(dim))
        self.w1, self.w2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def operands(self, x: Tensor, spans: Tensor) -> list[Tensor]:
        force = x @ self.B.permute(1, 2, 0).flatten(1)
        return [force, spans, widen(self.A_diag).relu().repeat(2), widen(self.steps).sigmoid().repeat(2)]

    def options(self) -> dict[str, bool]:
        return {"implicit": self.discretization == "IM"}

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, last = self._scan(x, durations(timespans, x), state, cu_seqlens)
        out_of = torch.cat([self.C[..., 0], -self.C[..., 1]], 1)
        # jax.nn.gelu, which the authors' program uses, is the approximation by tanh.
        g = F.gelu(torch.addcmul(y.to(x.dtype) @ out_of.t(), x, self.D), approximate="tanh")
        return self.w1(g) * self.w2(g).sigmoid(), last


@registry.preset("linoss_imex", discretization="IMEX")
class LinOSSIMEX(LinOSS):
    """LinOSS-IMEX: oscillators that keep their energy, because the spring's force is that of the old displacement."""

    equation = (
        "z_t = z_{t-1} + Delta (B x_t - A y_{t-1}),  y_t = y_{t-1} + Delta z_t,  o_t = Re(C y_t) + D * x_t,  "
        "out = W_1 GELU(o) * sigmoid(W_2 GELU(o))"
    )
    source = SOURCE + "eq. (5) and (6)"
