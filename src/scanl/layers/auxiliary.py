"""Losses of layers that are added to the loss of the task, such as the reconstruction loss of a compressed memory.

A layer that has one computes it inside of `collect`, and nowhere else:

    with auxiliary.collect() as losses:
        logits, state = model(tokens)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) + losses.total()

The trainer does the same. A compiled graph collects nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn


class Losses:
    """The losses that layers added inside of a `collect`."""

    def __init__(self) -> None:
        self._terms: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}

    def by_name(self) -> dict[str, Tensor]:
        """Return each loss by its name: the sum over layers of the mean over the terms of all calls of a layer."""
        losses: dict[str, Tensor] = {}
        for (name, _), terms in self._terms.items():
            total, count = (
                torch.stack([value.to(terms[0][0]) for value in values]).sum() for values in zip(*terms, strict=True)
            )
            mean = total / count.clamp(min=1)
            losses[name] = losses[name] + mean.to(losses[name]) if name in losses else mean
        return losses

    def total(self) -> Tensor | float:
        """Return the sum of all; 0 where no layer added one."""
        losses = list(self.by_name().values())
        return torch.stack([loss.to(losses[0]) for loss in losses]).sum() if losses else 0.0

    def add(self, layer: nn.Module, name: str, total: Tensor, count: Tensor) -> None:
        """Add terms of a layer's loss: their sum and their number."""
        self._terms.setdefault((name, id(layer)), []).append((total, count))


_OPEN_LOSSES: ContextVar[Losses | None] = ContextVar("scanl.auxiliary", default=None)


@contextmanager
def collect() -> Iterator[Losses]:
    """Collect the losses of all layers that this thread calls inside. The innermost `collect` gets them."""
    losses = Losses()
    token = _OPEN_LOSSES.set(losses)
    try:
        yield losses
    finally:
        _OPEN_LOSSES.reset(token)


def collecting() -> Losses | None:
    """Return the place to which a layer adds its loss; None if it computes none."""
    return None if torch.compiler.is_compiling() else _OPEN_LOSSES.get()


class _RepeatContext:
    """A context that drops the losses of what runs again; it can be entered more than once."""

    def __init__(self) -> None:
        self._tokens: list[Token[Losses | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_OPEN_LOSSES.set(Losses()))

    def __exit__(self, *error: object) -> None:
        _OPEN_LOSSES.reset(self._tokens.pop())


class _BufferGuard:
    """A context around another that restores a module's buffers when it has run again; it can be entered often."""

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self._module, self._inner = module, inner
        self._before: list[list[tuple[Tensor, Tensor]]] = []

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._before.append([(buffer, buffer.clone()) for buffer in self._module.buffers()])

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for buffer, values in self._before.pop():
                buffer.copy_(values)
        self._inner.__exit__(None, None, None)


def checkpoint_contexts(
    module: nn.Module | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return `context_fn` of `torch.utils.checkpoint`: what runs again computes the losses again, as it must.

    module: what runs, if its buffers may change when it does; they are changed once.
    """
    again = nullcontext() if collecting() is None else _RepeatContext()
    return nullcontext(), again if module is None else _BufferGuard(module, again)
