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
from scanl.data.series.rows import scale_of
from scanl.data.series.windows import SeriesQuestion, in_batches
from scanl.data.splits import TRAINING, Piece


class SeriesWhole(SeriesQuestion):
    """One answer to each series. All get the length of the longest: a shorter one begins with missing steps."""

    per_series = True

    def by_series(self) -> bool:
        return True

    @property
    def length(self) -> int:
        return max(map(len, self.source.collection.series))

    def batch(self, draw: np.random.Generator, count: int, share: slice) -> Batch:
        pieces = self.source.parts[TRAINING]
        return self.together([pieces[k] for k in draw.integers(0, len(pieces), count)[share]])

    def together(self, pieces: Sequence[Piece]) -> Batch:
        """Return complete series, aligned at their ends; shorter ones begin with missing values."""
        series, flat = self.source.collection.series, self.flat
        back = np.arange(self.length) - self.length
        rows = np.stack([flat.starts[i] + np.maximum(len(series[i]) + back, -1) for i, *_ in pieces])
        # Row -1 of a series is the padding behind the previous series, or behind the last one.
        answers = np.array([series[i].target.flat[0] for i, *_ in pieces])
        return Batch(flat.features[rows], answers, timespans=flat.durations(rows))

    def examples(self, split: int) -> Iterator[Batch]:
        yield from map(self.together, in_batches(self.source.parts[split]))


class SeriesClass(SeriesWhole):
    """The class of each series."""

    ask = "classify"
    metric = "accuracy"
    classes = True

    @cached_property
    def question(self) -> Class:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Class(features(self), len(self.source.collection.classes))

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        answer = self.source.collection.series[i].target[begin : begin + 1]
        return answer[answer >= 0]

    def describe(self) -> str:
        return named(self)

    def groups(self) -> list[int]:
        return [int(member.target[0]) for member in self.source.collection.series]

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
        return Number(features(self), scale_of(self._answers), self.source.distribution)

    @property
    def _answers(self) -> NDArray[np.float64]:
        """The answers of the training part."""
        return np.array([self.source.collection.series[i].target[0, 0] for i, *_ in self.source.parts[TRAINING]])

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        answer = self.source.collection.series[i].target[begin : begin + 1]
        return answer[~np.isnan(answer).all(1), 0]

    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        mean = np.concatenate([self.known(*piece) for piece in self.source.parts[TRAINING]]).mean()
        return {
            "training mean": RepeatedIterable(lambda: (np.full(batch.size, mean) for batch in self.examples(split)))
        }
