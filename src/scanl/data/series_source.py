"""Series of which a question is asked: what a user's table and a published one have in common."""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.data.base import IGNORED, LEVELS, Exam, Examples, Question, Source
from scanl.data.columns import Numbers
from scanl.data.naive import naive, season_errors
from scanl.data.rows import Rows, scale_of
from scanl.data.series import Collection, Series
from scanl.errors import ConfigError, DataError

SCORES = {"horizon": "CRPS", "class": "accuracy", "label": "accuracy", "number": "mean squared error"}  # metrics
MOST = 1024  # forecasts in a measurement, spread over the part
ROWS = 64  # of a batch of a measurement
UNSEEN = (
    "data",
    "origins",
    "gaps",
    "freq",
    "folder",
)  # options that change no number of the table but those of the digest
TRAINING, VALIDATION, TEST = range(3)
PARTS = ("training", "validation", "test")


class SeriesSource(Source):
    """A source that has a collection of series in parts. A subclass is a dataclass with the options below.

    kind: of the question.   horizon, season, distribution, sequence_length, origins, validation, test, seed: see
    `Table`.
    """

    unit: ClassVar[str] = ", in units of the seasonal naive's error in training"
    kind: Any
    horizon: int
    season: int | None
    distribution: str
    sequence_length: int
    origins: int | None
    validation: float
    test: float
    seed: int

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file with the series."""

    @property
    @abstractmethod
    def targets(self) -> list[str]:
        """Names of the columns that are asked for."""

    @cached_property
    def collection(self) -> Collection:
        """The series."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> list[list[tuple[int, int, int]]]:
        """The pieces of training, validation and test: series, first row, and the row after the last."""
        raise NotImplementedError

    def check_options(self) -> None:
        """Raise ConfigError for an option that has no sense, and set the metric."""
        if self.horizon < 1 or (self.season is not None and self.season < 1):
            raise ConfigError(f"table: horizon is {self.horizon} and season is {self.season}, expected at least 1")
        if self.origins is not None and (self.origins < 1 or self.kind != "horizon"):
            expected = "at least 1" if self.kind == "horizon" else "none because nothing is forecast"
            raise ConfigError(f"table: origins is {self.origins}, expected {expected}")
        self.metric = SCORES[self.kind]

    def _by_time(self, each: list[Series]) -> list[list[tuple[int, int, int]]]:
        found: list[list[tuple[int, int, int]]] = [[], [], []]
        for i, one in enumerate(each):
            last = len(one) - round(self.test * len(one))
            first = last - round(self.validation * len(one))
            for part, (begin, end) in enumerate(((0, first), (first, last), (last, len(one)))):
                found[part].append((i, begin, end))
        return found

    def _by_series(self, each: list[Series]) -> list[list[tuple[int, int, int]]]:
        order = sorted(range(len(each)), key=lambda i: hashlib.sha256(each[i].name.encode()).digest())
        if self.kind == "class":  # share out each class by itself, one series after another
            order.sort(key=lambda i: int(each[i].target[0]))
        fractions = np.array([1 - self.validation - self.test, self.validation, self.test])
        dealt, found = np.zeros(3), [[], [], []]
        for rank, i in enumerate(order):  # the part that lacks most of its share, in parts of it, is dealt the next one
            new = rank and self.kind == "class" and each[i].target[0] != each[order[rank - 1]].target[0]
            part = TRAINING if new or not rank else int((rank + 1 - dealt / fractions).argmax())
            dealt[part] += 1
            found[part].append((i, 0, len(each[i])))
        if not all(found):
            raise DataError(
                f"table: {self.path} has {len(each)} series, expected more because a part of the split by series has "
                "none; give more series or larger --validation and --test"
            )
        return found

    def check(self) -> None:
        """Read the table, and refuse parts in which there is nothing to learn or to measure."""
        for part, name in enumerate(PARTS):
            least = int(self.kind == "horizon")  # no forecast is of the first step of a series
            if not any(len(self._known(i, max(begin, least), end)) for i, begin, end in self.parts[part]):
                raise DataError(
                    f"table: {self.path}: the target has no value in the {name} part; split otherwise, or leave out "
                    "the rows without one"
                )
        if self.kind == "horizon":
            for part in PARTS[1:]:
                self._origins(PARTS.index(part))
            if self.length < 1:
                raise DataError(f"table: {self.path}: no series has two steps to train on; give a longer table")
        if self.kind == "label":
            self._refuse_unseen()
        assert self.question

    def _refuse_unseen(self) -> None:
        each, classes = self.collection.each, self.collection.classes
        seen = {int(label) for i, begin, end in self.parts[TRAINING] for label in each[i].target[begin:end]}
        for part in (VALIDATION, TEST):
            for i, begin, end in self.parts[part]:
                for label in map(int, each[i].target[begin:end]):
                    if label >= 0 and label not in seen:
                        raise DataError(
                            f"table: {self.path}: the label {classes[label]!r} is in the {PARTS[part]} part but not in "
                            "the training part, so it cannot be learnt; split otherwise, or leave these rows out"
                        )

    @property
    def length(self) -> int:
        """Steps that a window of training has."""
        spans = [end - begin for _, begin, end in self.parts[TRAINING]]
        if self.kind in ("class", "number"):
            return max(map(len, self.collection.each))
        return min(self.sequence_length, max(spans) - (self.kind == "horizon"))

    @cached_property
    def flat(self) -> Rows:
        return Rows(self.collection.each, self.kind, self.length, self.horizon)

    @cached_property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        flat, regular = self.flat, self.collection.each[0].spans is None
        rows = np.concatenate([flat.starts[i] + np.arange(begin, end) for i, begin, end in self.parts[TRAINING]])
        once = [scale_of(values) for values in flat.once[rows].T]
        more: dict[str, Any] = {}
        if self.kind == "horizon":
            self._check_season()
            ahead = [scale_of(values) for values in flat.ahead[rows].T]
            ahead += [] if regular else [(0.0, float(self.horizon))]
            more = {
                "horizon": self.horizon,
                "targets": len(self.targets),
                "static": flat.static,
                "future": len(ahead),
                "distribution": self.distribution,
                "season": min(self.steps_of_season, self.length),  # a window of training has no more values
            }
            scales, channels = once + ahead, len(once) + len(ahead) * self.horizon + (not regular)
        else:
            scales, channels = once + ([] if regular else [(0.0, 1.0)]), len(once) + (not regular)
        if self.kind in ("class", "label"):
            more["classes"] = len(self.collection.classes)
        if self.kind == "number":
            answers = np.array([self.collection.each[i].target[0, 0] for i, *_ in self.parts[TRAINING]])
            more |= {"answer_scale": scale_of(answers), "distribution": self.distribution}
        return Question(
            self.kind,
            channels=channels,
            timed=not regular,
            scales=tuple(scales),
            missing=self.kind != "horizon",
            **more,
        )

    def _check_season(self) -> None:
        longest = max(end - begin for _, begin, end in self.parts[TRAINING])
        if self.season is not None and self.season >= longest:
            raise ConfigError(
                f"table: season is {self.season}, expected less than {longest}, steps of the longest series in training"
            )

    @property
    def steps_of_season(self) -> int:
        return self.season or self.collection.season

    @cached_property
    def _windows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where windows of training may begin: the first row of each part, and the running number of starts."""
        parts = self.parts[TRAINING]
        first = np.array([self.flat.starts[i] + begin for i, begin, _ in parts])
        ahead = int(self.kind == "horizon")  # behind a window of forecasts is a step to forecast
        return first, np.cumsum([max(1, end - begin - self.length + 1 - ahead) for _, begin, end in parts])

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Examples:
        draw = np.random.default_rng((self.seed, TRAINING, step))
        mine = slice(rank * size, (rank + 1) * size)
        if self.kind in ("class", "number"):
            parts = self.parts[TRAINING]
            return self._whole([parts[k] for k in draw.integers(0, len(parts), size * world)[mine]])
        first, counts = self._windows
        drawn = draw.integers(0, counts[-1], size * world)[mine]
        part = np.searchsorted(counts, drawn, side="right")
        starts = first[part] + drawn - np.where(part, counts[part - 1], 0)
        rows = starts[:, None] + np.arange(self.length)
        ends = np.array([self.flat.starts[i] + end for i, _, end in self.parts[TRAINING]])[part]
        if self.kind == "label":
            labels = np.where(rows < ends[:, None], self.flat.labels[rows], IGNORED)
            return Examples(self.flat.inputs(rows), labels)
        asked = min(self.origins or self.length, self.length)
        after = rows[:, -asked:, None] + 1 + np.arange(self.horizon)
        targets = np.full((size, self.length, self.horizon, len(self.targets)), np.nan)
        targets[:, -asked:] = np.where((after < ends[:, None, None])[..., None], self.flat.answers[after], np.nan)
        return Examples(self.flat.inputs(rows), targets)

    def _whole(self, parts: Sequence[tuple[int, int, int]]) -> Examples:
        """Whole series, which end together; what a shorter one lacks at its beginning is missing."""
        each = self.collection.each
        back = np.arange(self.length) - self.length
        rows = np.stack([self.flat.starts[i] + np.maximum(len(each[i]) + back, -1) for i, *_ in parts])
        # Row -1 of a series is a row of padding: that behind the series before it, or behind the last one.
        answers = np.array([each[i].target.flat[0] for i, *_ in parts])
        return Examples(self.flat.inputs(rows), answers)

    def _origins(self, part: int) -> list[tuple[int, int, int]]:
        """Return series, number of steps before it that it reads, and last row read, of each forecast of a part."""
        found, room = [], 0
        for i, begin, end in self.parts[part]:
            least = begin if begin else min(self.length, end - self.horizon)
            room = max(room, end - begin - (0 if begin else 1))
            found += [(i, min(self.length, last), last - 1) for last in range(max(1, least), end - self.horizon + 1)]
        if not found:
            raise DataError(
                f"table: {self.path}: horizon is {self.horizon}, expected at most {room} because of the {PARTS[part]} "
                f"part of the longest series; give a smaller --horizon or a larger --{PARTS[part]}"
            )
        return found[:: math.ceil(len(found) / self.most(part))]

    def most(self, part: int) -> int:
        """Return how many forecasts of a part are measured, spread over it."""
        return MOST

    def _forecasts(self, part: int) -> Iterator[tuple[list[tuple[int, int, int]], Examples]]:
        """Yield batches of forecasts of a part: where each is, and scale and numbers as its targets."""
        by_length: dict[int, list[tuple[int, int, int]]] = {}
        for origin in self._origins(part):
            by_length.setdefault(origin[1], []).append(origin)
        for length, origins in by_length.items():
            for begin in range(0, len(origins), ROWS):
                now = origins[begin : begin + ROWS]
                last = np.array([self.flat.starts[i] + row for i, _, row in now])
                rows = last[:, None] + np.arange(1 - length, 1)
                numbers = self.flat.answers[last[:, None] + 1 + np.arange(self.horizon)]
                scale = np.stack([self._error_scales[i] for i, *_ in now])[:, None].repeat(self.horizon, 1)
                yield now, Examples(self.flat.inputs(rows), np.stack([scale, numbers], 1))

    @cached_property
    def _naive_errors(self) -> list[tuple[Numbers, Numbers]]:
        """Of each series: mean absolute error and root mean square of the seasonal naive in training."""
        begins = {i: begin for part in (VALIDATION, TEST) for i, begin, _ in self.parts[part] if begin}
        each = self.collection.each
        cut = [begins.get(i, len(one)) for i, one in enumerate(each)]
        for i, begin, _ in self.parts[VALIDATION]:
            cut[i] = begin or cut[i]
        return [season_errors(one.target[:end], self.steps_of_season) for one, end in zip(each, cut, strict=True)]

    @cached_property
    def _error_scales(self) -> list[Numbers]:
        """Of each series, the unit of errors (C,); a constant series has the mean of the others, or 1."""
        found = np.stack([mean for mean, _ in self._naive_errors])
        found[~(found > 0)] = np.nan
        with np.errstate(invalid="ignore"):
            usual = np.nansum(found, 0) / np.maximum((~np.isnan(found)).sum(0), 1)
        usual = np.where(usual > 0, usual, 1.0)
        return list(np.where(np.isnan(found), usual, found))

    def _labelled(self, part: int) -> Iterator[Examples]:
        """Yield series one by one, with what is before the part to read, and labels in the part alone."""
        for i, begin, end in self.parts[part]:
            start = max(0, begin - self.length)
            rows = (self.flat.starts[i] + np.arange(start, end))[None]
            labels = np.where(np.arange(start, end) < begin, IGNORED, self.flat.labels[rows])
            if (labels != IGNORED).any():
                yield Examples(self.flat.inputs(rows), labels)

    def _examples(self, part: int) -> Iterator[Examples]:
        if self.kind == "horizon":
            yield from (examples for _, examples in self._forecasts(part))
        elif self.kind == "label":
            yield from self._labelled(part)
        else:
            parts = self.parts[part]
            yield from (self._whole(parts[begin : begin + ROWS]) for begin in range(0, len(parts), ROWS))

    def unseen(self, step: int) -> Iterator[Examples]:
        return self._examples(VALIDATION)

    def exam(self, *, sample: bool = False) -> Exam:
        """Return an exam on the test part."""
        count = sum(len(examples.inputs) for examples in self._examples(TEST))
        what = {"horizon": "forecasts", "label": "series"}.get(self.kind, "series")
        unit = self.unit if self.kind == "horizon" else ""
        title = f"{self.metric} of {count:,} {what} in the test part of {self.path.name}{unit}:"
        return Exam(title, self._examples(TEST), self._beside(), ".4g")

    def _beside(self) -> dict[str, float | dict[str, float]]:
        """Return the scores of who does not learn, on the test part."""
        if self.kind == "horizon":
            totals: dict[str, list[float]] = {}
            for origins, examples in self._forecasts(TEST):
                for name, pair in self.scores(self.naive(origins), torch.from_numpy(examples.targets)).items():
                    totals[name] = [a + b for a, b in zip(totals.get(name, [0.0, 0.0]), pair, strict=True)]
            return {"seasonal naive": {name: total / count for name, (total, count) in totals.items()}}
        known = np.concatenate([self._known(*part) for part in self.parts[TRAINING]])
        asked = np.concatenate([self._known(*part) for part in self.parts[TEST]])
        if self.kind == "number":
            return {"training mean": float(((asked - known.mean()) ** 2).mean())}
        return {"most frequent": float((asked == np.bincount(known).argmax()).mean())}

    def _known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        """Return the known answers of a part of a series: each step's, or the one of the series."""
        answers = self.collection.each[i].target[begin : begin + 1 if self.kind in ("class", "number") else end]
        return answers[answers >= 0] if answers.ndim == 1 else answers[~np.isnan(answers).all(1), 0]

    def naive(self, origins: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the seasonal naive's quantiles (n, H, C, Q) after the last row of each origin."""
        found = []
        for i, _, last in origins:
            spread = np.nan_to_num(self._naive_errors[i][1])
            history = self.collection.each[i].target[: last + 1]
            found.append(naive(history, self.steps_of_season, self.horizon, spread, LEVELS))
        return torch.from_numpy(np.stack(found))

    def total(self, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
        return self.scores(outputs, targets)[self.metric]

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        if self.kind != "horizon":
            return {self.metric: super().total(outputs, targets)}
        outputs, levels = outputs.double().cpu(), torch.tensor(LEVELS, dtype=torch.float64)
        scale, numbers = targets.double().cpu()[:, [0, -1]].unbind(1)
        asked = ~numbers.isnan()
        error = numbers[..., None] - outputs
        crps = 2 * torch.maximum(levels * error, (levels - 1) * error).mean(-1) / scale
        median = error[..., LEVELS.index(0.5)].abs() / scale
        inside = (outputs[..., 0] <= numbers) & (numbers <= outputs[..., -1])
        count = int(asked.sum())
        scored = {"CRPS": crps, "MASE": median, "coverage": inside.double()}
        return {name: (float(each[asked].sum()), count) for name, each in scored.items()}

    def digest(self) -> str:
        options = [field.name for field in fields(self)]  # pyright: ignore[reportArgumentType]: of a subclass
        digest = hashlib.sha256(repr([(name, getattr(self, name)) for name in options if name not in UNSEEN]).encode())
        for one in self.collection.each:
            for array in (one.target, one.past, one.static, one.future, one.times):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __str__(self) -> str:
        said = self.collection.said
        if self.kind == "horizon":
            said += f", season {self.steps_of_season}"
        elif self.collection.classes:
            said += f", classes {', '.join(self.collection.classes[:10])}"
        return f"x {self.length} steps of {self.path.name}: {said}"
