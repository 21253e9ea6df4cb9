"""The protocol of a learning algorithm."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers.state import State
from scanl.learning.questions import Model


class Loss(Protocol):
    """A function that returns the mean loss of a model's answers, and the model's state after the batch."""

    def __call__(self, model: Model, batch: Batch, state: State) -> tuple[Tensor, State]: ...


class Algorithm(ABC):
    """Computes gradients of the parameters, one update after another.

    The learner is what an algorithm keeps between two updates: nested tensors like a state, batch first, so that it
    can be saved, moved and split over processes. It is None when the algorithm keeps nothing. An update covers the
    steps of a batch; an online algorithm may be given one step at a time.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    @abstractmethod
    def init(self, model: Model, batch_size: int) -> Any:
        """Return the learner before the first update, on the device of the model."""

    @abstractmethod
    def update(self, model: Model, learner: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Return the loss over the steps of a batch, and the learner after them.

        `loss.backward()` adds the exact gradient, a truncated one or an estimate to each parameter's `grad`. The
        caller makes the optimizer's step.
        """
