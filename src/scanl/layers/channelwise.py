"""Layers whose channels have recurrences of their own, and how their parameters enter them."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from scanl.errors import ConfigError
from scanl.layers.base import Layer


class Drive(NamedTuple):
    """Numbers that enter the channels at every step, and the linear map that makes them.

    value: (B, T, *P, *K), with K the axes of the channels, and P of the numbers for one channel.
    source: what the map reads, (B, T, d); or (B, T, H, d) where each of H equal groups of channels reads inputs of its
    own. value = source weight + bias, reshaped.
    weight: returns the weight as (d, *P, *K), a function of the parameters.   bias: returns the bias as (*P, *K), or
    None where the map has none.
    """

    value: Tensor
    source: Tensor
    weight: Callable[[], Tensor] | None = None
    bias: Callable[[], Tensor | None] | None = None


class Watcher(Protocol):
    """A function between a layer and its recurrence, `ChannelwiseLayer.recur`, while an algorithm learns."""

    def __call__(
        self,
        layer: "ChannelwiseLayer",
        drives: Sequence[Drive | Tensor],
        vectors: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]: ...


class ChannelwiseLayer(Layer):
    """Base class of layers each of whose channels has a recurrence of its own, s_t = f(p_t, v, s_{t-1}).

    p_t are numbers that enter the channel, v are parameters of the channel, and s is its state: one number, real or
    complex, or a few. A subclass states this once. It defines `recur`, and its `run` calls `advance` with the drives
    that make p, and with v. From these an algorithm knows how each parameter acts on the state.

    Where the state is complex and all drives and v are complex, f must be holomorphic: z, not z*, |z| or Re z.
    """

    left_out: ClassVar[Sequence[str] | None] = ()  # algorithms follow these within a block only

    watcher: Watcher | None = None  # set by an algorithm while it runs the layer

    def recur(
        self, p: Sequence[Tensor], v: Sequence[Tensor], states: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the readout of every step, (B, T, *K), and the states after the last one.

        p: (B, T, *P, *K) each.   v: (*K) each.   states: (B, *K) each; None for zeros.   No channel may act on another.
        """
        raise NotImplementedError

    def advance(
        self,
        drives: Sequence[Drive | Tensor],
        vectors: Sequence[Tensor],
        states: Sequence[Tensor | None],
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run `recur`. A tensor in place of a drive is an input of the channels that no linear map makes."""
        if self.watcher is None:
            values = [drive.value if isinstance(drive, Drive) else drive for drive in drives]
            return self.recur(values, vectors, states, cu_seqlens)
        assert cu_seqlens is None
        return self.watcher(self, drives, vectors, [state for state in states if state is not None])


def driven(linear: nn.Module, x: Tensor, layout: Callable[[Tensor], Tensor]) -> tuple[Tensor, Drive]:
    """Return linear(x), and the drive that it is. layout: takes (..., rows) to (..., *P, *K)."""
    y, weights = linear(x), affine(linear, x)

    def bias() -> Tensor | None:
        offset = weights()[1]
        return None if offset is None else layout(offset)

    return y, Drive(layout(y), x, lambda: layout(weights()[0]), bias)


def affine(linear: nn.Module, x: Tensor) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Return a function that reads the weight (d, rows) and the bias (rows) of a map, in the graph of its parameters.

    x: what the map reads, (..., d). An adapter that stands for a linear map has no weight to read: the weight is what
    it makes of the unit vectors, less the bias, which is what it makes of 0. So its own parameters are followed.
    Raises ConfigError, when called, for an adapter with dropout, or one that is not affine.
    """
    if isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward and not linear._forward_hooks:
        return lambda: (linear.weight.t(), linear.bias)
    return cache(lambda: _affine(linear, x.shape[-1], x))


def _affine(linear: nn.Module, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    name = type(linear).__name__
    if any(isinstance(inner, _DropoutNd) and inner.training and inner.p > 0 for inner in linear.modules()):
        raise ConfigError(
            f"{name}: the adapter has dropout, expected none because an algorithm follows its weights; set it to 0"
        )
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    offset, another, rows = linear(torch.cat([0 * unit[:1], -2 * unit.cumsum(0)[-1:], unit])).split([1, 1, size])
    weight, bias = rows - offset, offset[0]
    with torch.no_grad():
        expected = bias - 2 * weight.sum(0)
        limit = torch.finfo(another.dtype).eps ** 0.5 * (bias.abs() + 2 * weight.abs().sum(0))
        if not ((another[0] - expected).abs() <= limit).all():
            raise ConfigError(
                f"{name}: the adapter is not affine, expected a weight and a bias because an algorithm follows them; "
                "leave the linear map as it is, or take rtrl"
            )
    return weight, bias
