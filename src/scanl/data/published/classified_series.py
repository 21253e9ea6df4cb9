"""Series to classify, or to predict a number from: UCR and UEA (.ts files), spoken digits, clinical series, HAR."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import lines
from scanl.data.fixed import FixedPart, FixedRows, Parts, set_aside
from scanl.data.published.sources import kind, published
from scanl.data.questions import Class, FeatureInputs, Number, Question
from scanl.data.readers import npz, ts
from scanl.data.series.rows import scale_of
from scanl.errors import DataError
from scanl.options import Range

VITALS = ("RR", "HR", "SpO2")
SIGNALS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")


@dataclass
class Recordings(FixedRows):
    """Rows of features of different lengths, in memory. A subclass defines `read`.

    The question depends on the rows, so they are read when the model is made.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._scales = np.zeros((0, 2))  # by which the channels are standardised

    @property
    def length(self) -> int:
        return max(len(row) for split in self.parts for row in split.rows)

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._question

    @cached_property
    def _question(self) -> Question:
        channels = self.parts.train.rows[0].shape[1]
        if self.metric == "accuracy":
            classes = 1 + int(max(split.answers.max() for split in self.parts))
            return Class(FeatureInputs(channels), classes)
        return Number(FeatureInputs(channels))

    @cached_property
    def uneven(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len({len(row) for split in self.parts for row in split.rows}) > 1

    def _standardized(self, parts: Parts) -> Parts:
        """Standardise each channel by its mean and standard deviation over all steps of the training part, in float64.

        Both are kept for the digest: a shift of all numbers changes the data, but not what comes of them here.
        """
        steps = np.concatenate(list(parts.train.rows))
        self._scales = np.array([scale_of(channel) for channel in steps.T])
        location, scale = self._scales.T
        rows = [[((row - location) / scale).astype(np.float32) for row in split.rows] for split in parts]
        return Parts(*(FixedPart(split_rows, split.answers) for split_rows, split in zip(rows, parts, strict=True)))

    def digest(self) -> str:
        digest = hashlib.sha256(super().digest().encode())
        digest.update(self._scales.tobytes())
        return digest.hexdigest()


@kind
@dataclass
class SeriesProblem(Recordings):
    """Series with an answer each: a class by name, or a number if the metric is the mean squared error.

    The parts are the published ones. Without one for validation, a fifth of the training part is set aside for it, at
    random. Classes are numbered by their sorted names. A record may give `standardized`, for channels that are
    standardized by the training part, and `row_name`, the name of the published number of series.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        split_seed: seed of the split.
    """

    readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"npz": npz.series, "ts": ts.series}
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("train", "test"), ("train", "validation", "test")]
    most_files: ClassVar[int] = sys.maxsize
    standardized: ClassVar[bool] = False
    row_name: ClassVar[str] = "series"

    split_seed: int = 42

    @property
    def file_names(self) -> Mapping[str, Sequence[str]]:
        """The files of each part."""
        return self.files.laid_out(self.folder).parts

    def read(self) -> Parts:
        series = {split: self._series(names) for split, names in self.file_names.items()}
        self.files.check_counts({self.row_name: sum(len(labeled.rows) for labeled in series.values())}, self.folder)
        parts = self._split(series)
        if self.standardized:
            return self._standardized(parts)
        return Parts(*(FixedPart([row.astype(np.float32) for row in split.rows], split.answers) for split in parts))

    def _split(self, series: Mapping[str, "LabeledSeries"]) -> Parts:
        known = series["train"].labels
        numbered = [self._numbered(labeled, known, self.file_names[split][-1]) for split, labeled in series.items()]
        if len(numbered) == 3:
            return Parts(*numbered)
        train, test = numbered
        return Parts(*set_aside(train, max(1, len(train.answers) // 5), self.split_seed), test)

    def _series(self, names: Sequence[str]) -> "LabeledSeries":
        """Read the series of files, and their labels: names of classes, or numbers."""
        layout, series = self.files.laid_out(self.folder), LabeledSeries([], [])
        for name in names:
            rows, labels = self.readers[layout.reader](self.files, name, self.folder, **layout.options)
            try:
                series.labels.extend(labels if self.metric == "accuracy" else map(float, labels))
            except ValueError as error:
                raise self.files.damaged(self.files.path(name, self.folder), str(error), self.folder) from error
            series.rows.extend(rows)
        return series

    def _numbered(self, series: "LabeledSeries", known: Sequence[Any], name: str) -> FixedPart:
        """Return series with the numbers of their classes in `known`, or with their own numbers."""
        if self.metric != "accuracy":
            return FixedPart(series.rows, np.array(series.labels, np.float32))
        number = {label: place for place, label in enumerate(sorted(set(known)))}
        if odd := set(series.labels) - number.keys():
            path = self.files.path(name, self.folder)
            raise self.files.damaged(path, f"class {min(odd)!r} is not in the training part", self.folder)
        return FixedPart(series.rows, np.array([number[label] for label in series.labels], np.int64))


class LabeledSeries(NamedTuple):
    """Series, and the label of each."""

    rows: list[NDArray[np.float64]]
    labels: list[Any]


@kind
@dataclass
class PooledSeries(SeriesProblem):
    """Series as in `SeriesProblem`; all published parts are joined and split at random.

    A record gives `shares`, the fractions for validation and test.

    Args: see `SeriesProblem`.
    """

    splits: ClassVar[Sequence[tuple[str, ...]]] = [*SeriesProblem.splits, ("whole",)]
    shares: ClassVar[tuple[float, float]]

    def _split(self, series: Mapping[str, LabeledSeries]) -> Parts:
        rows = [row for labeled in series.values() for row in labeled.rows]
        labels = [label for labeled in series.values() for label in labeled.labels]
        return shares(self._numbered(LabeledSeries(rows, labels), labels, ""), *self.shares, self.split_seed)


def shares(split: FixedPart, validation: float, test: float, seed: int) -> Parts:
    """Split rows at random into three parts, two of them with these shares."""
    count = len(split.answers)
    development, last = set_aside(split, round(test * count), seed)
    return Parts(*set_aside(development, round(validation * count), seed), last)


@published("ucr")
@dataclass
class ArchiveProblem(SeriesProblem):
    """A problem of the UCR or UEA archive: the class of a series, with the published training and test part.

    A fifth of the training part is set aside for validation, at random. Channels are standardized on the rest.
    Every problem whose two .ts files lie in the folder can be named. `scanl data get ucr` brings ACSF1, ArrowHead,
    BasicMotions, Covid3Month_disc, ECG5000, GunPoint, ItalyPowerDemand, JapaneseVowels, OSULeaf and
    PickupGestureWiimoteZ.

    Args:
        seed, eval_examples, folder, split_seed: see `SeriesProblem`.
        problem: name of the problem.
    """

    problem: str = "GunPoint"

    @property
    def file_names(self) -> Mapping[str, Sequence[str]]:
        return {split: [f"{self.problem}_{split.upper()}.ts"] for split in ("train", "test")}


@published("bidmc")
@dataclass
class VitalSigns(PooledSeries):
    """BIDMC: a vital sign (breaths or heart beats a minute, or oxygen in per cent) from 32 s of two channels.

    The published parts are joined and split at random into 70, 15 and 15 %. The score is the mean squared error. Some
    papers publish its root, and some do not say which.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        vital: RR, HR or SpO2.
        split_seed: seed of the split.
    """

    metric = "mean squared error"

    vital: Annotated[str, Range(f"one of {', '.join(VITALS)}", lambda vital, _: vital in VITALS)] = "HR"
    split_seed: int = 0

    @property
    def file_names(self) -> Mapping[str, Sequence[str]]:
        return {split: [f"BIDMC32{self.vital}_{split.upper()}.ts"] for split in ("train", "test")}


@published("har2")
@dataclass
class Activity(Recordings):
    """HAR-2: whether a person sits, lies or walks up, or stands, walks or walks down, from 128 steps of 9 channels.

    The parts are the published ones. A tenth of the training part is set aside for validation. Channels are
    standardised on the rest.

    Args: see `FixedRows`.
    """

    def read(self) -> Parts:
        train, test = self._part("train", "training"), self._part("test", "test")
        return self._standardized(Parts(*set_aside(train, max(1, len(train.answers) // 10)), test))

    def _part(self, split: str, what: str) -> FixedPart:
        labels = self._table(f"{split}/y_{split}.txt")[:, 0]
        signals = [self._table(f"{split}/Inertial Signals/{signal}_{split}.txt") for signal in SIGNALS]
        if {signal.shape for signal in signals} != {(len(labels), 128)}:
            path = self.files.path(f"{split}/y_{split}.txt", self.folder)
            shapes = sorted({signal.shape for signal in signals})
            raise self.files.damaged(path, f"it has {len(labels)} labels, the signals are {shapes}", self.folder)
        self.files.check_counts({f"{what} windows": len(labels)}, self.folder)
        # 1 walking, 2 upstairs, 3 downstairs, 4 sitting, 5 standing, 6 laying
        return FixedPart(list(np.stack(signals, 2)), np.isin(labels, (1, 3, 5)).astype(np.int64))

    def _table(self, name: str) -> NDArray[np.float64]:
        rows = [line.split() for line in lines(self.files.text(name, self.folder))]
        try:
            return np.array(rows, np.float64)
        except ValueError as error:
            raise self.files.damaged(self.files.path(name, self.folder), str(error), self.folder) from error


@published("sepsis")
@dataclass
class Sepsis(Recordings):
    """Sepsis: whether a patient will have sepsis, from the first 72 hours of a stay; one step an hour.

    A step has the 34 measurements that vary, and the hour. They are standardised by the training part. Then a missing
    measurement is 0. With `intensity` a step also has, for each measurement, how often it was made so far, and the two
    flags of the unit. The five constant columns are left out. The answer is the label of the whole stay. Stays of two
    rows or fewer are left out. The score is the accuracy. It cannot be compared with the published score, which is the
    area under the curve.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        intensity: add the counts of measurements.
        split_seed: seed of the split.
    """

    intensity: bool = True
    split_seed: int = 0

    def read(self) -> Parts:
        rows, answers = [], []
        paths = [path for name in self.files.needs for path in self.files.below(name, "*.psv", self.folder)]
        self.files.check_counts({"stays": len(paths)}, self.folder)
        for path in paths:
            values = self._stay(path)
            first_hours = values[values[:, 39] <= 72]  # ICULOS, the hour
            if len(first_hours) > 2:
                hours = np.full((int(first_hours[-1, 39] - first_hours[0, 39]) + 1, 41), np.nan)
                hours[(first_hours[:, 39] - first_hours[0, 39]).astype(int)] = first_hours
                hours[:, 39] = first_hours[0, 39] + np.arange(len(hours))
                rows.append(hours)
                answers.append(int(np.nanmax(hours[:, 40])))
        if len(rows) < 3:
            raise DataError(f"sepsis: {self.needs_folder} has {len(rows)} stays of more than two rows; give more")
        parts = shares(FixedPart(rows, np.array(answers, np.int64)), 0.15, 0.15, self.split_seed)
        vitals = np.concatenate(list(parts.train.rows))[:, :34]
        known = np.where(np.isnan(vitals).all(0), 0, vitals)  # a column that was never measured
        location, scale = np.nanmean(known, 0), np.nanstd(known, 0) + 1e-5
        return Parts(*(FixedPart([self._row(row, location, scale) for row in p.rows], p.answers) for p in parts))

    @property
    def needs_folder(self) -> Path:
        return self.files.folder(self.folder)

    def _stay(self, path: Path) -> NDArray[np.float64]:
        try:
            header, *body = path.read_text(encoding="utf-8").splitlines()
            names = header.split("|")
            values = np.array([[float(value) for value in line.split("|")] for line in body])
        except (OSError, ValueError) as error:
            raise self.files.damaged(path, str(error), self.folder) from error
        if len(names) != 41 or names[39:] != ["ICULOS", "SepsisLabel"] or values.shape[1:] != (41,):
            raise self.files.damaged(
                path, f"it has {len(names)} columns, expected 41 with SepsisLabel last", self.folder
            )
        return values

    def _row(self, hours: NDArray[np.float64], location: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
        values = hours[:, :34]
        columns = [hours[:, 39:40] / 72, np.nan_to_num((values - location) / scale)]
        if self.intensity:
            counts = (~np.isnan(values)).cumsum(0) / 72
            units = (~np.isnan(hours[:, 36:38])).cumsum(0).clip(max=1)
            columns += [counts, units]
        return np.hstack(columns).astype(np.float32)
