"""How parameters learn: the protocol of an algorithm."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from scanl.layers.state import State
from scanl.learning.questions import Model


class Loss(Protocol):
    """The mean loss of a model's answers, and its state after the inputs."""

    def __call__(self, model: Model, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]: ...


class Algorithm(ABC):
    """What the parameters learn from, one update after another.

    What an algorithm keeps between two updates is the learner: tensors nested as a state is, batch first, so that it
    can be saved, moved and split over processes; None when it keeps nothing. The steps of an update are those of `x`:
    an online algorithm may be given one step at a time.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    @abstractmethod
    def init(self, model: Model, batch_size: int) -> Any:
        """The learner before the first update, on the device of the model."""

    @abstractmethod
    def update(self, model: Model, learner: Any, x: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        """The loss over the steps of x, and the learner after them.

        The parameters learn from what `loss.backward()` adds to their `grad`: the gradient itself, one that is cut
        short, or an estimate. The optimiser's step is the caller's.
        """
