"""Batches for the question of the next numbers of a series, and their seasonal naive forecast."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import LEVELS, RepeatedIterable
from scanl.data.batch import Batch, Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.data.series.columns import Numbers
from scanl.data.series.naive import naive, season_errors
from scanl.data.series.rows import Origin, scales_of
from scanl.data.series.windows import SeriesQuestion
from scanl.data.splits import PARTS, TEST, TRAINING, VALIDATION, sampled
from scanl.errors import ConfigError, DataError

MAX_FORECASTS = 1024  # forecasts in a measurement, spread over the part


class SeriesForecast(SeriesQuestion):
    """Forecasts of the next `horizon` steps: learnt after every step of a window, or after its last `origins`.

    A forecast of a later part may read the parts before it.
    """

    ask = "forecast"
    metric = "CRPS"
    counted = True
    noun = "forecasts"
    first = ahead = 1  # the first step of a series is never forecast; a step to forecast follows each window
    unit = ", in units of the seasonal naive's error in training"
    scores: tuple[str, ...] = ("CRPS", "MASE", "coverage")
    limit: int = MAX_FORECASTS  # forecasts of the test part that are measured
    sampled: int = MAX_FORECASTS  # forecasts of the validation part that are measured

    @property
    def season(self) -> int:
        """Steps of a season: the user's, or else the calendar's, or else what the numbers show."""
        return self.windows.season or self.windows.collection.season

    @cached_property
    def question(self) -> ForecastQuestion:  # pyright: ignore[reportIncompatibleMethodOverride]
        windows, flat, rows = self.windows, self.windows.flat, self.windows.training
        pieces = windows.parts[TRAINING]
        longest = max(end - begin for _, begin, end in pieces)
        if windows.season is not None and windows.season >= longest:
            raise ConfigError(
                f"table: season is {windows.season}, expected less than {longest}, steps of the longest series in "
                "training"
            )
        static = np.concatenate([flat.static[[i]].repeat(end - begin, 0) for i, begin, end in pieces])
        columns = [flat.target[rows], flat.past[rows], static, flat.future[rows]]
        target, past, constant, future = (array.shape[1] for array in columns)
        return ForecastQuestion(
            windows.horizon,
            target,
            past,
            constant,
            future,
            scales=sum((scales_of(array) for array in columns), ()),
            timed=flat.spans is not None,
            season=min(self.season, windows.length),  # a window of training has no more values
            second=windows.collection.longer_season(self.season),
            distribution=self.distribution,
            scores=self.scores,
        )

    def batch(self, draw: np.random.Generator, count: int, share: slice) -> Batch:
        windows, flat, horizon = self.windows, self.windows.flat, self.windows.horizon
        rows, ends = windows.drawn(draw, count, share)
        learnt = min(windows.origins or windows.length, windows.length)
        after = rows[:, -learnt:, None] + 1 + np.arange(horizon)
        targets = np.full((*rows.shape, horizon, flat.target.shape[1]), np.nan)
        targets[:, -learnt:] = np.where((after < ends[:, None, None])[..., None], flat.target[after], np.nan)
        return Batch(flat.columns(rows, horizon), targets)

    def known(self, i: int, begin: int, end: int) -> NDArray[Any]:
        numbers = self.windows.series[i].target[begin:end]
        return numbers[~np.isnan(numbers).all(1), 0]

    def check(self) -> None:
        super().check()
        for split in (VALIDATION, TEST):
            self.origins(split)
        if self.windows.length < 1:
            raise DataError(
                f"table: {self.windows.collection.path}: no series has two steps to train on; give a longer table"
            )

    def describe(self) -> str:
        return f", season {self.season}"

    def origins(self, split: int) -> list[Origin]:
        """Return the origins of the forecasts that are measured in a split."""
        horizon, length, room = self.windows.horizon, self.windows.length, 0
        origins: list[Origin] = []
        for i, begin, end in self.windows.parts[split]:
            least = begin if begin else min(length, end - horizon)
            room = max(room, end - begin - (0 if begin else 1))
            origins += [(i, min(length, last), last - 1) for last in range(max(1, least), end - horizon + 1)]
        if not origins:
            raise DataError(
                f"table: {self.windows.collection.path}: horizon is {horizon}, expected at most {room} because of the "
                f"{PARTS[split]} part of the longest series; give a smaller --horizon or a larger --{PARTS[split]}"
            )
        return [origins[i] for i in sampled(len(origins), self.limit if split == TEST else self.sampled)]

    def forecasts(self, split: int) -> Iterator[tuple[Sequence[Origin], Batch]]:
        """Yield batches of forecasts of a part, and the origins of each."""
        origins, flat, horizon = self.origins(split), self.windows.flat, self.windows.horizon
        for which, rows in flat.ending(origins):
            some = [origins[number] for number in which]
            numbers = flat.target[rows[:, -1:] + 1 + np.arange(horizon)]
            units = np.stack([self.units[i] for i, *_ in some])
            yield some, Batch(flat.columns(rows, horizon), Outcomes(numbers, units))

    def examples(self, split: int) -> Iterator[Batch]:
        yield from (batch for _, batch in self.forecasts(split))

    def rivals(self, split: int) -> Mapping[str, Iterable[NDArray[Any]]]:
        return {
            "seasonal naive": RepeatedIterable(lambda: (self.naive(origins) for origins, _ in self.forecasts(split)))
        }

    def naive(self, origins: Sequence[Origin]) -> Numbers:
        """Return the seasonal naive's quantiles (n, H, C, Q) after the last row of each origin."""
        quantiles = []
        for i, _, last in origins:
            spread = np.nan_to_num(self.naive_errors[i][1])
            history = self.windows.series[i].target[: last + 1]
            quantiles.append(naive(history, self.season, self.windows.horizon, spread, LEVELS))
        return np.stack(quantiles)

    @cached_property
    def naive_errors(self) -> list[tuple[Numbers, Numbers]]:
        """The seasonal naive's mean absolute error and root mean square in training, for each series."""
        series, parts = self.windows.series, self.windows.parts
        begins = {i: begin for split in (VALIDATION, TEST) for i, begin, _ in parts[split] if begin}
        cut = [begins.get(i, len(member)) for i, member in enumerate(series)]
        for i, begin, _ in parts[VALIDATION]:
            cut[i] = begin or cut[i]
        return [season_errors(member.target[:end], self.season) for member, end in zip(series, cut, strict=True)]

    @cached_property
    def units(self) -> list[Numbers]:
        """The unit of errors (C,) of each series. A constant series has the mean of the others, or 1."""
        errors = np.stack([mean for mean, _ in self.naive_errors])
        errors[~(errors > 0)] = np.nan
        with np.errstate(invalid="ignore"):
            usual = np.nansum(errors, 0) / np.maximum((~np.isnan(errors)).sum(0), 1)
        usual = np.where(usual > 0, usual, 1.0)
        return list(np.where(np.isnan(errors), usual, errors))


class SeriesGeneration(SeriesForecast):
    """Forecasts of one step, from which a series is generated step by step."""

    ask = "generate"
    horizon = 1
