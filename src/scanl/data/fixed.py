"""Sources whose examples are fixed rows in files, in three parts: for training, validation and test."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import Exam, RepeatedIterable, Source, padded, present
from scanl.data.batch import Batch
from scanl.data.files import Files
from scanl.data.order import shuffled
from scanl.errors import DataError

MOST_STEPS = 2**20  # measured at the end of training, at most; `scanl eval` reads all
MEASURED_STEPS = 2**16  # steps in a batch of a measurement, about
MEASURED_NUMBERS = 2**25  # numbers of its inputs, at most


@dataclass(frozen=True)
class FromFiles(Sequence[NDArray[Any]]):
    """Rows in files. A row is read each time it is indexed.

    reader: makes a row (t, ...) of a file. Raises DataError for a damaged one.
    where: for rows that are parts of files, the arguments of `reader` behind the path.
    """

    paths: Sequence[Path]
    reader: Callable[..., NDArray[Any]]
    where: Sequence[tuple[Any, ...]] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: Any) -> Any:
        return self.reader(self.paths[place], *(self.where[place] if self.where else ()))

    def some(self, places: Iterable[int]) -> "FromFiles":
        """Return some of the rows, without reading them."""
        chosen = list(places)
        where = [self.where[place] for place in chosen] if self.where else ()
        return FromFiles([self.paths[place] for place in chosen], self.reader, where)


class FixedPart(NamedTuple):
    """Rows and their answers. rows: an array (N, T, ...), or a sequence of arrays (t, ...).   answers: (N, ...)."""

    rows: Sequence[NDArray[Any]] | NDArray[Any]
    answers: NDArray[Any]

    def take(self, places: Sequence[int] | NDArray[np.int64]) -> "FixedPart":
        """Return some of the rows, in the order of `places`."""
        if isinstance(self.rows, np.ndarray):
            return FixedPart(self.rows[np.asarray(places, np.int64)], self.answers[np.asarray(places, np.int64)])
        return FixedPart([self.rows[place] for place in places], self.answers[np.asarray(places, np.int64)])


class Parts(NamedTuple):
    """The parts of a data set. Models never train on the last two."""

    train: FixedPart
    validation: FixedPart
    test: FixedPart


@dataclass
class FixedRows(Source):
    """Fixed rows: every epoch reads each row of the training part once, in an order of its own.

    A subclass defines `needs`, `question`, `metric`, `steps`, `read`, and `form` where a batch is not just its rows.
    While training runs, `eval_examples` rows of the validation part are measured. At the end a sample of the test part
    is measured, and `scanl eval` measures all of it.

    Args:
        seed: seed of the order.
        eval_examples: number of rows in a measurement during training.
        folder: where the files lie; none: in the folder of the data set.
    """

    metric = "accuracy"

    steps: ClassVar[int] = 0  # of a row, where all rows have the same number, whatever the options are
    uneven: ClassVar[bool] = False  # whether a row may end before `length` steps
    timed: ClassVar[bool] = False  # whether the last channel of the inputs is also the duration of the step
    question: ClassVar[Any]  # about tokens or features

    seed: int
    eval_examples: int = 512
    folder: str = ""

    @property
    def length(self) -> int:
        return self.steps

    @property
    def files(self) -> Files:
        """The files of the data set."""
        assert self.needs is not None
        return self.needs

    @abstractmethod
    def read(self) -> Parts:
        """Read the files. Raises DataError for a file that is missing or damaged."""

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Make the inputs of a batch from its rows."""
        return padded(rows, self.length)

    def answers(self, split: FixedPart) -> NDArray[Any]:
        """Make the targets of a batch from its part."""
        return split.answers

    @cached_property
    def parts(self) -> Parts:
        """The rows; read on first use."""
        return self.read()

    def check(self) -> None:
        for name, split in zip(Parts._fields, self.parts, strict=True):
            if len(split.answers) == 0:
                raise DataError(f"{self.name}: the {name} part has no row, expected at least one; give more rows")
            _ = split.rows[0]

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        train = self.parts.train
        _, places = shuffled(self.seed, 1, len(train.answers), step, size, rank, world)
        return self._examples(train.take(places))

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        """The digest of all numbers; for rows in files, of the names and sizes, because reading all takes minutes."""
        if all(isinstance(split.rows, FromFiles) for split in self.parts):
            digest = hashlib.sha256(self.name.encode())
            for split in self.parts:
                assert isinstance(split.rows, FromFiles)
                for path in split.rows.paths:
                    digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
            return digest.hexdigest()
        digest = hashlib.sha256(f"{self.name} {len(self.parts.train.answers)}".encode())
        for split in self.parts:
            for row in [split.rows] if isinstance(split.rows, np.ndarray) else split.rows:
                digest.update(np.ascontiguousarray(row).data)
            digest.update(np.ascontiguousarray(split.answers).data)
        return digest.hexdigest()

    def unseen(self, step: int) -> Iterator[Batch]:
        return self._batches(spread(self.parts.validation, self.eval_examples))

    def exam(self, *, sample: bool = False, count: int | None = None) -> Exam:
        """Return an exam on the test part. count: number of rows, spread over the part; None for all."""
        test = self.parts.test
        if sample:
            count = max(self.eval_examples, MOST_STEPS // self.length)
        rows = test if count is None else spread(test, count)
        of = "" if len(rows.answers) == len(test.answers) else f", a sample of {len(test.answers):,}"
        beside = {} if self.chance is None else {"chance": self.chance}
        title = f"{self.metric} on {len(rows.answers):,} test rows of {self.name}{of}:"
        return Exam(title, RepeatedIterable(lambda: self._batches(rows)), beside, ".4g")

    def _batches(self, split: FixedPart) -> Iterator[Batch]:
        numbers = self.length * (self.question.inputs.width)
        at_once = max(1, min(256, MEASURED_STEPS // self.length, MEASURED_NUMBERS // numbers))
        for start in range(0, len(split.answers), at_once):
            yield self._examples(split.take(range(start, min(start + at_once, len(split.answers)))))

    def _examples(self, split: FixedPart) -> Batch:
        inputs = self.form(list(split.rows))
        mask, timespans = present(inputs) if self.uneven else None, inputs[..., -1] if self.timed else None
        return Batch(inputs, self.answers(split), mask, timespans)

    def __str__(self) -> str:
        train, validation, test = (len(split.answers) for split in self.parts)
        return f"rows of {self.name}; {train:,} to train on, {validation:,} to validate, {test:,} to test"


def chosen(split: FixedPart, places: NDArray[np.int64]) -> FixedPart:
    """Return some of the rows, without reading rows in files; `FixedPart.take` reads them."""
    if isinstance(split.rows, FromFiles):
        return FixedPart(split.rows.some(places), split.answers[places])
    return split.take(places)


def spread(split: FixedPart, count: int) -> FixedPart:
    """Return at most `count` rows at equal distances over a part."""
    total = len(split.answers)
    return split if total <= count else chosen(split, np.arange(count) * total // count)


def set_aside(split: FixedPart, count: int, seed: int = 42) -> tuple[FixedPart, FixedPart]:
    """Split a training part: return it without `count` random rows, and these."""
    order = np.random.default_rng(seed).permutation(len(split.answers))
    return chosen(split, np.sort(order[count:])), chosen(split, np.sort(order[:count]))
