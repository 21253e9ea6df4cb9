"""Intervals of a simple forecast, from its errors in backtests.

They are honest with few errors: each backtest measures the forecast that the others choose, and the fewer errors there
are, the wider are the intervals. The errors are in units of the recent errors before an origin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scanl.data.base import LEVELS
from scanl.learning.forecasting.backtests import BacktestWindows
from scanl.learning.forecasting.lag_maps import Numbers
from scanl.models.forecasting.recent_errors import further_lags, recent_factor

MIN_ERRORS = 200  # errors at a step ahead from which its own quantiles are taken
LEAST_ERROR = 1e-9  # of a forecast, in units of the running scale
ALIKE = 4.0  # independent errors with which the two sides of the median count half for each other


@dataclass
class Intervals:
    """Errors of a simple forecast, in units of the running scale.

    quantiles: (C, H, Q), where recent errors are as usual.   usual: (C, H), the mean absolute error.
    """

    quantiles: Numbers
    usual: Numbers

    @classmethod
    def of(cls, windows: BacktestWindows, weights: Sequence[Numbers], channels: int) -> "Intervals":
        """Return those of weights (H, q) in each backtest.

        A step ahead with many errors has their quantiles. Otherwise these have the shape that the errors of all steps
        have, and the mean absolute error at the step as their unit. The fewer errors there are, the more alike are both
        sides of the median, and the wider are the quantiles. The median is 0.
        """
        folds = list(zip(weights, (rows for _, rows in windows.folds), strict=True))
        errors = np.concatenate([windows.came[rows] - windows.ahead(w, rows) for w, rows in folds])
        channel = np.concatenate([windows.array[rows] for _, rows in folds]) % channels
        usual = np.stack([_mean_absolute(errors[channel == k]) for k in range(channels)])
        recent = []
        for w, rows in folds:
            past = [one[:, ::-1] for one in windows.history(rows, w.shape[1] - 1 + further_lags(len(w)))]
            arguments = (*past, windows.scale[rows], w, usual[windows.array[rows] % channels])
            recent.append(recent_factor(*(torch.from_numpy(one.copy()) for one in arguments)).numpy())
        errors /= np.concatenate(recent)[:, None]
        return cls(np.stack([_quantiles(errors[channel == k], usual[k]) for k in range(channels)]), usual)


def _mean_absolute(errors: Numbers) -> Numbers:
    """Return the mean (H,) of absolute errors (n, H); at a step without one that of all steps."""
    known = ~np.isnan(errors)
    absolute, counts = np.where(known, np.abs(errors), 0.0), known.sum(0)
    overall = absolute.sum() / max(1, counts.sum())
    return np.maximum(np.where(counts, absolute.sum(0) / counts.clip(1), overall), LEAST_ERROR)


def _quantiles(errors: Numbers, usual: Numbers) -> Numbers:
    """Return the quantiles (H, Q) of the errors (n, H) of a channel; see `Intervals.of`."""
    levels = np.array(LEVELS)
    independent = max(1.0, len(errors) / len(usual))  # forecasts from later origins share most of their numbers
    relative = errors / usual
    shape, even = np.nanquantile(relative, levels), np.nanquantile(np.abs(relative), np.abs(2 * levels - 1))
    alike = ALIKE / (ALIKE + independent)
    shape = (1 + 1 / independent) * ((1 - alike) * shape + alike * np.sign(levels - 0.5) * even)
    table = usual[:, None] * shape
    for h in np.flatnonzero((~np.isnan(errors)).sum(0) >= MIN_ERRORS):
        table[h] = np.nanquantile(errors[:, h], levels)
    table = np.where(levels < 0.5, np.minimum(table, 0), np.maximum(table, 0))
    table[:, LEVELS.index(0.5)] = 0
    return table
