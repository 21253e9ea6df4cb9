r"""Positions of TransNormer: a fixed reflection, then rotations by learned angles.

.. math:: q_t \mapsto R_{t\theta} (I - 2 v v^\top) q_t, \quad \|v\| = 1
"""

import torch
from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.layers.parts.rotary import rotate_pairs


class HouseholderRotary(Module):
    """Reflect the K channels of each head, then rotate adjacent pairs by multiples of learned angles.

    Parameter: theta (1, 1, K // 2), initially 10000^(-2i/K). Buffer: v (K), random, of length 1. All heads share them.
    Source: Qin et al., "Linearized Relative Positional Encoding", arXiv:2307.09270, section 4.
    """

    v: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(10000 ** (-2 / head_dim * torch.arange(head_dim // 2)).view(1, 1, -1))
        self.register_buffer("v", nn.functional.normalize(torch.randn(head_dim), dim=0))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """Map x (B, T, H, K) to the same shape. steps: (B, T) or (1, T), position of each step, from 0."""
        x, v = widen(x), widen(self.v)
        return rotate_pairs(x - 2 * (x @ v).unsqueeze(-1) * v, steps[..., None, None] * self.theta[0].double())
