"""The numbers of several series in one array, from which windows are cut, and their scales."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.series.columns import Numbers
from scanl.data.series.naive import unit_of
from scanl.data.series.series import Series
from scanl.series_columns import SeriesColumns

T = TypeVar("T")
Origin = tuple[int, int, int]  # of a forecast: series, number of steps that are read, and the last row that is read
BATCH = 64  # rows of a batch of a measurement


def in_batches(pieces: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield a list in parts of at most `BATCH`."""
    yield from (pieces[begin : begin + BATCH] for begin in range(0, len(pieces), BATCH))


class SeriesRows:
    """The steps of all series one after the other. Behind each series are `pad` rows, in which all is missing.

    starts: first row of each series.   spans: durations of the steps, 1 behind a series; None where all are one step.
    """

    def __init__(self, series: Sequence[Series], pad: int) -> None:
        self.series, self.pad = series, pad
        self.starts = np.cumsum([0, *(len(member) + pad for member in series[:-1])])
        self.static = np.stack([member.static for member in series])
        spans = [member.spans for member in series if member.spans is not None]
        self.spans = self.joined(spans, 1.0) if spans else None

    def joined(self, parts: Sequence[NDArray[Any]], fill: float = np.nan) -> NDArray[Any]:
        """Return an array (n, ...) of each series as rows; behind each series they have the value `fill`."""
        behind = np.full((self.pad, *parts[0].shape[1:]), fill, parts[0].dtype)
        return np.concatenate([rows for array in parts for rows in (array, behind)])

    @cached_property
    def target(self) -> NDArray[Any]:
        return self.joined([member.target for member in self.series])

    @cached_property
    def past(self) -> Numbers:
        return self.joined([member.past for member in self.series])

    @cached_property
    def future(self) -> Numbers:
        return self.joined([member.future for member in self.series])

    @cached_property
    def features(self) -> Numbers:
        """The covariates of the past and the static ones at each row, and its duration if it has one."""
        static = self.joined(
            [np.broadcast_to(member.static, (len(member), len(member.static))) for member in self.series]
        )
        spans = [] if self.spans is None else [self.spans[:, None]]
        return np.hstack([self.past, static, *spans])

    def columns(self, rows: NDArray[np.int64], ahead: int) -> SeriesColumns:
        """Return the columns of windows of rows (N, T); of what is known ahead, also the `ahead` rows after them."""
        series, known = np.searchsorted(self.starts, rows[:, 0], side="right") - 1, reaching(rows, ahead)
        spans = self.durations(known)
        return SeriesColumns(self.target[rows], self.past[rows], self.static[series], self.future[known], spans)

    def ending(self, origins: Sequence[Origin]) -> Iterator[tuple[list[int], NDArray[np.int64]]]:
        """Yield windows that end at some origins, equal lengths together: numbers of origins, and their rows (N, T)."""
        by_length: dict[int, list[int]] = {}
        for number, (_, length, _) in enumerate(origins):
            by_length.setdefault(length, []).append(number)
        for length, of_length in by_length.items():
            for some in in_batches(of_length):
                last = np.array([self.starts[origins[number][0]] + origins[number][2] for number in some])
                yield list(some), last[:, None] + np.arange(1 - length, 1)

    def aligned(self, numbers: Sequence[int], length: int) -> NDArray[np.int64]:
        """Return the last `length` rows (N, T) of some series; shorter ones begin with missing rows.

        Row -1 of a series is the padding behind the previous series, or behind the last one.
        """
        back = np.arange(length) - length
        return np.stack([self.starts[i] + np.maximum(len(self.series[i]) + back, -1) for i in numbers])

    def durations(self, rows: NDArray[np.int64]) -> Numbers | None:
        """Return the durations of windows of rows (N, T), if steps have any."""
        return None if self.spans is None else self.spans[rows]


def reaching(rows: NDArray[np.int64], ahead: int) -> NDArray[np.int64]:
    """Return windows of rows (N, T) with the `ahead` rows after each."""
    return np.hstack([rows, rows[:, -1:] + 1 + np.arange(ahead)])


def scale_of(values: Numbers, weights: Numbers | None = None) -> tuple[float, float]:
    """Return mean and standard deviation of the known numbers, in float64.

    weights: of the numbers, at least 0; a weight of 2 counts as the number twice. None: all are equal.

    For a constant, up to rounding, the deviation is its absolute value instead, or 1 where that is 0.
    """
    counted = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
    known = values[counted].astype(np.float64)
    if not known.any():
        return 0.0, 1.0
    unit = float(unit_of(known))
    if weights is None:
        mean, deviation = float((known / unit).mean()), float((known / unit).std())
    else:
        mean = float(np.average(known / unit, weights=weights[counted]))
        deviation = float(np.average((known / unit - mean) ** 2, weights=weights[counted])) ** 0.5
    constant = deviation <= np.finfo(np.float64).eps * abs(mean)
    return unit * mean, unit * (abs(mean) if constant else deviation)


def scales_of(columns: Numbers) -> tuple[tuple[float, float], ...]:
    """Return the scale of each column of an array (n, C)."""
    return tuple(scale_of(values) for values in columns.T)
