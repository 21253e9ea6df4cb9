"""Layers that start differently at each depth of a stack."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scanl.layers.base import Layer


class DepthInitialised(Layer):
    """A layer whose start follows its place among the layers of its class; alone it is the only one."""

    def init_depth(self, layer: int, layers: int) -> None:
        """Set what depends on depth, for layer 0 <= layer < layers."""
        raise NotImplementedError

    @classmethod
    def tie(cls, layers: Sequence[Layer]) -> None:
        for place, layer in enumerate(layers):
            assert isinstance(layer, DepthInitialised)
            layer.init_depth(place, len(layers))


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
