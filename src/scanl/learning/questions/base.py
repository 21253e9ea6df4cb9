"""What learning does for a question, and the registry of questions by their classes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from scanl import models
from scanl.data.base import Exam, Source
from scanl.data.batch import Batch
from scanl.data.questions import Inputs, Question, Scales, Vocabulary
from scanl.errors import ConfigError
from scanl.layers import auxiliary
from scanl.layers.base import widen
from scanl.layers.state import State
from scanl.learning.losses import losses
from scanl.learning.scores import scores
from scanl.learning.series.readouts import Readout
from scanl.models import Backbone

Model: TypeAlias = Any  # the model of a question: a `Saved` with a `stack` and `init_state`

Q = TypeVar("Q", bound=Question)


class Answers(NamedTuple):
    """Outputs of a model where there is a target, the targets there, and the state after the batch."""

    outputs: Tensor
    targets: Any
    state: State


@dataclass
class NoOptions:
    """The options of a model that has none besides those of its stack.

    Another class of options says in `unless` why the models of other questions have none of them.
    """

    unless: ClassVar[str] = ""


@dataclass
class FilterOptions:
    """Options of a model with one answer to a whole series."""

    topic: ClassVar[str] = "model"  # of the help
    unless: ClassVar[str] = "the answer is no class and no number of a whole series"

    filters: Annotated[
        dict[str, Any],
        "to classify or regress: random filters beside the stack, by the options of `RandomFilters`; none: as chosen",
    ] = field(default_factory=dict)


class Answerer(ABC, Generic[Q]):
    """The model, answers, loss, scores and baselines of a question.

    A subclass is one file of this folder and is registered with `@answers(CLASS)`. It defines `head` and `answers`.
    """

    every_step: ClassVar[bool] = False  # whether each step has its own target, or the last step alone an answer
    divisible: ClassVar[bool] = False  # whether processes may share a sequence
    in_parts: ClassVar[bool] = True  # whether a sequence may be learnt in parts
    options: ClassVar[type[Any]] = NoOptions  # of its model, besides the stack's options

    def __init__(self, question: Q) -> None:
        self.question: Any = question

    def model(self, stack: Backbone, options: Mapping[str, Any] = MappingProxyType({})) -> Model:
        """Make the model that answers the question, over a stack.

        options: of the model, by name; those that are lacking have their defaults. Raises ConfigError for an option of
        another question's model, unless it has its default.
        """
        own = vars(self.options())
        for others in {cls.options: None for cls in registry.values()}:
            for name, default in vars(others()).items():
                if name not in own and options.get(name, default) != default:
                    flag = name.replace("_", "-")
                    raise ConfigError(f"train: {name} is {options[name]}, but {others.unless}; leave out --{flag}")
        return self.head(stack, {name: options.get(name, default) for name, default in own.items()})

    @abstractmethod
    def head(self, stack: Backbone, options: Mapping[str, Any]) -> Model:
        """Make the model. options: its own."""

    @abstractmethod
    def answers(self, model: Model, batch: Batch, state: State = None) -> Answers:
        """Run the model on a batch. The form of outputs and targets is what the losses and the scores read."""

    def loss(self, model: Model, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        """Return the mean loss over the answers and the state; without an answer in the batch the loss is 0."""
        outputs, targets, state = self.answers(model, batch, state)
        parts, count = losses.get(self.question.loss)(widen(outputs), targets), targets.new_tensor(targets.numel())
        if batch.weights is not None:
            parts, count = parts * batch.weights.to(parts), (batch.weights > 0).sum()
        return mean(parts, count), state

    def objective(self, model: Model, batch: Batch, state: State = None) -> tuple[Tensor, State]:
        """Return the objective of training, which is `loss` with the losses of the model's layers, and the state.

        `scanl.layers.auxiliary` says what they are.
        """
        with auxiliary.collect() as losses:
            loss, state = self.loss(model, batch, state)
        return loss + losses.total(), state

    def scores(self, outputs: Tensor, targets: Any) -> dict[str, tuple[Any, int]]:
        """Return for each score, by name, its sum and how many answers were scored. The first is the source's metric.

        outputs, targets: as in `Answers`.
        """
        return {name: scores.get(name)(self.question, outputs, targets) for name in self.question.scores}

    def readout(self) -> Readout | None:
        """Return what random filters are fitted to, in closed form; None if they do not answer the question."""
        return None

    def rest(self, model: Model, targets: Tensor, beside: Tensor) -> None:
        """Set the head of a model so that its stack adds nothing to the answers (n, O) of its filters."""
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.zero_()

    def predicted(self, model: Model, batch: Batch, outputs: Tensor, levels: Tensor) -> Tensor:
        """Return the answers (n, A) of a user's data: the probabilities of the classes, or a number and its quantiles.

        outputs: of the model, at each step.   levels: of the quantiles.
        """
        return outputs.double().softmax(-1)

    def selected(self, targets: Any) -> Any:
        """Return the targets of a batch that are present, in the form of `Answers`."""
        return targets

    def show(self, model: Model, source: Source, folder: Path, seed: int) -> None:
        """Write into the folder of a run what shows the answers of the trained model; by default nothing."""

    def baselines(self, exam: Exam) -> dict[str, dict[str, float]]:
        """Return the baselines' mean scores in an exam, by method and score."""
        baselines = {}
        for name, rival in exam.rivals.items():
            pairs = zip(rival, exam.examples, strict=True)
            baselines[name] = means(
                self.scores(torch.as_tensor(outputs), self.selected(batch.tensors().targets))
                for outputs, batch in pairs
            )
        return baselines


