"""What is asked of a stream, numbers or a class: how a truth becomes a target, and outputs an answer.

A kind of answers keeps what it must know of the past: running scales, the last truth, the classes so far.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.data.base import IGNORED
from scanl.data.questions import FeatureInputs, Label, Numbers, Question
from scanl.errors import DataError
from scanl.learning.online.scaling import Innovation, Scaling, Values

Truth = Any  # a number, a sequence of numbers, or the name of a class
Answer = Any  # a number, a list of numbers, or {class: probability}


class Frame(NamedTuple):
    """What was known when an answer was made: base and scale of the numbers, and the last truth, None before any."""

    base: list[float]
    scale: list[float]
    last: Any


class Answering(ABC):
    """A kind of answers. Abstract.

    feedback: whether the last truth that is known is an input too.   width: how many inputs that makes.
    metrics: names of river's metrics, the first of which is also computed fading.
    """

    metrics: ClassVar[tuple[str, ...]]
    last: Any = None  # the last truth

    def __init__(self, feedback: bool) -> None:
        self.feedback = feedback

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers the last truth is, as an input."""

    @abstractmethod
    def question(self, inputs: int) -> Question:
        """Return the question for a model with `inputs` inputs."""

    @abstractmethod
    def read(self, truth: Truth) -> Any:
        """Return a truth in its usual form. Raises DataError for one of another kind, or that is not finite."""

    @abstractmethod
    def last_truth(self) -> Values:
        """Return the last truth as an input (width,), NaN before any."""

    @abstractmethod
    def frame(self) -> Frame:
        """Return what is known before an answer."""

    @abstractmethod
    def answer(self, outputs: Tensor, frame: Frame) -> Answer:
        """Return the answer that outputs (1, 1, O) of a model stand for."""

    @abstractmethod
    def target(self, truth: Any, frame: Frame) -> Tensor:
        """Read the truth of an answer, and return the target of the model, (1, 1) or (1, 1, O)."""

    @abstractmethod
    def none(self) -> Tensor:
        """Return the target of a sample without a truth."""

    @abstractmethod
    def pairs(self, truth: Any, answer: Answer) -> list[tuple[Any, Any]]:
        """Return what a metric compares: pairs of a truth and an answer."""

    @abstractmethod
    def naive(self, frame: Frame) -> Answer | None:
        """Return the naive answer, which repeats the last truth; None before any."""

    @abstractmethod
    def error(self, truth: Any, answer: Answer) -> float:
        """Return how wrong an answer is: by it the bank and drift detectors judge."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the past, in numbers, text and lists of them."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


class AnswerNumbers(Answering):
    """One number or several. count: O.   span: see `Scaling`."""

    metrics = ("MAE", "RMSE")

    def __init__(self, count: int, span: int, feedback: bool) -> None:
        super().__init__(feedback)
        self.count = count
        self.innovation, self.scaling = Innovation(count, span), Scaling(count, span)

    @property
    def width(self) -> int:
        return self.count if self.feedback else 0

    def question(self, inputs: int) -> Question:
        return Numbers(FeatureInputs(inputs, missing=True), self.count)

    def read(self, truth: Truth) -> Values:
        try:
            numbers = np.array(truth, np.float64).reshape(-1)
        except (TypeError, ValueError) as error:
            raise DataError(f"the target is {truth!r}, expected a number") from error
        if numbers.size != self.count:
            raise DataError(f"the target has {numbers.size} numbers, expected {self.count}")
        if not np.isfinite(numbers).all():
            raise DataError(f"the target is {truth}, expected a finite number")
        return numbers

    def last_truth(self) -> Values:
        return np.full(self.count, np.nan) if self.last is None else self.scaling.scaled(self.last)

    def frame(self) -> Frame:
        last = None if self.last is None else self.last.tolist()
        return Frame(self.innovation.base(self.last).tolist(), self.innovation.scale.tolist(), last)

    def answer(self, outputs: Tensor, frame: Frame) -> Answer:
        numbers = [
            base + scale * output
            for base, scale, output in zip(frame.base, frame.scale, outputs.flatten().tolist(), strict=True)
        ]
        return numbers[0] if self.count == 1 else numbers

    def target(self, truth: Values, frame: Frame) -> Tensor:
        last = None if frame.last is None else np.array(frame.last)
        z = self.innovation.update(truth, np.array(frame.base), last)
        if self.feedback:
            self.scaling.update(truth)
        self.last = truth
        return as_tensor(z)

    def none(self) -> Tensor:
        return torch.full((1, 1, self.count), torch.nan)

    def pairs(self, truth: Values, answer: Answer) -> list[tuple[float, float]]:
        return list(zip(truth.tolist(), [answer] if self.count == 1 else answer, strict=True))

    def naive(self, frame: Frame) -> Answer | None:
        return frame.last if frame.last is None or self.count > 1 else frame.last[0]

    def error(self, truth: Values, answer: Answer) -> float:
        pairs = self.pairs(truth, answer)
        return sum(abs(target - number) for target, number in pairs) / len(pairs)

    def state_dict(self) -> dict[str, Any]:
        last = None if self.last is None else self.last.tolist()
        return {"last": last, "innovation": self.innovation.state_dict(), "scaling": self.scaling.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = None if state["last"] is None else np.array(state["last"])
        self.innovation.load_state_dict(state["innovation"])
        self.scaling.load_state_dict(state["scaling"])


class AnswerClass(Answering):
    """One of at most `most` classes, which are known once they have been seen."""

    metrics = ("Accuracy", "MacroF1")

    def __init__(self, most: int, feedback: bool) -> None:
        super().__init__(feedback)
        self.most = most
        self.numbers: dict[Hashable, int] = {}  # of the classes

    @property
    def width(self) -> int:
        return self.most if self.feedback else 0

    def question(self, inputs: int) -> Question:
        return Label(FeatureInputs(inputs, missing=True), self.most)

    def read(self, truth: Truth) -> Hashable:
        truth = truth.item() if isinstance(truth, np.generic) else truth
        if truth is None or (isinstance(truth, float) and math.isnan(truth)):
            raise DataError(f"the target is {truth}, expected a class")
        if truth not in self.numbers and len(self.numbers) == self.most:
            raise DataError(
                f"the target is {truth!r}, a class beyond the {self.most} of before; give a larger number of classes"
            )
        return truth

    def last_truth(self) -> Values:
        if self.last is None:
            return np.full(self.most, np.nan)
        return np.eye(self.most)[self.numbers[self.last]]

    def frame(self) -> Frame:
        return Frame([], [], self.last)

    def answer(self, outputs: Tensor, frame: Frame) -> Answer:
        # The probabilities of the classes that have been seen, in float64, so that they sum to 1.
        known = outputs.flatten()[: len(self.numbers)].double().softmax(0).tolist()
        return dict(zip(self.numbers, known, strict=True))

    def target(self, truth: Hashable, frame: Frame) -> Tensor:
        self.last = truth
        return torch.tensor([[self.numbers.setdefault(truth, len(self.numbers))]])

    def none(self) -> Tensor:
        return torch.tensor([[IGNORED]])

    def pairs(self, truth: Hashable, answer: Answer) -> list[tuple[Any, Any]]:
        return [(truth, answer)]

    def naive(self, frame: Frame) -> Answer | None:
        return None if frame.last is None else {frame.last: 1.0}

    def error(self, truth: Hashable, answer: Answer) -> float:
        return float(likeliest(answer) != truth)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "classes": list(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]
        self.numbers = {name: number for number, name in enumerate(state["classes"])}


def likeliest(probabilities: dict[Hashable, float]) -> Any:
    """Return the class of the largest probability, None of no class."""
    return max(probabilities, key=probabilities.__getitem__) if probabilities else None


def as_tensor(x: NDArray[Any]) -> Tensor:
    """Return the inputs of a step (C,) as a batch (1, 1, C) in float32."""
    return torch.from_numpy(x.astype(np.float32)).view(1, 1, -1)
