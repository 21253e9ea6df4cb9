"""What a run learns from: the protocol of a source, the questions that sources ask, and their registry.

A new source is one new file: a dataclass of its options below `Source`, registered by name and imported in the
`__init__` of its folder. `scanl train --task NAME` then trains on it.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from numpy.typing import NDArray
from torch import Tensor

from scanl.errors import CheckpointError, nearest
from scanl.registry import Registry

IGNORED = -100  # the target where nothing is asked; torch's cross entropy leaves it out


class Examples(NamedTuple):
    """inputs: (N, T) integer tokens, or (N, T, C) float32 features.   targets: what the question of a source says."""

    inputs: NDArray[Any]
    targets: NDArray[Any]


@dataclass(frozen=True)
class Question:
    """What a source asks of a model. The model, its loss and its answers follow from it.

    kind: what is asked, and what the targets are:
        "next token": the next token at every step; (N, T) integers, IGNORED after the end of a row.
        "label": a token of the vocabulary at some steps; (N, T) integers, IGNORED at the others.
        "class": one of `classes` for the whole sequence; (N,) integers.
        "number": a number for the whole sequence; (N,) float32.
    vocab_size: V, where the inputs are tokens; or
    channels: C, where they are features. One of the two.
    """

    kind: Literal["next token", "label", "class", "number"]
    vocab_size: int | None = None
    channels: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        assert (self.vocab_size is None) != (self.channels is None), "tokens or features, one of the two"
        assert (self.classes is None) == (self.kind != "class"), "classes are of the question for a class"

    @property
    def every_step(self) -> bool:
        """Whether the targets are by step; otherwise the answer is the one after the last step."""
        return self.kind in ("next token", "label")


@dataclass(frozen=True)
class Exam:
    """What a trained model is measured on, and what others score on the same.

    title: what is measured, on what.   examples: groups of rows that are read side by side.
    beside: the score of each other, by name.   digits: how a score is printed.
    """

    title: str
    examples: Iterable[Examples]
    beside: Mapping[str, float]
    digits: str


class Source(ABC):
    """Batches to learn from and examples to be measured on, each a pure function of the source and the step.

    A subclass is a dataclass. Its fields are its options: those that `scanl train` has an option for (`data`,
    `held_out`, `seed`, ...) get their values from there, the others are given as `--task-options.NAME`. Making one
    reads no file; files are read when they are first needed, at the latest by `check`.
    """

    name: ClassVar[str] = ""  # set by `register`
    metric: str  # what a measurement is: "accuracy", "bits per byte"
    higher_is_better: bool
    chance: float | None = None  # what guessing scores, where it is known
    best: float | None = None  # the best score there is, where it is known
    question: Question

    measured: ClassVar[str] = "score"  # the column of metrics.csv for the measurements
    comparable: ClassVar[str | None] = None  # the column of the same for the training batches, where there is one
    noun: ClassVar[str] = "data"  # what it is called in messages
    moved: ClassVar[str] = ""  # for the refusal of other data: what to do when it has moved
    stops: ClassVar[tuple[str, ...]] = ("until", "patience")  # what may end a run early
    instead: ClassVar[Mapping[str, str]] = {}  # what to do instead of an option that it does not read
    examined_by: ClassVar[tuple[str, ...]] = ()  # options of `scanl eval` that `exam` takes

    @classmethod
    def reads(cls) -> frozenset[str]:
        """The options of a configuration that mean something to it."""
        return frozenset((*inspect.signature(cls).parameters, *cls.stops, "task_options"))

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "Source":
        """The source of a configuration, whose options are given by name. ConfigError for one that does not fit."""
        parameters = list(inspect.signature(cls).parameters)
        own = [name for name in parameters if name not in options]
        for name in options["task_options"]:
            if name not in own:
                raise nearest(f"option of {cls.name}", name, own)
        return cls(**{name: options[name] for name in parameters if name in options}, **options["task_options"])

    @abstractmethod
    def check(self) -> None:
        """Read what there is to read; DataError unless it can be learnt from."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Steps of a training sequence."""

    @abstractmethod
    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Examples:
        """What one process of `world` reads in a step: its `size` rows of what one process would read alone."""

    @abstractmethod
    def digest(self) -> str:
        """A fingerprint of what is learnt from: the same for runs that learn from the same."""

    @abstractmethod
    def unseen(self, step: int) -> Iterator[Examples]:
        """Groups of rows that are never learnt from, for the measurement after a step."""

    @abstractmethod
    def exam_after_training(self) -> Exam:
        """What `scanl train` measures at the end of a run."""

    @abstractmethod
    def exam(self, digest: str | None, **given: Any) -> Exam:
        """What `scanl eval` measures.

        digest: of what the model has learnt from, None where that is not known.
        given: the options of `examined_by` that were given. CheckpointError when the data is no longer the model's.
        """

    def total(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """The sum of the scores of answers, and their number: right ones of classes, squared errors of numbers.

        outputs: (n, V) logits, or (n,) numbers.   targets: (n,).
        """
        if self.question.kind == "number":
            return float((outputs.double() - targets).square().sum()), len(targets)
        asked = targets != IGNORED
        return float((outputs.argmax(-1) == targets)[asked].sum()), int(asked.sum())

    def beside(self, loss: float) -> dict[str, float]:
        """What a row of metrics.csv holds beside the loss, by column."""
        return {}

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of metrics.csv."""
        return ("step", "loss", *self.beside(0.0), "tokens_per_second", "lr", self.measured)

    def describe(self) -> str:
        """What a run of so many sequences a step reads, after their number: "examples of copy length=100"."""
        return f"sequences of {self.length} steps of {self.name}"

    def line(self, row: Mapping[str, Any], measured: float | None) -> str:
        """A row of the metrics and the last measurement, for the progress line."""
        guessed = "" if self.chance is None else f" (chance {self.chance:.4g})"
        return f"loss {row['loss']:.4g}" + ("" if measured is None else f"  score {measured:.4g}{guessed}")

    def better(self, one: float, than: float) -> bool:
        """Whether one measurement is better than another."""
        return one > than if self.higher_is_better else one < than

    def reachable(self) -> tuple[float, float]:
        """The lowest and the highest score that there can be. No score is below 0."""
        if self.higher_is_better:
            return 0.0, math.inf if self.best is None else self.best
        return 0.0 if self.best is None else self.best, math.inf

    def refuse_other(self, digest: str) -> None:
        """CheckpointError unless a run with this digest learnt from the same."""
        if digest != self.digest():
            raise CheckpointError(
                f"train: the {self.noun} has changed since the checkpoint; put back the {self.noun} to resume"
                f"{self.moved}"
            )


class Opener(Protocol):
    """What is registered: a class of sources, or one that makes sources as a task does."""

    name: ClassVar[str]
    instead: ClassVar[Mapping[str, str]]

    @classmethod
    def reads(cls) -> frozenset[str]: ...

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> Source: ...


sources: Registry[Opener] = Registry("task")
register = sources.add
