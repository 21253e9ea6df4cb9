"""Batches for the question of a label at each step of a series."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED, RepeatedIterable
from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Label
from scanl.data.series.rows import scales_of
from scanl.data.series.series import Series
from scanl.data.series.windows import SeriesQuestion
from scanl.data.splits import PARTS, TEST, TRAINING, VALIDATION
from scanl.errors import DataError


class SeriesLabel(SeriesQuestion):
    """A label at each step. A model may read the splits before the one that is measured."""

    ask = "label"
    metric = "accuracy"
    classes = True

    @classmethod
    def by_series(cls, series: Sequence[Series]) -> bool:
        return len(series) > 1

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The labels of all rows, IGNORED where missing."""
        labels = self.windows.flat.joined([member.target for member in self.windows.series], IGNORED)
        return np.where(labels < 0, IGNORED, labels)

    @cached_property
    def question(self) -> Label:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Label(features(self), len(self.windows.collection.classes))

    def batch(self, draw: np.random.Generator, count: int, share: slice) -> Batch:
        flat, (rows, ends) = self.windows.flat, self.windows.drawn(draw, count, share)
        labels = np.where(rows < ends[:, None], self.labels[rows], IGNORED)
        return Batch(flat.features[rows], labels, timespans=flat.durations(rows))

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        labels = self.windows.series[i].target[begin:end]
        return labels[labels >= 0]

    def check(self) -> None:
        super().check()
        series, classes, path = self.windows.series, self.windows.collection.classes, self.windows.collection.path
        train_labels = {
            int(label) for i, begin, end in self.windows.parts[TRAINING] for label in series[i].target[begin:end]
        }
        for split in (VALIDATION, TEST):
            for i, begin, end in self.windows.parts[split]:
                for label in map(int, series[i].target[begin:end]):
                    if label >= 0 and label not in train_labels:
                        raise DataError(
                            f"table: {path}: the label {classes[label]!r} is in the {PARTS[split]} part "
                            "but not in the training part, so it cannot be learnt; split otherwise, or leave these "
                            "rows out"
                        )

    def describe(self) -> str:
        return named(self)

    def examples(self, split: int) -> Iterator[Batch]:
        """Yield series one by one. The inputs begin before the split; the labels are in the split alone."""
        flat = self.windows.flat
        for i, begin, end in self.windows.parts[split]:
            start = max(0, begin - self.windows.length)
            rows = (flat.starts[i] + np.arange(start, end))[None]
            labels = np.where(np.arange(start, end) < begin, IGNORED, self.labels[rows])
            if (labels != IGNORED).any():
                yield Batch(flat.features[rows], labels, timespans=flat.durations(rows))

    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        usual = most_frequent(self)

        def answers() -> Iterator[NDArray[Any]]:
            for batch in self.examples(split):
                yield np.tile(usual, (int((batch.targets != IGNORED).sum()), 1))

        return {"most frequent": RepeatedIterable(answers)}


def features(asking: SeriesQuestion) -> FeatureInputs:
    """Return the form of the covariates of series, in units of the training part; a duration is in its own unit."""
    flat = asking.windows.flat
    scales = scales_of(flat.features[asking.windows.training][:, : flat.past.shape[1] + flat.static.shape[1]])
    return FeatureInputs(
        flat.features.shape[1], scales + (((0.0, 1.0),) if flat.spans is not None else ()), missing=True
    )


def most_frequent(asking: SeriesQuestion) -> NDArray[np.float64]:
    """Return logits of the class that is the most frequent one in training: 1, and 0 for the others."""
    known = np.concatenate([asking.known(*piece) for piece in asking.windows.parts[TRAINING]])
    return np.eye(len(asking.windows.collection.classes))[np.bincount(known).argmax()]


def named(asking: SeriesQuestion) -> str:
    """Return the names of the first classes, behind a comma."""
    return f", classes {', '.join(asking.windows.collection.classes[:10])}"
