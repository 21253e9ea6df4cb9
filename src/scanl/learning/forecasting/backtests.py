"""Backtests of linear maps of lags: rolling origins in the part of a table before its test part.

The numbers are normalised as a `Forecaster` normalises them, so its `lags` get the weights that are chosen here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from scanl.data.series.forecast import SeriesForecast
from scanl.data.series.naive import season_errors
from scanl.data.series.rows import scale_of
from scanl.data.series.source import SeriesSource
from scanl.data.splits import TRAINING, VALIDATION, sampled
from scanl.learning.forecasting.lag_maps import LagMap, Numbers, widened
from scanl.models.forecasting.running import nothing_read, running

FOLDS = 3  # backtests
MIN_FIRST_SHARE, MAX_FIRST_SHARE = 0.55, 0.8  # bounds of the share of rows before the first of them
MIN_FITTED_ORIGINS, MAX_FITTED_ORIGINS = 4, 6000  # origins in a least squares fit
MAX_MEASURED_ORIGINS = 400  # origins in a backtest
MAX_ORIGINS = 4 * (MAX_FITTED_ORIGINS + MAX_MEASURED_ORIGINS)  # of all series, among which these are
MIN_ORIGINS = 64  # of a series
CERTAIN = 300  # origins in the backtests from which combinations of forecasts are compared
MAX_ERROR_RATIO = 1.2  # ratio to the lowest error up to which a forecast counts
MAX_ROUNDED_MEDIAN = 10.0  # median of numbers whose forecasts are rounded if they are whole
MOST_LOG = 700.0  # of a forecast of a logarithm: its exponential is finite

Rows = NDArray[np.int64]


@dataclass
class PastTargets:
    """The targets before the test part, each channel of each series as one array.

    ends: how many rows of each array come before the test part.   units: of errors, as in `SeriesForecast`.
    lasts: rows of each series before the test part, by the number of the series.   second: steps of a longer season; 1:
    none.
    """

    arrays: list[Numbers]
    ends: list[int]
    units: list[float]
    season: int
    horizon: int
    lasts: dict[int, int]
    second: int = 1

    @classmethod
    def of(cls, source: SeriesSource) -> "PastTargets":
        """Take the past out of a source."""
        ends = {i: end for split in (TRAINING, VALIDATION) for i, _, end in source.parts[split]}
        series, season = source.collection.series, cast(SeriesForecast, source.asking).season
        units = {i: _units(series[i].target[:end], season) for i, end in ends.items()}
        means = np.array(list(units.values())) if units else np.full((1, 1), np.nan)
        known = ~np.isnan(means)
        usual = np.where(known.any(0), np.nansum(means, 0) / known.sum(0).clip(1), 1.0)
        arrays, lengths, scales = [], [], []
        for i, end in sorted(ends.items()):
            for channel in range(series[i].target.shape[1]):
                arrays.append(series[i].target[:end, channel].astype(np.float64))
                lengths.append(end)
                unit = units[i][channel]
                scales.append(float(unit if unit > 0 else usual[channel]))
        return cls(arrays, lengths, scales, season, source.horizon, ends, source.collection.longer_season(season))

    @cached_property
    def borders(self) -> list[float]:
        """Shares of the rows between which the origins of each backtest are. A season comes before the first."""
        usual = float(np.median(self.ends))
        first = min(MAX_FIRST_SHARE, max(MIN_FIRST_SHARE, (self.season + 2 * self.horizon + 4) / usual))
        return list(np.linspace(first, 1.0, FOLDS + 1))

    @cached_property
    def known(self) -> Numbers:
        """All known numbers."""
        return np.concatenate([array[~np.isnan(array)] for array in self.arrays])

    @cached_property
    def positive(self) -> bool:
        """Whether every known number is above 0."""
        return bool((self.known > 0).all())

    @cached_property
    def least(self) -> float | None:
        """0 if no known number is below it, such as a count or a price."""
        return 0.0 if bool((self.known >= 0).all()) else None

    @cached_property
    def whole(self) -> bool:
        """Whether the numbers are small whole numbers, so that a forecast between two of them is none."""
        return bool((self.known % 1 == 0).all()) and float(np.median(np.abs(self.known))) <= MAX_ROUNDED_MEDIAN


def _units(y: Numbers, season: int) -> Numbers:
    units = season_errors(y, season)[0]
    return np.where(units > 0, units, np.nan)


class BacktestWindows:
    """The last `lags` values before every origin, normalised by the running statistics, and the numbers that came.

    log, span: of the normalisation.   values: (n, lags).   came: (n, H), NaN where it is not known.   location, scale:
    (n,).   array, origin: (n,), the array of an origin and its row there.
    """

    def __init__(self, past: PastTargets, lags: int, log: bool, span: float | None) -> None:
        self.past, self.lags, self.log, self.span = past, lags, log, span
        parts: list[tuple[Any, ...]] = []
        for i, y in enumerate(past.arrays):
            x = np.log(y) if log else y
            mean, deviation = scale_of(x)
            z = torch.from_numpy((x - mean) / deviation)[None, :, None]
            location, variance, _ = running(z, nothing_read(z.new_zeros(1, 1)), span, None, 1e-5)
            scale = variance[0, :, 0].sqrt().numpy() * deviation
            origins = sampled(len(x), max(MIN_ORIGINS, MAX_ORIGINS // len(past.arrays)))
            ahead = origins[:, None] + 1 + np.arange(past.horizon)
            came = np.where(ahead < len(x), x[np.minimum(ahead, len(x) - 1)], np.nan)
            at = location[0, :, 0].numpy() * deviation + mean
            parts.append((came, at[origins], scale[origins], np.full(len(origins), i), origins, x, at))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        came, self.location, self.scale, self.array, self.origin, *self._steps = columns
        self._begins = np.cumsum([0, *map(len, past.arrays)])
        self.came = (came - self.location[:, None]) / self.scale[:, None]
        values, _ = self.history(np.arange(len(self.origin)), lags)
        self.values = np.nan_to_num((values - self.location[:, None]) / self.scale[:, None])
        self.ends = np.array(past.ends)[self.array]
        self.units = np.array(past.units)[self.array]
        self._sums: dict[tuple[int, int | None], _Sums] = {}

    def history(self, rows: Rows, count: int) -> list[Numbers]:
        """Return the last values (n, count) of some origins, the newest first, and the location after each.

        Values are as they are, and NaN where none is known.
        """
        back = self.origin[rows, None] - np.arange(count)
        at = self._begins[self.array[rows], None] + np.maximum(back, 0)
        return [np.where(back >= 0, of_step[at], np.nan) for of_step in self._steps]

    @cached_property
    def folds(self) -> list[tuple[NDArray[np.float64], Rows]]:
        """Of each backtest: the row (n,) before which the series are learnt, and the origins that are measured.

        A table that is too short has one, of all origins, before which nothing is learnt.
        """
        folds = []
        for begin, end in zip(self.past.borders, self.past.borders[1:], strict=False):
            first, last = (np.maximum(1, np.round(share * self.ends)) for share in (begin, end))
            inside = (self.origin + 1 >= first) & (self.origin + 1 < last) & ~np.isnan(self.came).all(1)
            folds.append((first, _sample(inside, MAX_MEASURED_ORIGINS)))
        everything = np.ones(len(self.origin)), np.flatnonzero(~np.isnan(self.came).all(1))
        return [fold for fold in folds if len(fold[1])] or [everything]

    def learnt(self, lags: int, fold: int | None = None) -> Rows:
        """Return the origins of which all lags and all numbers ahead are before a backtest; None: all rows."""
        ends = self.ends if fold is None else self.folds[fold][0]
        full = (self.origin + 1 >= lags) & (self.origin + self.past.horizon < ends)
        return _sample(full, MAX_FITTED_ORIGINS)

    def ridge(self, prior: Numbers, fold: int | None, penalty: float) -> Numbers | None:
        """Return the weights (H, q) of least squares before a backtest, with a penalty on the change of a prior.

        None if there are too few origins.   fold: number of the backtest; None: at all rows.
        """
        lags = prior.shape[1]
        if (lags, fold) not in self._sums:
            self._sums[lags, fold] = _Sums.of(self, self.learnt(lags, fold), lags)
        sums = self._sums[lags, fold]
        if sums.count < MIN_FITTED_ORIGINS:
            return None
        eye = penalty * np.eye(lags)
        if sums.absent is None:
            return prior + np.linalg.solve(sums.products + eye, sums.along - sums.products @ prior.T).T
        change = np.zeros_like(prior)
        for h, x in enumerate(sums.absent):
            products = sums.products - x.T @ x
            change[h] = np.linalg.solve(products + eye, sums.along[:, h] - products @ prior[h])
        return prior + change

    def ahead(self, weights: Numbers, rows: Rows) -> Numbers:
        """Return the forecasts (n, H) of a map at some origins, normalised."""
        return self.values[rows, : weights.shape[1]] @ weights.T

    def numbers(self, normalized: Numbers, rows: Rows) -> Numbers:
        """Return normalised numbers (n, H) at some origins as they are in the table."""
        x = self.location[rows, None] + self.scale[rows, None] * normalized
        return np.exp(np.minimum(x, MOST_LOG)) if self.log else x

    def errors(self, forecasts: Numbers, rows: Rows) -> Numbers:
        """Return the errors (n, H) of normalised forecasts at some origins, in units of the seasonal naive's."""
        ahead, came = (self.numbers(z, rows) for z in (forecasts, self.came[rows]))
        if self.past.least is not None:
            ahead = np.maximum(ahead, self.past.least)
        if self.past.whole:
            ahead = np.round(ahead)
        return (came - ahead) / self.units[rows, None]

    def error(self, forecasts: Sequence[Numbers]) -> float:
        """Return the mean absolute error of forecasts as a ratio to the seasonal naive's: the mean over the backtests.

        So a backtest in which all errors are large counts as much as the others.
        """
        return float(self.ratios(forecasts).mean())

    def ratios(self, forecasts: Sequence[Numbers]) -> Numbers:
        """Return the mean absolute error in each backtest as a ratio to the seasonal naive's."""
        with np.errstate(over="ignore"):  # the seasonal naive may have no error at all
            return self._by_fold(forecasts) / self._of_naive

    def _by_fold(self, forecasts: Sequence[Numbers]) -> Numbers:
        """Return the error in each backtest: the mean over the steps ahead, since the last ones have fewer origins."""
        folds = zip(forecasts, self.folds, strict=True)
        return np.array([mean_error(self.errors(ahead, rows)) for ahead, (_, rows) in folds])

    @cached_property
    def _of_naive(self) -> Numbers:
        """The seasonal naive's error in each backtest; at least a hundredth of the mean of all."""
        season = self.past.season
        naive = LagMap("seasonal" if 1 < season <= self.lags else "naive", ()).weights(self.past.horizon, season)
        errors = self._by_fold([self.ahead(naive, rows) for _, rows in self.folds])
        return np.maximum(errors, max(errors.mean() / 100, np.finfo(np.float64).tiny))


