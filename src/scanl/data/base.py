"""The protocol of a data source, and the registry of sources.

A new source is one new file. It defines a subclass of `Source`, which is a dataclass of its options, registers it by
name, and is imported in the `__init__` of its folder. `scanl train --data NAME` then trains on it.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.files import Files
from scanl.data.questions import Question
from scanl.errors import ConfigError, nearest
from scanl.options import check, options
from scanl.registry import Registry

IGNORED = -100  # the target where no answer is wanted; torch's cross entropy ignores it
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the quantiles by which forecasts are scored

T = TypeVar("T")


@dataclass(frozen=True)
class RepeatedIterable(Generic[T]):
    """An iterable that can be read several times. make: returns a new iterator."""

    make: Callable[[], Iterator[T]]

    def __iter__(self) -> Iterator[T]:
        return self.make()


@dataclass(frozen=True)
class Exam:
    """Examples that measure a trained model, and other methods' scores on the same examples.

    title: heading of the table.   examples: batches of rows.
    beside: known values of the metric to compare with, by the name of a method.
    digits: format of a score.
    rivals: the baselines' answers, by name: one array for each batch of `examples`, as the question's scores read a
    model's answers.
    question: the source's, with further scores and what they need of the examples; None for the source's own.
    """

    title: str
    examples: Iterable[Batch]
    beside: Mapping[str, float]
    digits: str
    rivals: Mapping[str, Iterable[NDArray[Any]]] = field(default_factory=dict)
    question: Question | None = None


class Signal(ABC):
    """Reader and writer of a signal's tokens as a file."""

    ending: ClassVar[str]  # of its files
    first: ClassVar[int]  # token that a model reads before the first one
    fixed: ClassVar[bool]  # whether every file has exactly `steps` tokens
    steps: int

    @abstractmethod
    def read(self, path: Path) -> NDArray[np.int64]:
        """Read the tokens (t,) of a file. Raises DataError for a file that is damaged or of another form."""

    @abstractmethod
    def write(self, tokens: Iterable[int], path: Path) -> None:
        """Write tokens to a file as they come. The file is written whole or not at all."""


class Entry:
    """The class behind a name of `--data`: it makes a source from the options of a run.

    id: short names by which maintainers find published data.   source: who has published the data or the question; ""
    for data of the user's own.   needs: the files that it reads, if they are of a published data set.   aliases: other
    names of the literature, by which the registry finds the class.
    """

    name: ClassVar[str] = ""  # set by `register`
    id: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs: ClassVar[Files | None] = None
    aliases: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the names of the source's options: the options of `scanl train` that it reads, and `data_options`."""
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
    checks the values by the annotations of the fields, and reads no file. Files are read when they are first needed, at
    the latest by `check`. `str(source)` describes a training batch; the text follows its number of sequences: "examples
    of copy length=100".

    question: what the model predicts.   metric: name of the score, one of `METRICS`.
    chance: score of guessing, None if unknown.   notes: lines on the data for whoever trains on them.
    """

    question: Question
    metric: str
    chance: float | None = None
    notes: Sequence[str] = ()
    is_own: ClassVar[bool] = False  # whether the data are the user's own, so that others of their form may be measured
    empty_parts: Sequence[int] = ()  # those of `splits` to which no series belongs, of a source of series
    class_names: Sequence[str] | None = None  # names of the classes of the user's own data
    is_forecast: bool = False
    is_text: ClassVar[bool] = False  # whether the data are texts of the user's own
    ask: str | None = None  # the question, where the data can be asked several

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "Source":
        shared = {name: options[name] for name in cls.option_names() if name in options}
        return cls(**shared, **own_options(cls, options))

    def __post_init__(self) -> None:
        check(self.name, options(type(self)), vars(self))

    def held_out_bytes(self) -> bytes:
        """Return the bytes that are held out of training. A text alone has some."""
        raise NotImplementedError

    @abstractmethod
    def check(self) -> None:
        """Read the files, if any. Raises DataError unless the data can be used for training."""

    @abstractmethod
    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        """Return the rows that process `rank` of `world` reads at a step.

        They are rows rank*size to (rank+1)*size of the batch of world*size rows that a single process would read.
        """

    @abstractmethod
    def unseen(self, step: int) -> Iterator[Batch]:
        """Yield batches that are never used for training, for the measurement after a step."""

    @abstractmethod
    def exam(self, *, sample: bool = False) -> Exam:
        """Return the exam of a trained model, on data that it has never seen.

        sample: only on as much of the data as is measured in little time, as `scanl train` does at the end.
        A subclass may take `count`, the number of examples; `scanl eval` then has the option.
        """

    def elsewhere(self, path: Path) -> "Source":
        """Return the source of other data of the same form, with the classes and scales of this one; if it `is_own`."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"sequences of {self.name}"

    @abstractmethod
    def digest(self) -> str:
        """Return a fingerprint of the training data. Two runs have the same one if they train on the same data."""


class SignalSource(ABC):
    """A source of signals. It also says how its tokens are read from a file and written to one."""

    @property
    @abstractmethod
    def signal(self) -> Signal:
        """How files are read and written."""


class PackedDocuments(ABC):
    """A source that packs documents into rows as it reads them, and holds few of them in memory.

    A batch is a function of the step all the same. A position only says where a row lies, so that no document before it
    is read again. It depends neither on the number of processes nor on the rows of one.
    """

    @abstractmethod
    def position(self, rows: int) -> Mapping[str, int]:
        """Return the position of a row, which is counted over all steps and processes."""

    @abstractmethod
    def resume(self, position: Mapping[str, int]) -> None:
        """Read on from a position when a batch behind it is needed."""


class PlayedSource(ABC):
    """A source whose answers are actions in a game."""

    @abstractmethod
    def play(self, model: Any) -> str | None:
        """Let the model of a run play, and return a line about its success; None where the game is not installed."""


def own_options(cls: type[Entry], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a run that only its source reads. Raises ConfigError for an unknown one."""
    names = [name for name in cls.option_names() if name not in options]
    for name in options["data_options"]:
        if not names:
            raise ConfigError(f"{cls.name} has no options of its own, expected no --data-options.{name}")
        if name not in names:
            raise nearest(f"option of {cls.name}", name, names)
    return options["data_options"]


def summary(source: type[Any]) -> str:
    """Return the first line of a source's docstring."""
    return inspect.cleandoc(source.__doc__ or "").splitlines()[0]


def check_shares(source: str, validation: float, test: float) -> None:
    """Raise ConfigError unless the validation and the test part leave something to train on."""
    if validation + test >= 1:
        raise ConfigError(f"{source}: validation + test is {validation + test:g}, expected below 1")


def padded(rows: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
    """Return rows that end early as one array (N, length, ...). After the end of a row, tokens are IGNORED and all
    channels are NaN. Integers become int64."""
    is_integer = np.issubdtype(rows[0].dtype, np.integer)
    shape = (len(rows), length, *rows[0].shape[1:])
    batch = np.full(shape, IGNORED, np.int64) if is_integer else np.full(shape, np.nan, np.float32)
    for place, row in zip(batch, rows, strict=True):
        place[: len(row)] = row[:length]
    return batch


def present(inputs: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask (N, T) that is True at the steps of rows which `padded` has made one array."""
    empty = np.isnan(inputs).all(-1) if np.issubdtype(inputs.dtype, np.floating) else inputs == IGNORED
    return ~np.asarray(empty)


sources: Registry[Entry] = Registry("source", listed="`scanl data`", use="scanl train --data {name}")
register = sources.add
