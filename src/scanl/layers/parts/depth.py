"""Fractions of the depth of a stack and of the width of a layer, for initial values that depend on them."""

import torch
from torch import Tensor


def rise(layer: int, layers: int) -> float:
    """From 0 in the lowest layer to 1 in the highest."""
    return layer / max(layers - 1, 1)


def fall(layer: int, layers: int) -> float:
    """From 1 in the lowest layer to almost 0, 1/layers, in the highest."""
    return 1 - layer / layers


def steps(width: int) -> Tensor:
    """j / width over the channels j: from 0 to just below 1."""
    return torch.arange(width) / width


def whole(width: int) -> Tensor:
    """j / (width - 1) over the channels j: from 0 to 1."""
    return torch.arange(width) / max(width - 1, 1)
