r"""Linear maps of the last values of a series to the next ones: simple forecasts, of which a mean is taken.

.. math:: \hat y_{t+h} = \sum_{k=0}^{q-1} W_{h,k} \, y_{t-k}

A map has a name with numbers, such as `seasonal`, `drift(12)` or `smoothing(24, 0.3)`:

- `naive`: the last value.   `seasonal`: the value of a season ago.
- `mean(k)`: the mean of the last k values.   `seasonal_mean(k)`: the mean of the last k seasons.
- `drift(k)`: the last value, and for each step ahead the mean change of the last k steps.
- `level(k, f)`: the value of a season ago, and f times the mean change over a season of the last k values.
- `smoothing(q, a)`, `smoothing(q, a, b, p)`: exponential smoothing of the level with the gain a, and of a trend with
  the gain b and the damping p, over the last q values.   `seasonal_smoothing(q, a, g)`, `seasonal_smoothing(q, a, g, b,
  p)`: with an additive season of the gain g. Source: Hyndman and Athanasopoulos, "Forecasting: Principles and
  Practice", 3rd ed., 2021, sections 8.1 to 8.3, in the form with errors of section 8.5. Differs: level, trend and
  season begin with the means of the first two seasons of the q values.
- `ridge(q, penalty, prior)`: least squares on the last q values. The penalty is on the difference from another map, the
  prior. `zero` is a prior: the forecast is then the location of the normalisation.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.errors import ConfigError, nearest

Numbers = NDArray[np.float64]
GAINS = (0.05, 0.1, 0.2, 0.4, 0.7, 0.95)  # of the level
SEASON_GAINS = (0.0, 0.05, 0.15, 0.4)
TRENDS = ((0.02, 0.9), (0.02, 1.0), (0.1, 0.9), (0.1, 1.0))  # gain relative to the level's, and damping
COUNTS = {  # how many numbers a name has
    "naive": (0,), "seasonal": (0,), "zero": (0,), "seasonal_mean": (1,), "mean": (1,), "drift": (1,), "level": (2,),
    "smoothing": (2, 4), "seasonal_smoothing": (3, 5), "ridge": (2,),
}  # fmt: skip


class LagMap(NamedTuple):
    """The name of a map: its family, its numbers, and the prior of a ridge."""

    family: str
    numbers: tuple[float, ...]
    prior: "LagMap | None" = None

    @classmethod
    def of(cls, name: str) -> "LagMap":
        """Read a name. Raises ConfigError for a name that is no map."""
        match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", name)
        if match is None:
            raise ConfigError(f"start: {name!r} is no map of lags, expected a name such as seasonal or drift(12)")
        family, inside = match[1], match[2] or ""
        if family not in COUNTS:
            raise nearest("start", family, list(COUNTS))
        words = inside.split(",", 2 if family == "ridge" else -1)
        prior = cls.of(words.pop()) if family == "ridge" and len(words) == 3 else None
        try:
            numbers = tuple(float(word) for word in words if word.strip())
        except ValueError:
            numbers = (float("nan"),)
        if (
            len(numbers) not in COUNTS[family]
            or not all(number >= 0 for number in numbers)
            or (family == "ridge" and (prior is None or prior.family == "ridge"))
        ):
            counts = " or ".join(map(str, COUNTS[family]))
            ending = " and a prior" if family == "ridge" else ""
            raise ConfigError(f"start: {name!r} has ({inside}), expected {counts} numbers of at least 0{ending}")
        return cls(family, numbers, prior)

    def __str__(self) -> str:
        inside = [f"{number:g}" for number in self.numbers] + ([] if self.prior is None else [str(self.prior)])
        return f"{self.family}({', '.join(inside)})" if inside else self.family

    def lags(self, season: int) -> int:
        """Return q, how many last values the map reads."""
        first = int(self.numbers[0]) if self.numbers else 0
        count = {
            "naive": 1, "zero": 1, "seasonal": season, "seasonal_mean": first * season, "drift": first + 1,
            "level": season + first,
        }.get(self.family, first)  # fmt: skip
        return max(1, count, 0 if self.prior is None else self.prior.lags(season))

    def weights(self, horizon: int, season: int) -> Numbers:
        """Return W (horizon, q), which must not be changed. Of a ridge: that of its prior."""
        return _weights(self, horizon, season)

    def made(self, horizon: int, season: int) -> Numbers:
        """Return a new W (horizon, q)."""
        lags, ahead = self.lags(season), np.arange(horizon)[:, None]
        if self.prior is not None:
            return widened(self.prior.weights(horizon, season), lags)
        eye = np.eye(lags)
        last = season - 1 - ahead[:, 0] % season  # lag of the value that is whole seasons before each step ahead
        if self.family == "zero":
            return np.zeros((horizon, lags))
        if self.family == "naive":
            return np.tile(eye[0], (horizon, 1))
        if self.family == "mean":
            return np.tile(eye.mean(0), (horizon, 1))
        if self.family == "drift":
            return eye[0] + (ahead + 1) * (eye[0] - eye[-1]) / max(1, lags - 1)
        if self.family == "seasonal_mean":
            return np.mean([eye[last + season * k] for k in range(int(self.numbers[0]))], 0)
        if self.family == "level":
            count = int(self.numbers[0])
            return eye[last] + self.numbers[1] * (eye[:count] - eye[season : season + count]).mean(0)
        if self.family == "smoothing":
            return _smoothing(lags, horizon, 1, self.numbers[1], 0.0, *self.numbers[2:])
        if self.family == "seasonal_smoothing":
            return _smoothing(lags, horizon, season, *self.numbers[1:])
        return eye[last]


@functools.lru_cache(maxsize=2048)  # the numbers and their logarithms have the same maps
def _weights(one: LagMap, horizon: int, season: int) -> Numbers:
    return one.made(horizon, season)


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


def candidates(lags: int, season: int) -> Iterator[LagMap]:
    """Yield the maps that are tried, except ridges, those over windows with `lags` values."""
    yield LagMap("naive", ())
    if 1 < season <= lags:
        yield LagMap("seasonal", ())
        yield from (LagMap("seasonal_mean", (k,)) for k in (2, 3, 4) if k * season <= lags)
        for count in sorted({1, 3, 6, 12, season}):
            if season + count <= lags:
                yield from (LagMap("level", (count, factor)) for factor in (0.5, 0.8, 1.0))
    for count in sorted({4, 12, lags}):
        if count <= lags:
            yield LagMap("mean", (count,))
        if count < lags:
            yield LagMap("drift", (count,))
    for gain in GAINS:
        trends = [(), *((round(gain * trend, 6), damping) for trend, damping in TRENDS)]
        yield from (LagMap("smoothing", (lags, gain, *trend)) for trend in trends)
        if 1 < season <= lags / 2:
            for of_season in sorted({min(one, round(1 - gain, 6)) for one in SEASON_GAINS}):
                yield from (LagMap("seasonal_smoothing", (lags, gain, of_season, *trend)) for trend in trends)


def widened(weights: Numbers, lags: int) -> Numbers:
    """Return weights (H, q) with zeros for further lags: (H, lags)."""
    return np.pad(weights, ((0, 0), (0, lags - weights.shape[1])))
