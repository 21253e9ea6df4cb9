r"""Linear maps of the last values of a series to the next ones: simple forecasts, of which a mean is taken.

.. math:: \hat y_{t+h} = \sum_{k=0}^{q-1} W_{h,k} \, y_{t-k}

A map has a name with numbers, such as `seasonal`, `drift(12)` or `smoothing(24, 0.3)`. Each family of maps is a
function of these numbers.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.errors import ConfigError, nearest

Numbers = NDArray[np.float64]
Given = tuple[float, ...]  # the numbers of a map
GAINS = (0.05, 0.1, 0.2, 0.4, 0.7, 0.95)  # of the level
SEASON_GAINS = (0.0, 0.05, 0.15, 0.4)
TRENDS = ((0.02, 0.9), (0.02, 1.0), (0.1, 0.9), (0.1, 1.0))  # gain relative to the level's, and damping


class LagFamily(NamedTuple):
    """A family of maps, whose name is followed by some count of numbers.

    weights: returns W (H, q) of the unit vectors (q, q) of the last values, of H, the season and the numbers.   lags:
    returns q of the season and the numbers.   tried: returns the numbers of the maps that are tried, of q and the
    season.
    """

    weights: Callable[..., Numbers]
    counts: tuple[int, ...]
    lags: Callable[..., float]
    tried: Callable[[int, int], Iterable[Given]]


FAMILIES: dict[str, LagFamily] = {}


def family(
    *counts: int,
    lags: Callable[..., float] = lambda season, *numbers: numbers[0] if numbers else 1,
    tried: Callable[[int, int], Iterable[Given]] = lambda lags, season: (),
) -> Callable[..., Any]:
    """Decorator: add the family of some weights, under the name of the function."""

    def add(weights: Callable[..., Numbers]) -> Callable[..., Numbers]:
        FAMILIES[weights.__name__] = LagFamily(weights, counts, lags, tried)
        return weights

    return add


class LagMap(NamedTuple):
    """The name of a map: its family, its numbers, and the prior of a ridge."""

    family: str
    numbers: Given
    prior: "LagMap | None" = None

    @classmethod
    def of(cls, name: str) -> "LagMap":
        """Read a name. Raises ConfigError for a name that is no map."""
        match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", name)
        if match is None:
            raise ConfigError(f"start: {name!r} is no map of lags, expected a name such as seasonal or drift(12)")
        family, inside = match[1], match[2] or ""
        if family not in FAMILIES:
            raise nearest("start", family, list(FAMILIES))
        counts, is_ridge = FAMILIES[family].counts, family == ridge.__name__
        words = inside.split(",", 2 if is_ridge else -1)
        prior = cls.of(words.pop()) if is_ridge and len(words) == 3 else None
        try:
            numbers = tuple(float(word) for word in words if word.strip())
        except ValueError:
            numbers = (float("nan"),)
        valid = len(numbers) in counts and all(number >= 0 for number in numbers)
        if not valid or (is_ridge and (prior is None or prior.prior is not None)):
            expected = " or ".join(map(str, counts))
            ending = " and a prior" if is_ridge else ""
            raise ConfigError(f"start: {name!r} has ({inside}), expected {expected} numbers of at least 0{ending}")
        return cls(family, numbers, prior)

    def __str__(self) -> str:
        inside = [f"{number:g}" for number in self.numbers] + ([] if self.prior is None else [str(self.prior)])
        return f"{self.family}({', '.join(inside)})" if inside else self.family

    def lags(self, season: int) -> int:
        """Return q, the number of last values that the map reads."""
        own = int(FAMILIES[self.family].lags(season, *self.numbers))
        return max(1, own, 0 if self.prior is None else self.prior.lags(season))

    def weights(self, horizon: int, season: int) -> Numbers:
        """Return W (horizon, q), which must not be changed. Of a ridge: that of its prior."""
        return _weights(self, horizon, season)


@functools.lru_cache(maxsize=2048)  # the numbers and their logarithms have the same maps
def _weights(one: LagMap, horizon: int, season: int) -> Numbers:
    lags = one.lags(season)
    if one.prior is not None:
        return widened(one.prior.weights(horizon, season), lags)
    return FAMILIES[one.family].weights(np.eye(lags), horizon, season, *one.numbers)


def candidates(lags: int, season: int) -> Iterator[LagMap]:
    """Yield the maps that are tried, except ridges, those over windows with `lags` values."""
    for name, one in FAMILIES.items():
        yield from (LagMap(name, numbers) for numbers in one.tried(lags, season))


def widened(weights: Numbers, lags: int) -> Numbers:
    """Return weights (H, q) with zeros for further lags: (H, lags)."""
    return np.pad(weights, ((0, 0), (0, lags - weights.shape[1])))


@family(0, tried=lambda lags, season: [()])
def naive(last: Numbers, horizon: int, season: int) -> Numbers:
    """The last value."""
    return np.tile(last[0], (horizon, 1))


@family(0, lags=lambda season: season, tried=lambda lags, season: [()] if 1 < season <= lags else [])
def seasonal(last: Numbers, horizon: int, season: int) -> Numbers:
    """The value of a season ago."""
    return last[season - 1 - np.arange(horizon) % season]


@family(
    1,
    lags=lambda season, k: k * season,
    tried=lambda lags, season: [(k,) for k in (2, 3, 4) if season > 1 and k * season <= lags],
)
def seasonal_mean(last: Numbers, horizon: int, season: int, k: float) -> Numbers:
    """The mean of the last k seasons."""
    return np.mean([seasonal(last[season * i :], horizon, season) for i in range(int(k))], 0)


@family(
    2,
    lags=lambda season, k, _: season + int(k),
    tried=lambda lags, season: [
        (k, factor) for k in sorted({1, 3, 6, 12, season}) for factor in (0.5, 0.8, 1.0) if 1 < season <= lags - k
    ],
)
def level(last: Numbers, horizon: int, season: int, k: float, factor: float) -> Numbers:
    """The value of a season ago, and `factor` times the mean change over a season of the last k values."""
    change = last[: int(k)] - last[season : season + int(k)]
    return seasonal(last, horizon, season) + factor * change.mean(0)


@family(1, tried=lambda lags, season: [(k,) for k in sorted({4, 12, lags}) if k <= lags])
def mean(last: Numbers, horizon: int, season: int, k: float) -> Numbers:
    """The mean of the last k values."""
    return np.tile(last.mean(0), (horizon, 1))


@family(1, lags=lambda season, k: k + 1, tried=lambda lags, season: [(k,) for k in (4, 12) if k < lags])
def drift(last: Numbers, horizon: int, season: int, k: float) -> Numbers:
    """The last value, and for each step ahead the mean change of the last k steps."""
    return last[0] + np.arange(1, horizon + 1)[:, None] * (last[0] - last[-1]) / max(1, len(last) - 1)


def _smoothings(lags: int, season: int) -> Iterator[Given]:
    """Yield q, the gain of the level, that of the season if it is more than a step, and gain and damping of a trend."""
    for gain in GAINS:
        trends = [(), *((round(gain * trend, 6), damping) for trend, damping in TRENDS)]
        seasons = [()] if season == 1 else sorted({(min(one, round(1 - gain, 6)),) for one in SEASON_GAINS})
        yield from ((lags, gain, *of_season, *trend) for of_season in seasons for trend in trends)


@family(2, 4, tried=lambda lags, season: _smoothings(lags, 1))
def smoothing(last: Numbers, horizon: int, season: int, q: float, gain: float, *trend: float) -> Numbers:
    """Exponential smoothing over the last q values, with the gain of the level, and gain and damping of a trend.

    Source: Hyndman and Athanasopoulos, "Forecasting: Principles and Practice", 3rd ed., 2021, sections 8.1 to 8.3, in
    the form with errors of section 8.5. Differs: level, trend and season begin with the means of the first two seasons
    of the q values.
    """
    return _smoothing(len(last), horizon, 1, gain, 0.0, *trend)


@family(3, 5, tried=lambda lags, season: _smoothings(lags, season) if 1 < season <= lags / 2 else [])
def seasonal_smoothing(last: Numbers, horizon: int, season: int, q: float, *gains: float) -> Numbers:
    """`smoothing` with an additive season, whose gain is behind that of the level."""
    return _smoothing(len(last), horizon, season, *gains)


@family(0)
def zero(last: Numbers, horizon: int, season: int) -> Numbers:
    """Zero. As the prior of a ridge: the location of the normalisation."""
    return np.zeros((horizon, len(last)))


@family(2)
def ridge(last: Numbers, horizon: int, season: int, q: float, penalty: float) -> Numbers:
    """Zero, the change of another map, the prior: least squares on the last q values has a penalty on it."""
    return np.zeros((horizon, len(last)))


def _smoothing(
    lags: int, horizon: int, season: int, gain: float, season_gain: float, trend: float = 0.0, damping: float = 1.0
) -> Numbers:
    """Run exponential smoothing on unit vectors, because its forecast is linear in the values."""
    values = np.eye(lags)  # in the order of time
    slope = np.zeros(lags)
    if season > 1 and lags >= 2 * season:
        first, second = values[:season].mean(0), values[season : 2 * season].mean(0)
        seasons = [(values[k] - first + values[season + k] - second) / 2 for k in range(season)]
        slope = (second - first) / season if trend else slope
        level = first - slope * (season + 1) / 2
    else:
        season, season_gain, seasons = 1, 0.0, [np.zeros(lags)]
        steps = min(lags - 1, 3)
        slope = (values[steps] - values[0]) / steps if trend and steps else slope
        level = values[0] - slope
    for t in range(lags):
        error = values[t] - level - damping * slope - seasons[t % season]
        level = level + damping * slope + gain * error
        slope = damping * slope + trend * error
        seasons[t % season] = seasons[t % season] + season_gain * error
    growth = np.cumsum(damping ** np.arange(1, horizon + 1))
    return np.stack([level + growth[h] * slope + seasons[(lags + h) % season] for h in range(horizon)])[:, ::-1]
