"""Calibration of quantiles by factors of their distances from the median."""

import torch
from torch import Tensor

from scanl.models.heads.distributions import LEVELS


def calibrated(quantiles: Tensor, median: Tensor, levels: Tensor, factors: Tensor) -> Tensor:
    """Return quantiles (B, H, C, Q) at levels (Q,), whose distances from the median (B, H, C, 1) have factors.

    factors: (H, 11), at `LEVELS`. Between two of these levels they are interpolated. The quantiles stay in the order of
    their levels.
    """
    known = levels.new_tensor(LEVELS)
    within = levels.clamp(known[0], known[-1]).contiguous()
    upper = torch.searchsorted(known, within).clamp(1, len(LEVELS) - 1)
    weight = ((within - known[upper - 1]) / (known[upper] - known[upper - 1])).to(quantiles)
    factors = factors.to(quantiles)
    at_levels = factors[:, upper - 1].lerp(factors[:, upper], weight)[:, None]
    order = levels.argsort()
    widened = (median + at_levels * (quantiles - median))[..., order].cummax(-1).values
    return widened[..., order.argsort()]
