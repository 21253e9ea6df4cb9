"""Batches for the question of one answer to a series: a class or a number."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import RepeatedIterable
from scanl.data.batch import Batch
from scanl.data.questions import Class, Number
from scanl.data.series.label import features, most_frequent, named
from scanl.data.series.rows import in_batches, scale_of
from scanl.data.series.series import Series
from scanl.data.series.windows import SeriesQuestion
from scanl.data.splits import TRAINING, Piece


class SeriesWhole(SeriesQuestion):
    """One answer to each series. All get the length of the longest: a shorter one begins with missing steps."""

    per_series = True

    @classmethod
    def length(cls, series: Sequence[Series], training: Sequence[Piece], limit: int) -> int:
        return max(map(len, series))

    def batch(self, draw: np.random.Generator, count: int, share: slice) -> Batch:
        pieces = self.windows.parts[TRAINING]
        return self.together([pieces[k] for k in draw.integers(0, len(pieces), count)[share]])

    def together(self, pieces: Sequence[Piece]) -> Batch:
        """Return complete series, aligned at their ends; shorter ones begin with missing values."""
        flat, series = self.windows.flat, [i for i, *_ in pieces]
        rows = flat.aligned(series, self.windows.length)
        answers = np.array([self.windows.series[i].target.flat[0] for i in series])
        return Batch(flat.features[rows], answers, timespans=flat.durations(rows))

    def examples(self, split: int) -> Iterator[Batch]:
        yield from map(self.together, in_batches(self.windows.parts[split]))


class SeriesClass(SeriesWhole):
    """The class of each series."""

    ask = "classify"
    metric = "accuracy"
    classes = True

    @cached_property
    def question(self) -> Class:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Class(features(self), len(self.windows.collection.classes))

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        answer = self.windows.series[i].target[begin : begin + 1]
        return answer[answer >= 0]

    def describe(self) -> str:
        return named(self)

    @classmethod
    def groups(cls, series: Sequence[Series]) -> list[int]:
        return [int(member.target[0]) for member in series]

    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        usual = most_frequent(self)
        return {
            "most frequent": RepeatedIterable(
                lambda: (np.tile(usual, (batch.size, 1)) for batch in self.examples(split))
            )
        }


class SeriesNumber(SeriesWhole):
    """A number for each series."""

    ask = "regress"
    metric = "mean squared error"
    counted = True

    @cached_property
    def question(self) -> Number:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Number(features(self), scale_of(self._answers), self.distribution)

    @property
    def _answers(self) -> NDArray[np.float64]:
        """The answers of the training part."""
        return np.array([self.windows.series[i].target[0, 0] for i, *_ in self.windows.parts[TRAINING]])

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        answer = self.windows.series[i].target[begin : begin + 1]
        return answer[~np.isnan(answer).all(1), 0]

    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        mean = np.concatenate([self.known(*piece) for piece in self.windows.parts[TRAINING]]).mean()
        return {
            "training mean": RepeatedIterable(lambda: (np.full(batch.size, mean) for batch in self.examples(split)))
        }