registry: dict[type[Question], type[Answerer[Any]]] = {}
AnswererClass = TypeVar("AnswererClass", bound=type[Answerer[Any]])


def answers(question: type[Question]) -> Callable[[AnswererClass], AnswererClass]:
    """Decorator: register what learning does for a class of questions."""

    def add(cls: AnswererClass) -> AnswererClass:
        if question in registry:
            names = f"{registry[question].__name__} and {cls.__name__}"
            raise ConfigError(f"question {question.__name__} is registered twice: {names}")
        registry[question] = cls
        return cls

    return add


def answerer(question: Question) -> Answerer[Any]:
    """Return the answerer of a question. Raises ConfigError for a class that is not registered."""
    if type(question) not in registry:
        known = ", ".join(sorted(cls.__name__ for cls in registry))
        raise ConfigError(f"unknown question {type(question).__name__!r}, expected one of {known}")
    return registry[type(question)](question)


_COUNTS: ContextVar[list[Tensor] | None] = ContextVar("scanl.counts", default=None)


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """Record the number of losses of each `mean` in the context, in its list."""
    counts: list[Tensor] = []
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def answered(
    loss: Callable[[Model, Batch, State], tuple[Tensor, State]], model: Model, batch: Batch, state: State
) -> tuple[Tensor, Tensor, State]:
    """Return the mean loss of a batch, the number of answers in that mean, and the state.

    A loss that does not take its mean by `mean` is taken to be over all steps, or over the rows of a batch that has one
    answer a row.
    """
    outer = _COUNTS.get()
    with counted() as counts:
        value, state = loss(model, batch, state)
    if outer is not None:
        outer.extend(counts)
    if not counts:
        rows = batch.size if batch.weights is None else int((batch.weights > 0).sum())
        counts = [value.new_tensor(batch.size * batch.length if batch.answered_each_step else rows)]
    return value, torch.stack([count.to(value) for count in counts]).sum(), state


def mean(losses: Tensor, count: Tensor) -> Tensor:
    """Return the sum of losses over their number, or 0 for none."""
    counts = None if torch.compiler.is_compiling() else _COUNTS.get()
    if counts is not None:
        counts.append(count)
    return losses.sum() / count.clamp(min=1)


def means(parts: Iterable[Mapping[str, tuple[Any, int]]]) -> dict[str, float]:
    """Return each score, by name, from the sums and counts of several batches: the mean, or what a `Total` makes."""
    totals: dict[str, tuple[Any, int]] = {}
    for batch_scores in parts:
        for name, (more, scored) in batch_scores.items():
            total, count = totals.get(name, (None, 0))
            totals[name] = more if total is None else total + more, count + scored
    return {name: total / count for name, (total, count) in totals.items()}


def form(inputs: Inputs) -> models.Tokens | models.Features:
    """Return the part of a model that reads inputs."""
    if isinstance(inputs, Vocabulary):
        return models.Tokens(inputs.size)
    return models.Features(inputs.count, listed(inputs.scales), inputs.missing)


def filters_of(options: Mapping[str, Any], outputs: int, inputs: Inputs) -> models.RandomFilters | None:
    """Return the random filters of a model with so many outputs, as its options say."""
    read = form(inputs)
    if not options["filters"]:
        return None
    if not isinstance(read, models.Features):
        raise ConfigError(f"train: filters is {options['filters']}, expected none because the data are tokens")
    return models.RandomFilters(outputs, read, **options["filters"])


def listed(scales: Scales | None) -> list[list[float]] | None:
    """Return scales in the form of a file."""
    return None if scales is None else [list(pair) for pair in scales]


def durations(model: Model, batch: Batch) -> Tensor | None:
    """Return the durations of the steps for layers that take them, if all do."""
    return batch.timespans if model.stack.timed else None
