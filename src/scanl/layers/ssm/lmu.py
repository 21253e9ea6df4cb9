"""Legendre memory unit: a window of the past as Legendre polynomials, read by a recurrent network."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.cell_layer import CellBase
from scanl.layers.parts.polynomial_memory import discretize_dense, transition
from scanl.ops.cell import cell
from scanl.options import above

SOURCE = (
    'Voelker, Kajić and Eliasmith, "Legendre Memory Units: Continuous-Time Representation in Recurrent Neural '
    'Networks", NeurIPS 2019, '
)


@cell(
    "x: B T D, u: B T 1, a: N N, b: N, e: 1 S, w: D S, state: B S -> B T D",
    equation="u = u_t + e_h h_{t-1} + e_m m_{t-1}, m_t = A m_{t-1} + b u, h_t = tanh(x_t + W_h h_{t-1} + W_m m_t)",
    source=SOURCE + "eq. (4), (6) and (7)",
)
def lmu_cell(x, u, a, b, e, w, state):
    """Step a Legendre memory unit.

    x: W_x x_t, (B, T, D).   u: e_x x_t, (B, T, 1).   a, b: the memory's system, (N, N) and (N,).
    e: e_h, then e_m, (1, D + N).   w: W_h, then W_m, (D, D + N).   state: h, then m, (B, D + N).
    """
    h, m = state.split([w.shape[0], a.shape[0]], 1)
    u = u + state @ e.T
    m = m @ a.T + u * b
    h = torch.tanh(x + torch.cat([h, m], 1) @ w.T)
    return h, torch.cat([h, m], 1)


cases(
    lmu_cell,
    "D=3 N=4 S=7",
    "b has shape (2,), expected (N,) with N=4 from a",
    "w has shape (3, 5), expected (D, S) with D=3 from x, S=7 from e",
    a=lambda a: a / 2,
)


@cell(
    "x: B T D, u: B T 1, a: B T N N, b: B T N, e: 1 S, w: D S, state: B S -> B T D",
    equation="u = u_t + e_h h_{t-1} + e_m m_{t-1}, m_t = A_t m_{t-1} + b_t u, h_t = tanh(x_t + W_h h_{t-1} + W_m m_t)",
    source=SOURCE + "eq. (4), (6) and (7)",
)
def timed_lmu_cell(x, u, a, b, e, w, state):
    """Step a Legendre memory unit with the memory's system of the step.

    x, u, e, w, state: as in `lmu_cell`.   a, b: the system, (B, T, N, N) and (B, T, N).
    """
    h, m = state.split([w.shape[0], b.shape[1]], 1)
    u = u + state @ e.T
    m = (a * m[:, None]).sum(-1) + u * b
    h = torch.tanh(x + torch.cat([h, m], 1) @ w.T)
    return h, torch.cat([h, m], 1)


cases(timed_lmu_cell, "D=3 N=4 S=7", "b has shape (2, 5, 2), expected (B, T, N)", a=lambda a: a / 2)


def window_memory(size: int) -> tuple[Tensor, Tensor]:
    """Return A (N, N) and B (N) of a memory of a window of length 1, in float64.

    A_nk = (2n+1) (-1 above the diagonal, (-1)^{n-k+1} elsewhere) and B_n = (2n+1) (-1)^n. This is HiPPO-LegT in other
    units: m_n = (-1)^n c_n √(2n+1).
    """
    A, B = transition("legt", size)
    n = torch.arange(size, dtype=A.dtype)
    units = (1 - 2 * (n % 2)) * (2 * n + 1).sqrt()
    return units[:, None] * A / units, units * B


class LegendreMemory(Layer):
    """Layer with the memory of a window. Its discrete form for steps of one unit is in the buffers A and B."""

    sample: ClassVar = {"state_dim": 5, "theta": 6.0}

    A: Tensor
    B: Tensor

    def __init__(
        self,
        dim: options.Dim,
        state_dim: Annotated[options.StateDim, "N, Legendre polynomials"] = 256,
        theta: Annotated[float, above(0), "θ, length of the window in steps"] = 784.0,
    ) -> None:
        super().__init__()
        self.dim, self.state_dim, self.theta = dim, state_dim, theta
        A, B = discretize_dense(*window_memory(state_dim), 1 / theta)
        self.register_buffer("A", A.to(torch.get_default_dtype()))
        self.register_buffer("B", B[:, None].to(torch.get_default_dtype()))
        self._make_maps()

    def _make_maps(self) -> None:
        """Make the parameters."""
        raise NotImplementedError

    def _timed_memory(self, timespans: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return Ā (B, T, N, N) and B̄ (B, T, N) for an input held for timespans (B, T), in the dtype of `like`."""
        A, B = (matrix.to(like.device) for matrix in window_memory(self.state_dim))
        a, b = discretize_dense(A, B, timespans.double() / self.theta)
        return a.to(like.dtype), b.to(like.dtype)


@registry.register("lmu")
class LMU(LegendreMemory, CellBase):
    """LMU: a recurrent network that writes one number a step to a memory of the last θ steps, and reads all of it.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. θ is then in the same
    units, and the memory holds u_t for this duration. The network itself does not depend on the duration. The matrices
    of all steps are then in memory, B T N² numbers.

    Parameters as in pytorch-lmu: e_x (1, D), e_h (1, D), e_m (1, N), W_x, W_h (D, D), W_m (D, N); the buffers A (N, N)
    and B (N, 1) are the discrete memory, and fixed.
    Initialisation: e_x and e_h uniform in ±sqrt(3/D); e_m 0; W_x, W_h and W_m Xavier normal.
    """

    id = "S-lmu"
    aliases = ("legendre_memory_unit",)
    equation = (
        "u_t = e_x x_t + e_h h_{t-1} + e_m m_{t-1},  m_t = A m_{t-1} + B u_t,  "
        "h_t = tanh(W_x x_t + W_h h_{t-1} + W_m m_t)"
    )
    source = SOURCE + "eq. (4), (6) and (7)"
    cell = lmu_cell
    state: ClassVar = StateAxes("dim + state_dim", "h, then m")

    def _make_maps(self) -> None:
        dim, limit = self.dim, math.sqrt(3 / self.dim)
        self.e_x, self.e_h = (nn.Parameter(limit * (2 * torch.rand(1, dim) - 1)) for _ in range(2))
        self.e_m = nn.Parameter(torch.zeros(1, self.state_dim))
        self.W_x, self.W_h, self.W_m = (
            nn.Parameter(nn.init.xavier_normal_(torch.empty(dim, width))) for width in (dim, dim, self.state_dim)
        )

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        drive = [F.linear(x, self.W_x), F.linear(x, self.e_x)]
        reads = [torch.cat([self.e_h, self.e_m], 1), torch.cat([self.W_h, self.W_m], 1)]
        if timespans is None:
            h, last = self._run(x, [*drive, self.A, self.B[:, 0], *reads], state, cu_seqlens)
        else:
            system = self._timed_memory(timespans, widen(x))
            operands = map(widen, (*drive, *system, *reads))
            with as_widened(x):
                h, last = self.run_cell(timed_lmu_cell, *operands, state, cu_seqlens=cu_seqlens)
        return h.to(x.dtype), last
