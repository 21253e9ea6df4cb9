"""The protocol of a data source, the questions that sources ask, and the registry of sources.

A new source is one new file. It defines a subclass of `Source`, which is a dataclass of its options, registers it by
name, and is imported in the `__init__` of its folder. `scanl train --data NAME` then trains on it.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scanl.data.files import Files
from scanl.errors import ConfigError, nearest
from scanl.registry import Registry

IGNORED = -100  # the target where no answer is wanted; torch's cross entropy ignores it
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the quantiles by which forecasts are scored


class Examples(NamedTuple):
    """A batch of examples.

    inputs: (N, T) integer tokens, or (N, T, C) features, in float32 if the source has standardised them, and in float64
    if the model does that (`Question.scales`).   targets: as `Question.kind` says; numbers likewise.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]


@dataclass(frozen=True)
class Question:
    """What a source asks a model to predict. It determines the kind of model, the loss and the shape of the answers.

    kind: what to predict, and the form of the targets:
        "next token": the next token at every step; (N, T) integers, IGNORED after the end of a row.
        "label": a token of the vocabulary, or for features one of `classes`, at some steps; (N, T) integers, IGNORED
            at the others.
        "class": one of `classes` for the whole sequence; (N,) integers.
        "number": a number for the whole sequence; (N,).
        "numbers": `targets` numbers at every step; (N, T, targets) float32, NaN where no answer is wanted.
        "horizon": the numbers of the next `horizon` steps, at every step; (N, T, H, targets), NaN where no
            answer is wanted. A measurement scores the forecast after the last step alone: (N, 2, H, targets), the scale
            of the errors and the numbers.
    vocab_size: V, if the inputs are tokens.
    channels: C, if the inputs are features. Exactly one of vocab_size and channels is given.
    timed: the last channel is also the duration of the step, for layers that take `timespans`.
    scales: for each channel a location and a scale above 0, by which the model standardises it; none if the source has
        standardised it already. A source measures them on its training part alone.
    answer_scale: the location and the scale of a number; none for 0 and 1.
    missing: whether the features have NaN, which means that a number is missing.
    padded: whether a row may end early. After its end, tokens are IGNORED and all channels are NaN.
    horizon: H, of a forecast.
    targets: for a forecast, how many channels are forecast: they are the first ones, and covariates of the past follow.
        For "numbers", how many numbers are asked for at a step.
    static: how many of the channels that follow are constant over a sequence.
    future: F, number of covariates that are known ahead of time. They are the last F * H channels, before the duration
        if there is one: at each step the values of the next H steps, one step after another. They have F scales.
    season: steps of a season. By default a forecast has a linear map of this many last values.
    distribution: name of the distribution of a forecast or a number: "points", "quantiles", "gaussian", "student_t" or
        "negative_binomial". For numbers at every step: "points", or "bernoulli" for answers of 1 and 0, of which the
        model gives the logits.
    """

    kind: Literal["next token", "label", "class", "number", "numbers", "horizon"]
    vocab_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    timed: bool = False
    scales: tuple[tuple[float, float], ...] | None = None
    answer_scale: tuple[float, float] | None = None
    missing: bool = False
    padded: bool = False
    horizon: int | None = None
    targets: int = 1
    static: int = 0
    future: int = 0
    season: int = 1
    distribution: str = "points"

    def __post_init__(self) -> None:
        assert (self.vocab_size is None) != (self.channels is None), "tokens or features, one of the two"
        classed = self.kind == "class" or (self.kind == "label" and self.channels is not None)
        assert (self.classes is not None) == classed, "classes are of the questions for a class, or a label of features"
        assert not (self.missing and self.padded), "NaN says one thing"
        assert (self.horizon is not None) == (self.kind == "horizon"), "a horizon is of the question for one"

    @property
    def every_step(self) -> bool:
        """Whether there is a target for each step. Otherwise the only answer is the one after the last step."""
        return self.kind in ("next token", "label", "numbers")


@dataclass(frozen=True)
class Exam:
    """Examples on which a trained model is measured, with scores of others on the same examples.

    title: heading of the table.   examples: batches of rows.
    beside: scores to compare with, by the name of a method: either the metric alone, or each score of `Source.scores`
    by its name.
    digits: format of a score.
    """

    title: str
    examples: Iterable[Examples]
    beside: Mapping[str, float | Mapping[str, float]]
    digits: str


class Signal(ABC):
    """How the tokens of a signal are read from a file, and written as one."""

    ending: ClassVar[str]  # of its files
    first: ClassVar[int]  # token that a model reads before the first one
    fixed: ClassVar[bool]  # whether a whole one has `steps` tokens exactly, or about so many
    steps: int

    @abstractmethod
    def read(self, path: Path) -> NDArray[np.int64]:
        """Read the tokens (t,) of a file. Raises DataError for a file that is damaged or of another form."""

    @abstractmethod
    def write(self, tokens: Iterable[int], path: Path) -> None:
        """Write tokens to a file as they come. The file is written whole or not at all."""


