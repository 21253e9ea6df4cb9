r"""What a piece of a sequence does to the state that enters it: pieces can then be run apart, and joined afterwards.

A state that enters linearly leaves a piece as

.. math:: s_{out} = A\, s_{in} + b.

A `Summary` is this pair: `carry` is A, and `last` is b, the state after the piece when nothing enters. A piece and the
one behind it have the summary (A_2 A_1, A_2 b_1 + b_2). Processes that divide a sequence exchange summaries, not steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, Tensor]]


class Effect(ABC):
    """How the state of an op goes through a piece.

    unless: operands that make it nonlinear when they are given; a piece then has no summary.
    """

    unless: tuple[str, ...] = ()

    @abstractmethod
    def carry(self, run: Run, operands: Mapping[str, Tensor | None], last: Tensor, **more: Any) -> Tensor:
        """A of a piece. run: the op.   last: b of the piece."""

    @abstractmethod
    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        """The state that leaves a piece when `state` enters it."""

    @abstractmethod
    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        """A of a piece and the one behind it."""


class Linear(Effect):
    """The op says what A is: it runs from a unit state, with operands that write nothing.

    silent: those operands, and their values.
    """

    def __init__(self, silent: Mapping[str, float], unless: tuple[str, ...] = ()):
        self.silent, self.unless = silent, unless

    def carry(self, run: Run, operands: Mapping[str, Tensor | None], last: Tensor, **more: Any) -> Tensor:
        unit = self.unit(last)
        quiet = dict(operands)
        for name, value in self.silent.items():
            given = operands[name]
            assert given is not None
            quiet[name] = self.filled(given, value, unit)
        return run(**quiet, **more, state=unit)[1]

    def filled(self, given: Tensor, value: float, unit: Tensor) -> Tensor:
        return torch.full_like(given, value)

    @abstractmethod
    def unit(self, last: Tensor) -> Tensor:
        """The state that a piece turns into its A; `last` is a state of the same shape."""


class Diagonal(Linear):
    """Each number of the state is multiplied by one of its own. A has the shape of the state."""

    def unit(self, last: Tensor) -> Tensor:
        return torch.ones_like(last)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        return carry * state + last

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return first * second


class Matrix(Linear):
    """A matrix (B, H, K, V) is multiplied from the left. A is (B, H, K, K); what is silent has V as its last axis."""

    def unit(self, last: Tensor) -> Tensor:
        size = last.shape[2]
        return torch.eye(size, dtype=last.dtype, device=last.device).expand(*last.shape[:3], size)

    def filled(self, given: Tensor, value: float, unit: Tensor) -> Tensor:
        return given.new_full((*given.shape[:-1], unit.shape[-1]), value)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        return carry @ state + last

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return second @ first


class Window(Effect):
    """The state (B, R, D) is the last R inputs. A is how many steps they move on, (B,)."""

    def carry(self, run: Run, operands: Mapping[str, Tensor | None], last: Tensor, **more: Any) -> Tensor:
        x, cu_seqlens = operands["x"], more.get("cu_seqlens")
        assert x is not None
        if cu_seqlens is not None:
            return cu_seqlens.diff().long()
        return torch.full((x.shape[0],), x.shape[1], device=x.device)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        kept = last.shape[1]
        source = torch.arange(kept, device=last.device) + carry[:, None]
        if kept == 0:
            return last
        moved = state.gather(1, source.clamp(max=kept - 1)[..., None].expand_as(state))
        return torch.where((source < kept)[..., None], moved, last)

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second


@dataclass(frozen=True)
class Summary:
    """What a piece does to the state that enters it. `op.summary(...)` makes one.

    carry: A; its form depends on the op.   last: the state after the piece when nothing enters.
    """

    carry: Tensor
    last: Tensor
    effect: Effect

    def after(self, state: Tensor | None) -> Tensor:
        """The state that leaves the piece when `state` enters it; None is the state before any input."""
        return self.last if state is None else self.effect.after(self.carry, self.last, state)

    def then(self, following: "Summary") -> "Summary":
        """The summary of this piece and the one that is read next, as one piece."""
        return Summary(self.effect.follow(self.carry, following.carry), following.after(self.last), self.effect)
