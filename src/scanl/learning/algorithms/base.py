"""The protocol of a learning algorithm, and the registry of algorithms.

A new algorithm is one new file of this folder. It defines a subclass of `Algorithm` and registers it with
`@algorithm("name")`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, map_leaves
from scanl.learning.questions import Model
from scanl.options import ConfiguredMeta, who
from scanl.registry import Registry


class Loss(Protocol):
    """A function that returns the mean loss of a model's answers, and the model's state after the batch."""

    def __call__(self, model: Model, batch: Batch, state: State) -> tuple[Tensor, State]: ...


class Algorithm(metaclass=ConfiguredMeta):
    """Computes gradients of the parameters, one update after another.

    The learner is what an algorithm keeps between two updates: nested tensors like a state, batch first, so that it
    can be saved, moved and split over processes. An update covers the steps of a batch, which may be a single step.
    Whoever calls it makes the optimizer's step, and begins new sequences with the learner of `init`, or of `renew`.
    `Batch.parts` cuts sequences into updates.

    A subclass annotates the options of its constructor with ranges and meanings, as layers do, and declares what it
    computes and what it costs. The formulas are in B sequences, T steps of an update, d inputs, e numbers of the state
    and p parameters of the recurrence, and the algorithm's options by name. They are read by sympy.
    """

    name: ClassVar[str] = ""  # set by `algorithm`
    id: ClassVar[str] = ""  # a short name by which maintainers find a published algorithm; it is never printed
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    computes: ClassVar[Literal["", "exact", "truncation", "estimate"]] = ""
    error: ClassVar[str] = ""  # which terms a truncation leaves out; the bias and the variance of an estimate
    memory: ClassVar[str] = ""  # numbers that are kept beside the parameters while an update runs
    operations: ClassVar[str] = ""  # multiplications of an update
    works_for: ClassVar[str] = "every layer"
    outlives: ClassVar[Sequence[str]] = ()  # fields of the learner, the same for all rows, that new sequences keep
    update_steps: ClassVar[int | None] = None  # steps of an update, unless a run says it; None: the whole sequence
    every_step: ClassVar[bool] = False  # whether it needs an answer at every step, and not one of the whole sequence
    gradual: ClassVar[bool] = False  # whether it learns one answer of a whole sequence in every part of it
    masks: ClassVar[bool] = True  # whether rows may end early
    shares: ClassVar[bool] = True  # whether several processes, each with rows of its own, may learn one model

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def init(self, model: Model, batch_size: int) -> Any:
        """Return the learner before the first step of `batch_size` sequences, on the device of the model.

        Raises ConfigError for a model that the algorithm cannot train.
        """
        raise NotImplementedError(f"{who(type(self))}: its class defines no init")

    def renew(self, model: Model, learner: Any, batch_size: int) -> Any:
        """Return the learner before the first step of new sequences, from that after others.

        It is that of `init`, but for the fields that the class says `outlives` a sequence.
        """
        fresh = self.init(model, batch_size)
        kept = {name: _spread(getattr(learner, name), batch_size) for name in self.outlives}
        return fresh._replace(**kept) if kept else fresh

    def settle(self, model: Model, learner: Any) -> Any:
        """Bring the parameters of the model to what the algorithm takes for the best, and return the learner.

        Whoever calls it does so before the model is measured, and at the end. Most algorithms change nothing.
        """
        return learner

    def check(self, model: Model, batch: Batch) -> None:
        """Raise ConfigError, before anything is computed, for a batch from which the algorithm cannot learn."""
        if self.every_step and not batch.answered_each_step:
            raise ConfigError(
                f"{who(type(self))}: the batch has one answer for each sequence, expected one at every step; bptt "
                "learns from one answer"
            )
        if not self.masks and batch.mask is not None:
            raise ConfigError(
                f"{who(type(self))}: batch.mask is given, expected none because the algorithm follows rows of one "
                "length; bptt and rtrl read rows that end early"
            )

    def describe(self, steps: int | None) -> str:
        """Return in a line what the algorithm computes in updates of so many steps; None: of whole sequences."""
        each = "whole sequences" if steps is None else "1 step" if steps == 1 else f"{steps:,} steps"
        kind = {"exact": "exact gradient", "truncation": "truncated gradient", "estimate": "estimated gradient"}
        line = f"{self.name}: {kind.get(self._computed(steps), 'gradient')}, in updates of {each}"
        return f"{line}; {self.error}" if self.error else line

    def _computed(self, steps: int | None) -> str:
        return self.computes

    def update(self, model: Model, learner: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Return the loss over the steps of a batch, and the learner after them.

        `loss.backward()` adds the exact gradient, a truncated one or an estimate to each parameter's `grad`.
        """
        raise NotImplementedError(f"{who(type(self))}: its class defines no update")


def _spread(kept: Any, rows: int) -> Any:
    """Return values that are the same for all rows, for another number of rows, which share one memory."""
    return map_leaves(lambda leaf: leaf[:1].expand(rows, *leaf.shape[1:]), kept)


algorithms: Registry[Algorithm] = Registry(
    "algorithm",
    package="scanl.learning.algorithms",
    listed="`scanl algorithms`",
    use="scanl train --algorithm {name}",
)
algorithm = algorithms.add


def with_gradients(loss: Tensor, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return a loss of the same value, whose `backward` adds these gradients to the parameters.

    None stands for a gradient of zero.
    """
    return _WithGradients.apply(loss.detach(), gradients, *parameters)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *_: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scale,) = cotangents
        return None, None, *(None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.gradients)