class Entry:
    """What a name of `--data` stands for: a class that makes a source from the options of a run.

    id: short names by which maintainers find published data.   needs: the files that it reads, if they are of a
    published data set.   aliases: other names of the literature, by which the registry finds the class.
    """

    name: ClassVar[str] = ""  # set by `register`
    id: ClassVar[str] = ""
    needs: ClassVar[Files | None] = None
    aliases: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the names of the source's options: those of `scanl train` that it uses, and its own."""
        return tuple(inspect.signature(cls).parameters)

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "Source":
        """Make the source from the options of a run by name. Raises ConfigError for an unknown option.

        The options of the source alone are in `data_options`.
        """
        raise NotImplementedError


class Source(Entry, ABC):
    """Training batches and examples for measurements, each a pure function of the source and the step.

    A subclass is a dataclass whose fields are its options. A field with the name of an option of `scanl train` (`data`,
    `held_out`, `seed`, ...) takes that option's value; the others are set with `--data-options.NAME`. The constructor
    reads no file. Files are read when they are first needed, at the latest by `check`. `str(source)` describes a
    training batch; the text follows its number of sequences: "examples of copy length=100".

    question: what the model predicts.   metric: name of the score, one of `METRICS`.
    chance: score of guessing, None if unknown.
    """

    question: Question
    metric: str
    chance: float | None = None

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "Source":
        shared = {name: options[name] for name in cls.option_names() if name in options}
        return cls(**shared, **own_options(cls, options))

    @abstractmethod
    def check(self) -> None:
        """Read the files, if any. Raises DataError unless the data can be used for training."""

    @abstractmethod
    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Examples:
        """Return the rows that process `rank` of `world` reads at a step.

        They are rows rank*size to (rank+1)*size of the batch of world*size rows that a single process would read.
        """

    @abstractmethod
    def unseen(self, step: int) -> Iterator[Examples]:
        """Yield batches that are never used for training, for the measurement after a step."""

    @abstractmethod
    def exam(self, *, sample: bool = False) -> Exam:
        """Return the exam of a trained model, on data that it has never seen.

        sample: only on as much of the data as is measured in little time, as `scanl train` does at the end.
        A subclass may take `count`, the number of examples; `scanl eval` then has the option.
        """

    def __str__(self) -> str:
        return f"sequences of {self.name}"

    @abstractmethod
    def digest(self) -> str:
        """Return a fingerprint of the training data. Two runs have the same one if they train on the same data."""

    def total(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """Return the sum of the scores, and how many answers were scored.

        The score is 1 for a right class, 0 for a wrong one, and the squared error for a number.
        outputs: (n, V) logits, (n,) numbers, or for a forecast the quantiles (n, H, targets, Q) at `LEVELS`.
        targets: (n,), or for a forecast as `Question.kind` says.
        """
        if self.question.kind in ("number", "numbers"):
            return float((outputs.double() - targets).square().sum()), targets.numel()
        asked = targets != IGNORED
        return float((outputs.argmax(-1) == targets)[asked].sum()), int(asked.sum())

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        """Return for every score, by name, its sum and how many answers were scored. The first score is `metric`.

        An exam prints the means of all of them. A source with more scores than one overrides this method.
        """
        return {self.metric: self.total(outputs, targets)}


class SignalSource(ABC):
    """What a source of signals has besides: how its tokens are read from a file and written as one."""

    @property
    @abstractmethod
    def signal(self) -> Signal:
        """How files are read and written."""


def own_options(cls: type[Entry], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a run that its source alone has. Raises ConfigError for one that the source has not."""
    own = [name for name in cls.option_names() if name not in options]
    for name in options["data_options"]:
        if not own:
            raise ConfigError(f"{cls.name} has no options of its own, expected no --data-options.{name}")
        if name not in own:
            raise nearest(f"option of {cls.name}", name, own)
    return options["data_options"]


def summary(source: type[Any]) -> str:
    """Return the first line of a source's docstring."""
    return inspect.cleandoc(source.__doc__ or "").splitlines()[0]


def check_types(source: str, options: Any, names: Iterable[str]) -> None:
    """Raise ConfigError for an option of a dataclass whose value is not of the type of its field."""
    hints = get_type_hints(type(options))
    for name in names:
        value, kind = getattr(options, name), hints[name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"{source}: {name} is {value!r}, expected {kind.__name__}")


def check_positive(source: str, options: Any, names: Iterable[str]) -> None:
    """Raise ConfigError for an option of a source that is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise ConfigError(f"{source}: {name} is {getattr(options, name)}, expected at least 1")


def check_shares(source: str, validation: float, test: float) -> None:
    """Raise ConfigError unless the shares of the validation and the test part leave something to train on."""
    for name, share in (("validation", validation), ("test", test)):
        if not 0 < share < 1:
            raise ConfigError(f"{source}: {name} is {share}, expected between 0 and 1")
    if validation + test >= 1:
        raise ConfigError(f"{source}: validation + test is {validation + test:g}, expected below 1")


def padded(rows: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    """Make a batch (N, length, ...) of rows that end early, as `Question.padded` says: integers become int64."""
    whole = np.issubdtype(rows[0].dtype, np.integer)
    shape = (len(rows), length, *rows[0].shape[1:])
    batch = np.full(shape, IGNORED, np.int64) if whole else np.full(shape, np.nan, np.float32)
    for place, row in zip(batch, rows, strict=True):
        place[: len(row)] = row[:length]
    return batch


sources: Registry[Entry] = Registry("source")
register = sources.add
