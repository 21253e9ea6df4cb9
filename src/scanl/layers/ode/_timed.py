"""Base class of layers that are one cell in continuous time, and matrices that are skew-symmetric in part."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.parts.cell_layer import CellBase
from scanl.layers.parts.timespans import durations
from scanl.ops._frame.context import late

ACTIVATIONS = {"relu": torch.relu, "tanh": late(torch, "tanh")}


class TimedCell(CellBase):
    """Layer that runs a cell over the whole sequence. A subclass sets `cell` and defines `operands`."""

    def operands(self, x: Tensor, spans: Tensor) -> Sequence[Tensor | None]:
        """Return the operands of the cell, without the state. spans: how long each step lasts, (B, T, 1)."""
        raise NotImplementedError

    def run(
        self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, timespans: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        h, last = self._scan(x, durations(timespans, x), state, cu_seqlens)
        return self.output(h.to(x.dtype)), last

    def _scan(self, x: Tensor, spans: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._run(x, self.operands(x, spans), state, cu_seqlens)


def square_normal(dim: int, std: float) -> nn.Parameter:
    """Return a parameter (D, D) of numbers N(0, (std / D)²)."""
    return nn.Parameter(std / dim * torch.randn(dim, dim))


def part_skew(m: Tensor, beta: float, gamma: float) -> Tensor:
    """Return (1 - beta) (M + Mᵀ) + beta (M - Mᵀ) - gamma I."""
    m = widen(m)
    return (1 - beta) * (m + m.T) + beta * (m - m.T) - gamma * torch.eye(len(m), dtype=m.dtype, device=m.device)
