"""Initial step sizes Δ: drawn between two bounds, uniformly in their logarithm."""

import math

import torch
from torch import Tensor


def log_uniform(count: int, low: float, high: float) -> Tensor:
    """Draw ln Δ (count,) uniformly between ln low and ln high."""
    start, end = math.log(low), math.log(high)
    return torch.rand(count) * (end - start) + start


def time_step_bias(size: int, dt_min: float = 1e-3, dt_max: float = 0.1, dt_init_floor: float = 1e-4) -> Tensor:
    """Draw the initial bias b of Δ = softplus(x + b), as in Mamba and its successors.

    softplus(b) = max(Δ, floor), with ln Δ uniform over [ln dt_min, ln dt_max]. Source: arXiv:2312.00752, sec. 3.6.

    >>> bool(((time_step_bias(9).exp() + 1).log() <= 0.1 + 1e-6).all())
    True
    """
    dt = log_uniform(size, dt_min, dt_max).exp().clamp(min=dt_init_floor)
    return dt + (-torch.expm1(-dt)).log()  # softplus(b) = Δ  <=>  b = ln(e^Δ - 1)
