"""Biases of attention scores that depend on the distance alone, for sequences or blocks of a bounded length M."""

import torch
from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.layers.parts.rotary import rotate


class SimpleBias(Module):
    """b_ij = rel_pos_bias[M - 1 + j - i], one number for each distance below M. Initialisation: N(0, 0.02²)."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.rel_pos_bias = nn.Parameter(0.02 * torch.randn(2 * reach - 1))

    def forward(self, places: Tensor) -> Tensor:
        """Return b for the position of a key less that of a query (...)."""
        return widen(self.rel_pos_bias)[self.reach - 1 + places]


class RotaryBias(Module):
    """b_ij = <R_i alpha, R_j beta>, with R the rotation of positions. alpha, beta (1, Z), initially N(0, 0.02²)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(0.02 * torch.randn(1, width)) for _ in range(2))

    def forward(self, places: Tensor) -> Tensor:
        """Return b for the position of a key less that of a query (...): <alpha, R beta> with the rotation by it."""
        steps, beta = places.flatten()[None], widen(self.beta)
        turned = rotate(beta.expand(1, steps.shape[1], 1, -1), steps, beta.shape[1], 10000.0)[0, :, 0]
        return (turned @ widen(self.alpha)[0]).view(places.shape)
