"""How series become the batches of a question: what the questions of a table have in common.

Each question of a table is a file: `series_forecast`, `series_label`, `series_whole`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.questions import Question
from scanl.data.series.rows import Rows
from scanl.data.series.series import Collection
from scanl.data.splits import PARTS, TRAINING
from scanl.errors import ConfigError, DataError

ROWS = 64  # of a batch of a measurement


class SeriesQuestion(ABC):
    """A question about series, and the batches in which it is asked.

    source: has the series (`collection`), their `parts`, and options, as `Table` has them. They are read when a method
    is first called.
    """

    ask: ClassVar[str]  # what the user wants: "forecast"
    metric: ClassVar[str]
    classes: ClassVar[bool] = False  # whether the target is one of a few classes
    per_series: ClassVar[bool] = False  # whether a series has one answer
    counted: ClassVar[bool] = False  # whether the answers may be counts, by their distribution
    noun: ClassVar[str] = "series"  # what is counted in the title of an exam
    first: ClassVar[int] = 0  # first step of a series that may have an answer
    ahead: ClassVar[int] = 0  # steps behind a window of training, at least; 0 if nothing is forecast
    unit: ClassVar[str] = ""  # of the scores, in the title of an exam

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    @abstractmethod
    def question(self) -> Question:
        """The question, with scales from the training split."""

    @abstractmethod
    def batch(self, draw: np.random.Generator, count: int, share: slice) -> Batch:
        """Return some rows of a training batch of `count` rows, which is drawn."""

    @abstractmethod
    def examples(self, split: int) -> Iterator[Batch]:
        """Yield the batches that measure a model on a split."""

    @abstractmethod
    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        """Return the answers of methods that do not learn, as in `Exam`."""

    @abstractmethod
    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        """Return the known answers of a piece of series i."""

    def check_options(self) -> None:
        """Raise ConfigError for options of the source that do not fit the question."""
        origins = self.source.origins
        if origins is not None and (origins < 1 or not self.ahead):
            expected = "at least 1" if self.ahead else "none because nothing is forecast"
            raise ConfigError(f"table: origins is {origins}, expected {expected}")

    def check_answers(self, collection: Collection, target: str) -> None:
        """Raise DataError unless the answers of series fit the question and the distribution. target: their column."""
        path, counts = self.source.path, self.counted and self.source.distribution == "negative_binomial"
        for member in collection.series:
            of = f" of series {member.name!r}" if member.name else ""
            if self.per_series and len(np.unique(member.target, axis=0)) > 1:
                raise DataError(
                    f"table: {path}: the target {target!r}{of} changes, expected one answer for a series; "
                    "to answer at each step: --question label"
                )
            odd = (
                member.target[(member.target < 0) | (member.target % 1 != 0) & ~np.isnan(member.target)]
                if counts
                else np.empty(0)
            )
            if len(odd):
                raise DataError(
                    f"table: {path}: the target{of} is {odd[0]:g}, expected counts 0, 1, 2, ... because the "
                    "distribution is negative_binomial"
                )
        if self.classes and len(collection.classes) < 2:
            raise DataError(f"table: {path}: the target has the classes {collection.classes}, expected two or more")
        if not self.ahead and not collection.series[0].past.shape[1]:
            raise DataError(
                f"table: {path} has no column to read, expected one or more besides the target; name columns: --past "
                "COLUMN ..."
            )

    def by_series(self) -> bool:
        """Whether series are dealt out whole when the user does not say how to split."""
        return False

    def groups(self) -> list[int] | None:
        """Return a group for each series, if each group is dealt out by itself."""
        return None

    def check(self) -> None:
        """Raise DataError for a part in which there is nothing to learn or to measure."""
        for split, name in enumerate(PARTS):
            if not any(end > begin for _, begin, end in self.source.parts[split]):
                longest = max(map(len, self.source.collection.series))
                raise DataError(
                    f"table: {self.source.path}: the {name} part has no row because the longest series has {longest} "
                    "steps; give a longer table, or other --validation and --test"
                )
            if not any(len(self.known(i, max(begin, self.first), end)) for i, begin, end in self.source.parts[split]):
                raise DataError(
                    f"table: {self.source.path}: the target has no value in the {name} part; split otherwise, or leave "
                    "out the rows without one"
                )

    def describe(self) -> str:
        """Return a description of the answers for the user, behind a comma."""
        return ""

    @property
    def length(self) -> int:
        """Steps that a window of training has."""
        longest = max(end - begin for _, begin, end in self.source.parts[TRAINING])
        return min(self.source.sequence_length, longest - self.ahead)

    @cached_property
    def flat(self) -> Rows:
        return Rows(self.source.collection.series, self.length)

    @property
    def training(self) -> NDArray[np.int64]:
        """The rows of the training part."""
        pieces = self.source.parts[TRAINING]
        return np.concatenate([self.flat.starts[i] + np.arange(begin, end) for i, begin, end in pieces])

    @cached_property
    def _windows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where windows of training may begin: the first row of each piece, and the running number of starts."""
        pieces = self.source.parts[TRAINING]
        first = np.array([self.flat.starts[i] + begin for i, begin, _ in pieces])
        counts = [max(1, end - begin - self.length + 1 - self.ahead) for _, begin, end in pieces]
        return first, np.cumsum(counts)

    def windows(
        self, draw: np.random.Generator, count: int, share: slice
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw windows of training: return the rows (n, T) of some of them, and the first row after each one's part."""
        first, counts = self._windows
        drawn = draw.integers(0, counts[-1], count)[share]
        piece = np.searchsorted(counts, drawn, side="right")
        starts = first[piece] + drawn - np.where(piece, counts[piece - 1], 0)
        ends = np.array([self.flat.starts[i] + end for i, _, end in self.source.parts[TRAINING]])[piece]
        return starts[:, None] + np.arange(self.length), ends


def in_batches(pieces: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield a list in parts of at most `ROWS`."""
    yield from (pieces[begin : begin + ROWS] for begin in range(0, len(pieces), ROWS))
