r"""Linearised relative positional encoding: queries and keys times the cosine and the sine of an angle that grows.

.. math:: q_t \mapsto (q_t \odot \cos t\theta,\; q_t \odot \sin t\theta), \quad
          q_t^\top k_s \mapsto \sum_i q_{t,i} k_{s,i} \cos((t - s)\theta_i)

Source: Qin et al., "Linearized Relative Positional Encoding", arXiv:2307.09270, and "TransNormerLLM", arXiv:2307.14995,
section 3.1.
"""

import torch
from torch import Tensor, nn

from scanl.layers.base import widen
from scanl.layers.module import Module


class LRPE(Module):
    """Positions with learned angles theta (H, K), initially 10000^(-2j/(H K)) for channel j of all heads."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        channels = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
        self.theta = nn.Parameter(10000 ** (-2 / (num_heads * head_dim) * channels))

    def forward(self, steps: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Map each value (B, T, H, K) to (B, T, H, 2K). steps: (B, T) or (1, T), position of each step, from 0."""
        angles = steps[..., None, None] * self.theta.double()  # in double: a stream may be a million steps long
        waves = torch.stack([angles.cos(), angles.sin()], -2)
        return tuple((widen(x)[..., None, :] * waves.to(widen(x).dtype)).flatten(-2) for x in values)