def mean_error(errors: Numbers) -> float:
    """Return the mean of absolute errors (n, H) over the origins, and then over the steps ahead that an origin has."""
    known = ~np.isnan(errors)
    sums = np.where(known, np.abs(errors), 0.0).sum(0, dtype=np.float64)
    return float((sums[known.any(0)] / known.sum(0)[known.any(0)]).mean())


def _sample(inside: NDArray[np.bool_], limit: int) -> Rows:
    rows = np.flatnonzero(inside)
    return rows[sampled(len(rows), limit)]


@dataclass
class _Sums:
    """Sums over origins for least squares, which all penalties and priors have in common.

    products: (q, q), of the lags.   along: (q, H), of lags and numbers ahead.   absent: for each step ahead the lags
    (n, q) of the origins whose number is not known; None if all are.
    """

    count: int
    products: Numbers
    along: Numbers
    absent: list[Numbers] | None

    @classmethod
    def of(cls, windows: BacktestWindows, rows: Rows, lags: int) -> "_Sums":
        x, came = windows.values[rows, :lags], windows.came[rows]
        known = ~np.isnan(came)
        absent = None if known.all() else [x[~one] for one in known.T]
        return cls(len(rows), x.T @ x, x.T @ np.where(known, came, 0.0), absent)


@dataclass
class Trial:
    """A map in the backtests: its weights, forecasts and error in each, and its weights from all rows."""

    map: LagMap
    weights: Numbers
    folds: list[Numbers]
    forecasts: list[Numbers]
    errors: Numbers

    @property
    def error(self) -> float:
        """The mean of its errors."""
        return float(self.errors.mean())


