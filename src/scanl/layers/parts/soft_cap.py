"""A bound on numbers that leaves small ones as they are."""

import torch
from torch import Tensor

from scanl.layers.base import widen


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) in float32 or wider: close to x for small x, and always between -cap and cap."""
    return cap * torch.tanh(widen(x) / cap)
