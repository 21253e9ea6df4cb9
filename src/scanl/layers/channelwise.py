"""Layers whose channels have recurrences of their own, and how their parameters enter them."""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

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
    """A function that stands between a layer and its recurrence, `Channelwise.recur`, while an algorithm learns."""

    def __call__(
        self,
        layer: "Channelwise",
        drives: Sequence[Drive | Tensor],
        vectors: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Sequence[Tensor]]: ...


class Channelwise(Layer):
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
        """Return what is read at every step, (B, T, *K), and the states after the last one.

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


def driven(linear: nn.Linear, x: Tensor, layout: Callable[[Tensor], Tensor]) -> tuple[Tensor, Drive]:
    """Return linear(x), and the drive that it is. layout: takes (..., rows) to (..., *P, *K)."""
    y = linear(x)

    def weight() -> Tensor:
        return layout(linear.weight.t())

    def bias() -> Tensor | None:
        return None if linear.bias is None else layout(linear.bias)

    return y, Drive(layout(y), x, weight, bias)  # not read here: an adapter that stands for the map has neither