def trial(windows: BacktestWindows, one: LagMap) -> Trial | None:
    """Measure a map in the backtests; None for a ridge that has too few origins to learn from in one of them."""
    past = windows.past
    fixed = one.weights(past.horizon, past.season)
    folds, weights = [fixed] * len(windows.folds), fixed
    if one.prior is not None:
        fits = [windows.ridge(fixed, k, one.numbers[1]) for k in (*range(len(windows.folds)), None)]
        known = [fit for fit in fits if fit is not None]
        if len(known) < len(fits):
            return None
        *folds, weights = known
    forecasts = [windows.ahead(w, rows) for w, (_, rows) in zip(folds, windows.folds, strict=True)]
    return Trial(one, weights, folds, forecasts, windows.ratios(forecasts))


def combined(windows: BacktestWindows, trials: Sequence[Trial], without: int | None = None) -> list[Trial]:
    """Return the trials whose mean forecast is the best guess.

    With few origins these are the best trial of each family whose error is at most 1.2 times the lowest. A choice among
    many combinations would fit the chance of the backtests.
    without: number of a backtest that does not count. Errors in it are then those of forecasts that did not see it.
    """
    counted = [k for k in range(len(windows.folds)) if k != without]
    errors = {id(one): float(one.errors[counted].mean()) for one in trials}
    trials = sorted(trials, key=lambda one: errors[id(one)])
    if sum(len(rows) for _, rows in windows.folds) >= CERTAIN:
        return _step_by_step(windows, trials[:60], counted)
    best: dict[tuple[str, int, str], Trial] = {}
    for one in trials:
        if errors[id(one)] <= MAX_ERROR_RATIO * errors[id(trials[0])]:
            prior = "" if one.map.prior is None else one.map.prior.family[:1]
            best.setdefault((one.map.family, len(one.map.numbers), prior), one)
    return list(best.values())


