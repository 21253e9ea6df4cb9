"""Relative depth in a stack and relative position of a channel, for initial values that depend on them."""

import torch
from torch import Tensor


def relative_depth(layer: int, layers: int) -> float:
    """Return the relative depth of a layer: 0 in the lowest, 1 in the highest."""
    return layer / max(layers - 1, 1)


def remaining_depth(layer: int, layers: int) -> float:
    """Return 1 - layer/layers: 1 in the lowest layer, 1/layers in the highest."""
    return 1 - layer / layers


def channel_shares(width: int) -> Tensor:
    """Return j / width for each channel j: from 0 to just below 1."""
    return torch.arange(width) / width


def channel_ramp(width: int) -> Tensor:
    """Return j / (width - 1) for each channel j: from 0 to 1."""
    return torch.arange(width) / max(width - 1, 1)
