"""Parallel Legendre memory unit: a linear recurrence, because what is written depends on the input alone."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import registry
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.polynomial_memory import memory_cell
from scanl.layers.ssm.hippo import varying_memory_cell
from scanl.layers.ssm.lmu import LegendreMemory


@registry.register("lmu_parallel")
class LMUParallel(LegendreMemory):
    """Parallel LMU: the number written to the memory depends on the input alone, so the recurrence is linear.

    `forward` also takes `timespans` (B, T), the duration of each step in units of the usual one. θ is then in the same
    units. With `timespans` the matrices of all steps are in memory, B T N² numbers.

    Parameters as in pytorch-lmu: W_u (1, D) and W_h (D, N + D), with biases; the buffers A (N, N) and B (N, 1) are the
    discrete memory, and fixed.
    Initialisation: as in PyTorch.
    """

    id = "S-lmu"
    equation = "u_t = ReLU(W_u x_t + b_u),  m_t = A m_{t-1} + B u_t,  y_t = ReLU(W_h [m_t; x_t] + b_h)"
    source = 'Chilkuri and Eliasmith, "Parallelizing Legendre Memory Unit Training", arXiv:2102.11417, eq. (18) to (20)'
    op = "memory_cell"
    state: ClassVar = StateAxes("1, state_dim")

    def _make_maps(self) -> None:
        self.W_u = nn.Linear(self.dim, 1)
        self.W_h = nn.Linear(self.state_dim + self.dim, self.dim)

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        u = widen(self.W_u(x).relu())
        with as_widened(x):
            if timespans is not None:
                varying = self._timed_memory(timespans, u)
                m, last = varying_memory_cell(u, *varying, state, cu_seqlens=cu_seqlens)
            else:
                m, last = memory_cell(u, widen(self.A), widen(self.B[:, 0]), state, cu_seqlens=cu_seqlens)
        # A ReLU that saves its input, not its result, which the caller may change in place.
        return F.threshold(self.W_h(torch.cat([m.flatten(2).to(x.dtype), x], -1)), 0.0, 0.0), last
