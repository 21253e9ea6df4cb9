"""Windows of series, and how they become the batches of a question: what the questions of a table have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.questions import Question
from scanl.data.series.rows import SeriesRows
from scanl.data.series.series import Collection, Series
from scanl.data.splits import PARTS, TRAINING, Piece
from scanl.errors import DataError


@dataclass(frozen=True)
class SeriesWindows:
    """The windows of series that a model reads.

    parts: the pieces of training, validation and test.   length: T, steps of a window of training.   horizon: H, steps
    ahead; 0 if nothing is forecast.   origins: learn only the forecasts after this many last steps; None: after each.
    season: steps of a season; None: that of the collection.
    """

    collection: Collection
    parts: Sequence[Sequence[Piece]]
    length: int
    horizon: int = 0
    origins: int | None = None
    season: int | None = None

    @property
    def series(self) -> list[Series]:
        return self.collection.series

    @cached_property
    def flat(self) -> SeriesRows:
        return SeriesRows(self.series, self.length + self.horizon)

    @property
    def training(self) -> NDArray[np.int64]:
        """The rows of the training part."""
        return np.concatenate([self.flat.starts[i] + np.arange(begin, end) for i, begin, end in self.parts[TRAINING]])

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where windows of training may begin: the first row of each piece, and the running number of starts."""
        pieces, behind = self.parts[TRAINING], min(1, self.horizon)  # a step to forecast follows each window
        first = np.array([self.flat.starts[i] + begin for i, begin, _ in pieces])
        counts = [max(1, end - begin - self.length + 1 - behind) for _, begin, end in pieces]
        return first, np.cumsum(counts)

    def drawn(self, draw: np.random.Generator, count: int, share: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw windows of training: return the rows (n, T) of some of them, and the first row after each one's part."""
        first, counts = self._starts
        drawn = draw.integers(0, counts[-1], count)[share]
        piece = np.searchsorted(counts, drawn, side="right")
        starts = first[piece] + drawn - np.where(piece, counts[piece - 1], 0)
        ends = np.array([self.flat.starts[i] + end for i, _, end in self.parts[TRAINING]])[piece]
        return starts[:, None] + np.arange(self.length), ends


class SeriesQuestion(ABC):
    """A question about series, and the batches in which it is asked.

    distribution: of the answers, if they are numbers.
    """

    ask: ClassVar[str]  # what the user wants: "forecast"
    metric: ClassVar[str]
    classes: ClassVar[bool] = False  # whether the target is one of a few classes
    per_series: ClassVar[bool] = False  # whether a series has one answer
    counted: ClassVar[bool] = False  # whether the answers may be counts, by their distribution
    noun: ClassVar[str] = "series"  # what is counted in the title of an exam
    first: ClassVar[int] = 0  # first step of a series that may have an answer
    ahead: ClassVar[int] = 0  # steps behind a window of training, at least; 0 if nothing is forecast
    horizon: ClassVar[int | None] = None  # the only one that is possible
    unit: ClassVar[str] = ""  # of the scores, in the title of an exam

    def __init__(self, windows: SeriesWindows, distribution: str) -> None:
        self.windows, self.distribution = windows, distribution

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

    @classmethod
    def check_answers(cls, collection: Collection, target: str, distribution: str) -> None:
        """Raise DataError unless the answers of series fit the question and the distribution. target: their column."""
        path, counts = collection.path, cls.counted and distribution == "negative_binomial"
        for member in collection.series:
            of = f" of series {member.name!r}" if member.name else ""
            if cls.per_series and len(np.unique(member.target, axis=0)) > 1:
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
        if cls.classes and len(collection.classes) < 2:
            raise DataError(f"table: {path}: the target has the classes {collection.classes}, expected two or more")
        if not cls.ahead and not collection.series[0].past.shape[1]:
            raise DataError(
                f"table: {path} has no column to read, expected one or more besides the target; name columns: --past "
                "COLUMN ..."
            )

    @classmethod
    def by_series(cls, series: Sequence[Series]) -> bool:
        """Whether series are dealt out whole when the user does not say how to split."""
        return cls.per_series

    @classmethod
    def groups(cls, series: Sequence[Series]) -> list[int] | None:
        """Return a group for each series, if each group is dealt out by itself."""
        return None

    @classmethod
    def length(cls, series: Sequence[Series], training: Sequence[Piece], limit: int) -> int:
        """Return the number of steps that a window has, at most `limit`."""
        return min(limit, max(end - begin for _, begin, end in training) - cls.ahead)

    def check(self) -> None:
        """Raise DataError for a part in which there is nothing to learn or to measure."""
        windows, path = self.windows, self.windows.collection.path
        for split, name in enumerate(PARTS):
            if not windows.parts[split]:
                continue  # no series was to be in it
            if not any(end > begin for _, begin, end in windows.parts[split]):
                longest = max(map(len, windows.series))
                raise DataError(
                    f"table: {path}: the {name} part has no row because the longest series has {longest} "
                    "steps; give a longer table, or other --validation and --test"
                )
            if not any(len(self.known(i, max(begin, self.first), end)) for i, begin, end in windows.parts[split]):
                raise DataError(
                    f"table: {path}: the target has no value in the {name} part; split otherwise, or leave "
                    "out the rows without one"
                )

    def describe(self) -> str:
        """Return a description of the answers for the user, behind a comma."""
        return ""
