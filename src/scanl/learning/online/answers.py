"""What is asked of a stream, numbers or a class: how a truth is read, and what outputs of the model say.

A kind of answers keeps what it must know of the past in its `truths`.
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
from scanl.learning.online.scaling import SPAN, Innovation, Scaling, Values

Truth = Any  # a number, a sequence of numbers, or the name of a class
Answer = Any  # a number, a list of numbers, or {class: probability}


class Frame(NamedTuple):
    """The state of the truths when an answer was made.

    base, scale: of numbers.   naive: the answer that repeats the last truth, None before any.
    """

    base: list[float]
    scale: list[float]
    naive: Answer


class NumberTruths:
    """The truths so far, numbers (width,). An answer is base + scale z, see `Innovation`."""

    def __init__(self, width: int, span: int) -> None:
        self.innovation, self.scaling = Innovation(width, span), Scaling(width, span)
        self.last: Values | None = None

    def as_input(self) -> Values:
        """Return the last truth as an input, NaN before any."""
        return np.full_like(self.scaling.mean, np.nan) if self.last is None else self.scaling.scaled(self.last)

    def frame(self) -> Frame:
        """Return the state before an answer."""
        naive = None if self.last is None else plain(self.last.tolist())
        return Frame(self.innovation.base(self.last).tolist(), self.innovation.scale.tolist(), naive)

    def target(self, truth: Values, frame: Frame) -> Tensor:
        """Read the truth of an answer, and return the target of the model, (1, 1, O)."""
        last = None if frame.naive is None else np.atleast_1d(frame.naive)
        z = self.innovation.update(truth, np.array(frame.base), last)
        self.scaling.update(truth)
        self.last = truth
        return as_tensor(z)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in numbers, text and lists of them."""
        last = None if self.last is None else self.last.tolist()
        return {"last": last, "innovation": self.innovation.state_dict(), "scaling": self.scaling.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.last = None if state["last"] is None else np.array(state["last"])
        self.innovation.load_state_dict(state["innovation"])
        self.scaling.load_state_dict(state["scaling"])


class ClassTruths:
    """The truths so far, classes, as `NumberTruths`. numbers: of the classes that have been seen, below `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.last = most, None
        self.numbers: dict[Hashable, int] = {}

    def as_input(self) -> Values:
        return np.full(self.most, np.nan) if self.last is None else np.eye(self.most)[self.numbers[self.last]]

    def frame(self) -> Frame:
        return Frame([], [], None if self.last is None else {self.last: 1.0})

    def target(self, truth: Hashable, frame: Frame) -> Tensor:
        self.last = truth
        return torch.tensor([[self.numbers.setdefault(truth, len(self.numbers))]])

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last, "classes": list(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]
        self.numbers = {name: number for number, name in enumerate(state["classes"])}


class Answering(ABC):
    """A kind of answers. Abstract.

    truths: those so far.   none: the target of a sample without a truth.
    width: number of inputs that the last truth makes; 0 if it is none.
    metrics: names of river's metrics, the first of which is also computed fading.
    columns: names of the `fields` of an answer in a table.
    """

    metrics: ClassVar[tuple[str, ...]]
    columns: list[str]
    truths: Any

    def __init__(self, truths: NumberTruths | ClassTruths, none: Tensor, width: int) -> None:
        self.truths, self.none, self.width = truths, none, width

    @abstractmethod
    def question(self, inputs: int) -> Question:
        """Return the question for a model with `inputs` inputs."""

    @abstractmethod
    def read(self, truth: Truth) -> Any:
        """Return a truth in its usual form. Raises DataError for one of another kind, or that is not finite."""

    @abstractmethod
    def answer(self, outputs: Tensor, frame: Frame) -> Answer:
        """Return the answer that outputs (1, 1, O) of a model stand for."""

    @abstractmethod
    def pairs(self, truth: Any, answer: Answer) -> list[tuple[Any, Any]]:
        """Return the pairs of a truth and an answer that a metric compares."""

    @abstractmethod
    def error(self, truth: Any, answer: Answer) -> float:
        """Return the error of an answer, by which the bank and drift detectors judge."""

    @abstractmethod
    def fields(self, answer: Answer) -> list[Any]:
        """Return an answer as fields of a table."""


class AnswerNumbers(Answering):
    """One number or several. count: O.   span: see `Scaling`.   feedback: whether the last truth is an input too."""

    metrics = ("MAE", "RMSE")

    def __init__(self, count: int = 1, span: int = SPAN, feedback: bool = True) -> None:
        super().__init__(NumberTruths(count, span), torch.full((1, 1, count), torch.nan), count if feedback else 0)
        self.count = count
        self.columns = ["prediction"] if count == 1 else [f"prediction {i}" for i in range(count)]

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

    def answer(self, outputs: Tensor, frame: Frame) -> Answer:
        z = outputs.flatten().tolist()
        return plain([base + scale * each for base, scale, each in zip(frame.base, frame.scale, z, strict=True)])

    def pairs(self, truth: Values, answer: Answer) -> list[tuple[float, float]]:
        return list(zip(truth.tolist(), self.fields(answer), strict=True))

    def error(self, truth: Values, answer: Answer) -> float:
        pairs = self.pairs(truth, answer)
        return sum(abs(target - number) for target, number in pairs) / len(pairs)

    def fields(self, answer: Answer) -> list[Any]:
        return [answer] if self.count == 1 else answer


class AnswerClass(Answering):
    """One of at most `most` classes. feedback: whether the last truth is an input too."""

    metrics = ("Accuracy", "MacroF1")

    def __init__(self, most: int = 10, feedback: bool = True) -> None:
        super().__init__(ClassTruths(most), torch.tensor([[IGNORED]]), most if feedback else 0)
        self.most, self.columns = most, ["prediction", "probability"]

    def question(self, inputs: int) -> Question:
        return Label(FeatureInputs(inputs, missing=True), self.most)

    def read(self, truth: Truth) -> Hashable:
        truth = truth.item() if isinstance(truth, np.generic) else truth
        if truth is None or (isinstance(truth, float) and math.isnan(truth)):
            raise DataError(f"the target is {truth}, expected a class")
        if truth not in self.truths.numbers and len(self.truths.numbers) == self.most:
            raise DataError(
                f"the target is {truth!r}, a class beyond the {self.most} of before; give a larger number of classes"
            )
        return truth

    def answer(self, outputs: Tensor, frame: Frame) -> Answer:
        # The probabilities of the classes that have been seen, in float64, so that they sum to 1.
        known = outputs.flatten()[: len(self.truths.numbers)].double().softmax(0).tolist()
        return dict(zip(self.truths.numbers, known, strict=True))

    def pairs(self, truth: Hashable, answer: Answer) -> list[tuple[Any, Any]]:
        return [(truth, answer)]

    def error(self, truth: Hashable, answer: Answer) -> float:
        return float(likeliest(answer) != truth)

    def fields(self, answer: Answer) -> list[Any]:
        best = likeliest(answer)
        return [best, answer.get(best)]


def plain(numbers: list[float]) -> float | list[float]:
    """Return a list of one number as that number."""
    return numbers[0] if len(numbers) == 1 else numbers


def likeliest(probabilities: dict[Hashable, float]) -> Any:
    """Return the class of the largest probability, None of no class."""
    return max(probabilities, key=probabilities.__getitem__) if probabilities else None


def as_tensor(x: NDArray[Any]) -> Tensor:
    """Return the inputs of a step (C,) as a batch (1, 1, C) in float32."""
    return torch.from_numpy(x.astype(np.float32)).view(1, 1, -1)
