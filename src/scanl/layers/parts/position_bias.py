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

    def forward(self, queries: Tensor, keys: int) -> Tensor:
        """Return (N, Q, S) for the positions of queries (N, Q) and keys at 0 to S - 1."""
        return widen(self.rel_pos_bias)[self.reach - 1 + torch.arange(keys, device=queries.device) - queries[..., None]]


class RotaryBias(Module):
    """b_ij = <R_i alpha, R_j beta>, with R the rotation of positions. alpha, beta (1, Z), initially N(0, 0.02²)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(0.02 * torch.randn(1, width)) for _ in range(2))

    def forward(self, queries: Tensor, keys: int) -> Tensor:
        """Return (N, Q, S) for the positions of queries (N, Q) and keys at 0 to S - 1."""
        there = torch.arange(keys, device=queries.device)[None]
        at, of = (
            rotate(widen(weight).expand(*steps.shape, 1, -1), steps, weight.shape[1], 10000.0)[:, :, 0]
            for weight, steps in ((self.alpha, queries), (self.beta, there))
        )
        return at @ of.mT