def mean(trials: Sequence[Trial]) -> list[Numbers]:
    """Return the mean forecasts of trials in the backtests."""
    return [np.mean(folds, 0) for folds in zip(*(one.forecasts for one in trials), strict=True)]


def mean_weights(weights: Sequence[Numbers]) -> Numbers:
    """Return the mean (H, q) of weights, of which some have fewer lags."""
    lags = max(one.shape[1] for one in weights)
    return np.mean([widened(one, lags) for one in weights], 0)


def _step_by_step(
    windows: BacktestWindows, trials: Sequence[Trial], counted: Sequence[int], first: int = 3, size: int = 10
) -> list[Trial]:
    """Return trials, some of them several times: the `first` best, then step by step what lowers the error most.

    counted: numbers of the backtests.
    Source: Caruana et al., "Ensemble Selection from Libraries of Models", ICML 2004, section 2.
    """

    def error(total: Sequence[Numbers], count: int) -> float:
        return float(windows.ratios([ahead / count for ahead in total])[counted].mean())

    chosen = list(trials[:first])
    total = [np.sum(parts, 0) for parts in zip(*(one.forecasts for one in chosen), strict=True)]
    lowest, best = error(total, len(chosen)), len(chosen)
    while len(chosen) < size:
        errors = [
            error([old + new for old, new in zip(total, one.forecasts, strict=True)], len(chosen) + 1) for one in trials
        ]
        k = int(np.argmin(errors))
        chosen.append(trials[k])
        total = [old + new for old, new in zip(total, trials[k].forecasts, strict=True)]
        if errors[k] < lowest:
            lowest, best = errors[k], len(chosen)
    return chosen[:best]
