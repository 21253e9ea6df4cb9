"""Batches for the question of a label at each step of a series."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED, RepeatedIterable
from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Label
from scanl.data.series.rows import scales_of
from scanl.data.series.windows import SeriesQuestion
from scanl.data.splits import PARTS, TEST, TRAINING, VALIDATION
from scanl.errors import DataError


class SeriesLabel(SeriesQuestion):
    """A label at each step. A model may read the splits before the one that is measured."""

    ask = "label"
    metric = "accuracy"
    classes = True

    def by_series(self) -> bool:
        return len(self.source.collection.series) > 1

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The labels of all rows, IGNORED where missing."""
        labels = self.flat.joined([member.target for member in self.source.collection.series], IGNORED)
        return np.where(labels < 0, IGNORED, labels)

    @cached_property
    def question(self) -> Label:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Label(features(self), len(self.source.collection.classes))

    def batch(self, draw: np.random.Generator, count: int, share: slice) -> Batch:
        rows, ends = self.windows(draw, count, share)
        labels = np.where(rows < ends[:, None], self.labels[rows], IGNORED)
        return Batch(self.flat.features[rows], labels, timespans=self.flat.durations(rows))

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        labels = self.source.collection.series[i].target[begin:end]
        return labels[labels >= 0]

    def check(self) -> None:
        super().check()
        series, classes = self.source.collection.series, self.source.collection.classes
        train_labels = {
            int(label) for i, begin, end in self.source.parts[TRAINING] for label in series[i].target[begin:end]
        }
        for split in (VALIDATION, TEST):
            for i, begin, end in self.source.parts[split]:
                for label in map(int, series[i].target[begin:end]):
                    if label >= 0 and label not in train_labels:
                        raise DataError(
                            f"table: {self.source.path}: the label {classes[label]!r} is in the {PARTS[split]} part "
                            "but not in the training part, so it cannot be learnt; split otherwise, or leave these "
                            "rows out"
                        )

    def describe(self) -> str:
        return named(self)

    def examples(self, split: int) -> Iterator[Batch]:
        """Yield series one by one. The inputs begin before the split; the labels are in the split alone."""
        for i, begin, end in self.source.parts[split]:
            start = max(0, begin - self.length)
            rows = (self.flat.starts[i] + np.arange(start, end))[None]
            labels = np.where(np.arange(start, end) < begin, IGNORED, self.labels[rows])
            if (labels != IGNORED).any():
                yield Batch(self.flat.features[rows], labels, timespans=self.flat.durations(rows))

    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        usual = most_frequent(self)

        def answers() -> Iterator[NDArray[Any]]:
            for batch in self.examples(split):
                yield np.tile(usual, (int((batch.targets != IGNORED).sum()), 1))

        return {"most frequent": RepeatedIterable(answers)}


def features(asking: SeriesQuestion) -> FeatureInputs:
    """Return the form of the covariates of series, in units of the training part; a duration is in its own unit."""
    flat = asking.flat
    scales = scales_of(flat.features[asking.training][:, : flat.past.shape[1] + flat.static.shape[1]])
    return FeatureInputs(
        flat.features.shape[1], scales + (((0.0, 1.0),) if flat.spans is not None else ()), missing=True
    )


def most_frequent(asking: SeriesQuestion) -> NDArray[np.float64]:
    """Return logits of the class that is the most frequent one in training: 1, and 0 for the others."""
    known = np.concatenate([asking.known(*piece) for piece in asking.source.parts[TRAINING]])
    return np.eye(len(asking.source.collection.classes))[np.bincount(known).argmax()]


def named(asking: SeriesQuestion) -> str:
    """Return the names of the first classes, behind a comma."""
    return f", classes {', '.join(asking.source.collection.classes[:10])}"
