r"""The effect of a piece of a sequence on the state, so that pieces can run separately and be joined afterwards.

If an op is linear in its state, a piece maps the state as

.. math:: s_{out} = A\, s_{in} + b.

A `Summary` is this pair: `carry` is A; `last` is b, the state after the piece from a zero state. Piece 1 followed by
piece 2 has the summary (A_2 A_1, A_2 b_1 + b_2). Processes that divide a sequence exchange summaries, not steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ShapeError

Run = Callable[..., tuple[Tensor, Tensor]]


class Effect(ABC):
    """How a piece acts on the state of an op.

    unless: operands that make the op nonlinear in its state; if one is given, there is no summary.   scaled: whether
    the state holds its own scale, so that `after` is not linear in the numbers of the state.
    """

    unless: tuple[str, ...] = ()
    scaled: bool = False

    @abstractmethod
    def carry(self, run: Run, operands: Mapping[str, Tensor | None], last: Tensor, **more: Any) -> Tensor:
        """Return A of a piece. run: the op.   last: b of the piece."""

    @abstractmethod
    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        """Return the state after a piece that starts from `state`."""

    @abstractmethod
    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        """Return A of the first piece followed by the second."""

    @abstractmethod
    def forget(self, carry: Tensor, last: Tensor) -> Tensor:
        """Return, in the form of `carry`, A of a piece whose last state does not depend on the first."""


class Linear(Effect):
    """An effect whose A is computed by running the op from a unit state, with operands that write nothing.

    silent: the names and values of these operands.
    """

    def __init__(self, silent: Mapping[str, float], unless: tuple[str, ...] = ()):
        self.silent, self.unless = silent, unless

    def carry(self, run: Run, operands: Mapping[str, Tensor | None], last: Tensor, **more: Any) -> Tensor:
        unit = self.unit(last)
        quiet = dict(operands)
        for name, value in self.silent.items():
            operand = operands[name]
            assert operand is not None
            quiet[name] = self.filled(operand, value, unit)
        return run(**quiet, **more, state=unit)[1]

    def filled(self, operand: Tensor, value: float, unit: Tensor) -> Tensor:
        return torch.full_like(operand, value)

    def forget(self, carry: Tensor, last: Tensor) -> Tensor:
        return torch.zeros_like(carry)

    @abstractmethod
    def unit(self, last: Tensor) -> Tensor:
        """Return the unit state, which the op maps to A. last: a state of the op, for its shape."""


class Diagonal(Linear):
    """Each element of the state is multiplied by its own number. A has the shape of the state."""

    def unit(self, last: Tensor) -> Tensor:
        return torch.ones_like(last)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        return carry * state + last

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return first * second


class Matrix(Linear):
    """The state (B, H, K, V) is multiplied by a matrix from the left. A is (B, H, K, K).

    The last axis of the silent operands is V.
    """

    def unit(self, last: Tensor) -> Tensor:
        size = last.shape[2]
        return torch.eye(size, dtype=last.dtype, device=last.device).expand(*last.shape[:3], size)

    def filled(self, operand: Tensor, value: float, unit: Tensor) -> Tensor:
        return operand.new_full((*operand.shape[:-1], unit.shape[-1]), value)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        return _product(carry, state) + last

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return _product(second, first)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in its own dtype: autocast would round states to half precision, as it does no op's."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class Window(Effect):
    """The state (B, R, D) is the last R inputs. A is the number of steps by which they shift, (B,)."""

    def carry(self, run: Run, operands: Mapping[str, Tensor | None], last: Tensor, **more: Any) -> Tensor:
        x, cu_seqlens = operands["x"], more.get("cu_seqlens")
        assert x is not None
        if cu_seqlens is not None:
            return cu_seqlens.diff().long()
        return torch.full((x.shape[0],), x.shape[1], device=x.device)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        size = last.shape[1]
        source = torch.arange(size, device=last.device) + carry[:, None]
        if size == 0:
            return last
        moved = state.gather(1, source.clamp(max=size - 1)[..., None].expand_as(state))
        return torch.where((source < size)[..., None], moved, last)

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def forget(self, carry: Tensor, last: Tensor) -> Tensor:
        return torch.full_like(carry, last.shape[1])


@dataclass(frozen=True)
class Summary:
    """The effect of a piece of a sequence on the state. `op.summary(...)` makes one.

    carry: A; its shape depends on the op.   last: b, the state after the piece from a zero state.
    """

    carry: Tensor
    last: Tensor
    effect: Effect

    def after(self, state: Tensor | None) -> Tensor:
        """Return the state after the piece, starting from `state`; None is the state before any input.

        The state is cast to the dtype of `last`, as an op casts it. Raises ShapeError for one that the op would refuse.
        """
        if state is None:
            return self.last
        if state.shape != self.last.shape:
            expected = tuple(self.last.shape)
            raise ShapeError(f"summary: state has shape {tuple(state.shape)}, expected {expected} because of the piece")
        if state.device != self.last.device:
            raise ShapeError(f"summary: state is on {state.device}, expected {self.last.device} because of the piece")
        if state.is_complex() and not self.last.is_complex():
            raise ShapeError(f"summary: state is {state.dtype}, expected real numbers because of the piece")
        return self.effect.after(self.carry, self.last, state.to(self.last.dtype))

    def then(self, following: "Summary") -> "Summary":
        """Return the summary of this piece followed by the next one."""
        return Summary(self.effect.follow(self.carry, following.carry), following.after(self.last), self.effect)
