r"""The seasonal naive forecast: each step is as it was a season ago. Forecasts are compared with it.

.. math:: \hat y_{t+h} = y_{t+h-mk}, \quad \sigma_h = \sigma \sqrt{k}, \quad k = \lceil h / m \rceil

σ is the root of the mean square of y_t - y_{t-m} in training; the quantiles come from a normal distribution.
Source: Hyndman and Athanasopoulos, "Forecasting: Principles and Practice", 3rd ed., 2021, sections 5.2 and 5.5. The
scale of errors is the mean of abs(y_t - y_{t-m}) in training: Hyndman and Koehler, "Another Look at Measures of
Forecast Accuracy", International Journal of Forecasting 22(4), 2006, section 3 (MASE).
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def season_errors(y: Numbers, season: int) -> tuple[Numbers, Numbers]:
    """Return the mean absolute value and the root mean square of y_t - y_{t-m}, (C,) each, of y (n, C).

    The results are NaN where no pair of such numbers is known. For a series that is not longer than a season, m is 1.
    """
    season = season if len(y) > season else 1
    off = y[season:] - y[:-season]
    known = np.maximum((~np.isnan(off)).sum(0), 1)
    none = np.isnan(off).all(0) if len(off) else np.ones(y.shape[1], bool)
    off = np.nan_to_num(off)
    unit = unit_of(off)
    mean, root = np.abs(off / unit).sum(0) / known, np.sqrt(((off / unit) ** 2).sum(0) / known)
    return np.where(none, np.nan, unit * mean), np.where(none, np.nan, unit * root)


def unit_of(values: Numbers) -> Numbers:
    """Return, for each column of (n, ...), a power of two at least as large as every number, or 1 if all are 0.

    In this unit the square of a number neither overflows nor becomes 0, and the division has no rounding.
    """
    largest = np.abs(values).max(0, initial=0.0)
    return np.where(largest > 0, np.ldexp(1.0, np.minimum(np.frexp(largest)[1], 1023)), 1.0)


def naive(y: Numbers, season: int, horizon: int, spread: Numbers, levels: Sequence[float]) -> Numbers:
    """Forecast the `horizon` steps after the history y (n, C): quantiles (horizon, C, Q).

    spread: σ, (C,).   If the number of a season ago is missing, it is replaced by the last known number at that point
    of the season, or else by the last known number, or by 0.
    """
    season = season if len(y) >= season else 1
    filled = np.nan_to_num(_filled(y, len(y)))[-1]
    points = min(season, horizon)
    last = np.empty((points, y.shape[1]))
    for point in range(points):  # the steps of the season that are forecast
        at = y[len(y) - season + point :: -season][:, :]
        known = ~np.isnan(at)
        first = known.argmax(0)
        last[point] = np.where(known.any(0), at[first, np.arange(y.shape[1])], filled)
    ahead = np.arange(horizon)
    widths = np.sqrt(ahead // season + 1)[:, None] * spread
    normal = np.array([NormalDist().inv_cdf(level) for level in levels])
    return last[ahead % season][..., None] + widths[..., None] * normal


def _filled(y: Numbers, rows: int) -> Numbers:
    """Replace each missing number by the last known one before it."""
    places = np.where(np.isnan(y), 0, np.arange(rows)[:, None])
    return np.take_along_axis(y, np.maximum.accumulate(places, 0), 0)
