"""The numbers of several series in one array, from which windows are cut as the channels of a question."""

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED
from scanl.data.columns import Numbers
from scanl.data.naive import unit_of
from scanl.data.series import Series


class Rows:
    """The numbers of all series one after the other. Behind each series are rows of padding, in which all is missing.

    once: the channels that a step has once: targets, past, static.   ahead: covariates known ahead.
    starts: first row of each series.
    """

    def __init__(self, each: list[Series], kind: str, length: int, horizon: int) -> None:
        forecast = kind == "horizon"
        self.horizon, self.static = (horizon if forecast else 0), len(each[0].static)
        pad = length + horizon
        self.starts = np.cumsum([0, *(len(one) + pad for one in each[:-1])])
        once, ahead = [], []
        for one in each:
            constant = np.broadcast_to(one.static, (len(one), self.static))
            once.append(_padded(np.hstack([one.target, one.past, constant] if forecast else [one.past, constant]), pad))
            ahead.append(_padded(one.future, pad))
        self.once, self.ahead = np.concatenate(once), np.concatenate(ahead)
        self.answers = self.once[:, : each[0].target.shape[1]] if forecast else self.once
        if kind == "label":
            labels = [np.concatenate([one.target, np.full(pad, -1)]) for one in each]
            self.labels = np.concatenate(labels)
            self.labels[self.labels < 0] = IGNORED
        self.spans = None
        if each[0].spans is not None:
            spans = [np.concatenate([one.spans, np.ones(pad)]) for one in each if one.spans is not None]
            self.spans = np.concatenate(spans)
            self.clock = self.spans.cumsum()

    def inputs(self, rows: NDArray[np.int64]) -> Numbers:
        """Return the channels of rows (N, T), as `Question` lays them out. The model standardises them, then casts."""
        parts = [self.once[rows]]
        after = rows[..., None] + 1 + np.arange(self.horizon)
        ahead = self.ahead[after] if self.horizon else np.zeros((*rows.shape, 0, 0))
        if self.spans is not None and self.horizon:
            ahead = np.concatenate([ahead, (self.clock[after] - self.clock[rows][..., None])[..., None]], -1)
        parts.append(ahead.reshape(*rows.shape, -1))
        if self.spans is not None:
            parts.append(self.spans[rows][..., None])
        return np.concatenate(parts, -1)


def _padded(values: Numbers, pad: int) -> Numbers:
    return np.concatenate([values, np.full((pad, values.shape[1]), np.nan)])


def scale_of(values: Numbers) -> tuple[float, float]:
    """Return mean and standard deviation of what is known, in float64.

    For a constant, up to rounding, the deviation is its absolute value instead, or 1 where that is 0.
    """
    known = values[~np.isnan(values)].astype(np.float64)
    if not known.any():
        return 0.0, 1.0
    unit = float(unit_of(known))
    mean, deviation = float((known / unit).mean()), float((known / unit).std())
    constant = deviation <= np.finfo(np.float64).eps * abs(mean)
    return unit * mean, unit * (abs(mean) if constant else deviation)
