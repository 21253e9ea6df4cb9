r"""Simple forecasts of series, all as recurrences: what `PretrainedForecaster` weighs.

A smoothing has a level l, a trend b and up to two seasons r and s, of m and n steps:

.. math::
    \hat y_{t+h} = l_t + (\varphi + \dots + \varphi^h) b_t + r_{t+h-m\lceil h/m \rceil} + s_{t+h-n\lceil h/n \rceil}

    l_t = l_{t-1} + \varphi b_{t-1} + \alpha_t e_t, \quad b_t = \varphi b_{t-1} + \alpha_t \beta e_t, \quad
    r_t = r_{t-m} + \gamma_t (1 - \alpha_t) e_t, \quad s_t = s_{t-n} + \delta_t (1 - \alpha_t) e_t

e_t is the error of the forecast of y_t, or 0 where y_t is missing. A gain is at least one over the number of errors
that it has corrected, so that the first values count alike. The seasons of the first whole season of values, and later
those of the first two, are their distances from its mean.
Source: Hyndman, Koehler, Ord and Snyder, "Forecasting with Exponential Smoothing", Springer 2008, chapters 2 and 14.

Beside smoothings there are the seasonal naive forecast of either season, with and without the change from season to
season, the drift, a smoothing with half the drift (Assimakopoulos and Nikolopoulos, "The theta model", International
Journal of Forecasting 16, 2000), and three autoregressions by recursive least squares, the step ahead iterated. All are
computed in float64 relative to the first value, so each is exact for c y + d if it is for y.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]
Values = Any  # arrays here, and tensors where the model holds the same state

#  α, β, φ, γ, δ
SMOOTHINGS = np.array(
    [
        (1.0, 0.0, 0.0, 0.0, 0.0),
        (0.5, 0.0, 0.0, 0.0, 0.0),
        (0.2, 0.0, 0.0, 0.0, 0.0),
        (0.07, 0.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (0.6, 0.1, 0.9, 0.0, 0.0),
        (0.3, 0.1, 0.97, 0.0, 0.0),
        (0.5, 0.05, 1.0, 0.0, 0.0),
        (0.03, 0.0, 0.0, 0.1, 0.0),
        (0.1, 0.0, 0.0, 0.1, 0.0),
        (0.3, 0.0, 0.0, 0.1, 0.0),
        (0.6, 0.0, 0.0, 0.15, 0.0),
        (0.95, 0.0, 0.0, 0.1, 0.0),
        (0.2, 0.1, 0.97, 0.2, 0.0),
        (0.4, 0.05, 0.99, 0.2, 0.0),
        (0.05, 0.0, 0.0, 0.4, 0.0),
        (0.1, 0.0, 0.0, 0.1, 0.1),
        (0.5, 0.0, 0.0, 0.1, 0.15),
        (0.03, 0.0, 0.0, 0.05, 0.3),
        (0.1, 0.0, 0.0, 0.0, 0.2),
        (0.5, 0.0, 0.0, 0.0, 0.2),
        (0.9, 0.1, 0.9, 0.0, 0.0),
        (0.8, 0.3, 0.85, 0.0, 0.0),
        (0.1, 0.1, 0.98, 0.1, 0.0),
        (0.6, 0.1, 0.95, 0.15, 0.0),
        (0.9, 0.05, 0.97, 0.1, 0.0),
        (0.3, 0.05, 0.97, 0.1, 0.2),
    ]
)
ALPHA, BETA, PHI, GAMMA, DELTA = SMOOTHINGS.T
FIRST_SMOOTHINGS, SECOND_SMOOTHINGS = (
    np.flatnonzero(gains) for gains in (GAMMA, DELTA)
)  # smoothings with the first, the second season
FILLING = 10  # the smoothing whose forecast stands for a missing value
OTHERS = (
    "seasonal",
    "second seasonal",
    "seasonal drift",
    "drift",
    "theta",
    "autoregression",
    "seasonal autoregression",
    "seasonal regression",
)
THETA = 2  # the smoothing in the theta forecast
COUNT = len(SMOOTHINGS) + len(OTHERS)  # K
KNOTS = np.array([1, 3, 8, 24])  # steps ahead at which errors are followed
KEPT_STEPS = int(KNOTS[-1])  # steps of which forecasts are kept
RATES = np.array([0.1, 0.01])  # of the two running means of absolute errors
SHORT_LAGS = 4  # of the autoregression without a season
RIDGE = 4.0  # in mean squared differences of steps
LAGS = 7  # numbers that an autoregression reads: 1, and the lags 1 to 4; 1, 2, m, m + 1, n and n + 1; or m, 2 m and n
AR, SEASONAL_AR, REGRESSION = range(3)
PRIOR = np.array(  # weights before any value
    [[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 1.0, -0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
)


class Seasons(NamedTuple):
    """Steps of the first and of the second season of each row, (B,) each; 1 for none. The second may be the first."""

    first: Values
    second: Values


class SimpleState(NamedTuple):
    """State of the simple forecasts of B series. Values are relative to the first one.

    seasons: steps.   origin: the first value.   steps: steps since then.   known: known values.   missing: steps since
    the last one.   level, trend: (B, V).
    season, second: (B, ·, m) of the smoothings that have it.   past: (B, R), the last values, missing ones filled; the
    newest last.   ahead: (B, 24, K, J), forecasts after the last steps, J knots ahead.   errors: (B, K, J, 2), running
    means.   weights: (B, J), errors in them.   products, along: sums of the autoregressions.   sums: (B, 8), of
    absolute differences, their squares, their number, their recent mean, least, times at it, most, times at it.
    """

    seasons: Seasons
    origin: Values
    steps: Values
    known: Values
    missing: Values
    level: Values
    trend: Values
    season: Values
    second: Values
    past: Values
    ahead: Values
    errors: Values
    weights: Values
    products: Values
    along: Values
    sums: Values


class SimpleSteps(NamedTuple):
    """What is known after each of T steps.

    value: (B, T), relative to the first value; missing ones filled.   is_known: (B, T).   steps, known: (B, T), steps
    and known values so far.   missing: (B, T), steps since the last known value.   scale, recent: (B, T), running means
    of absolute differences.   off: (B, T, K), errors of the forecasts of this step, 0 where it is missing.   errors:
    (B, T, K, J, 2) and weights (B, T, J), as in the state.   least, most: (B, T), and the shares of the values that are
    equal to them.
    """

    value: Values
    is_known: Values
    steps: Values
    known: Values
    missing: Values
    scale: Values
    recent: Values
    off: Values
    errors: Values
    weights: Values
    least: Values
    at_least: Values
    most: Values
    at_most: Values

    def after(self, steps: Counts) -> "SimpleSteps":
        """Return what is known after some of the steps."""
        parts: list[Any] = [part[:, steps] for part in self]
        return SimpleSteps(*parts)


def nothing_read(seasons: Seasons) -> SimpleState:
    """Return the state before any value."""
    rows, m, n = len(seasons.first), int(seasons.first.max(initial=1)), int(seasons.second.max(initial=1))
    reach, zeros = max(2 * m, n + 1, m + 1, SHORT_LAGS), np.zeros
    knots = len(KNOTS)
    return SimpleState(
        seasons, zeros(rows), zeros(rows, np.int64), zeros(rows, np.int64), zeros(rows, np.int64),
        zeros((rows, len(SMOOTHINGS))), zeros((rows, len(SMOOTHINGS))),
        zeros((rows, len(FIRST_SMOOTHINGS), m)), zeros((rows, len(SECOND_SMOOTHINGS), n)), zeros((rows, reach)),
        zeros((rows, KEPT_STEPS, COUNT, knots)), zeros((rows, COUNT, knots, 2)), zeros((rows, knots)),
        zeros((rows, 3, LAGS, LAGS)), zeros((rows, 3, LAGS)), zeros((rows, 8)),
    )  # fmt: skip


def read(y: Numbers, state: SimpleState, after: Counts, horizon: int) -> tuple[SimpleSteps, Numbers, SimpleState]:
    """Read values y (B, T), at least one, NaN where missing.

    Return what is known after each step; the forecasts (B, N, K, H) of the next H steps after N of the steps, relative
    to the first value; and the state after the last step.   after: (N,), numbers of steps, in order.
    """
    rows, steps = y.shape
    m, n = state.seasons
    is_known = ~np.isnan(y)
    begun = state.known > 0
    first = np.take_along_axis(y, is_known.argmax(1)[:, None], 1)[:, 0]
    origin = np.where(begun, state.origin, np.nan_to_num(first))
    x = np.where(is_known, y - origin[:, None], 0.0)
    started = begun[:, None] | (is_known.cumsum(1) > 0)
    known = state.known[:, None] + is_known.cumsum(1)
    count = state.steps[:, None] + started.cumsum(1)
    since = np.arange(steps) - np.maximum.accumulate(np.where(is_known, np.arange(steps), -1), 1)
    missing = started * (since + state.missing[:, None] * ~is_known.cumsum(1, dtype=bool))
    reach = state.past.shape[1]
    values = np.concatenate([state.past, np.zeros((rows, steps))], 1)
    level, trend, season, second = (part.copy() for part in (state.level, state.trend, state.season, state.second))
    levels = np.empty((rows, steps, len(SMOOTHINGS)))
    sums = np.empty((rows, steps, 8))
    at_knots = np.empty((rows, steps, COUNT, len(KNOTS)))
    off = np.zeros((rows, steps, COUNT))
    simple = np.empty((rows, len(after), COUNT, horizon))
    wanted = dict(zip(after.tolist(), range(len(after)), strict=True))
    far = np.concatenate([KNOTS, np.arange(1, horizon + 1)])
    of_trend, every = trend_weights(far), np.arange(rows)[:, None]
    alphas = np.maximum(ALPHA, 1.0 / np.maximum(known, 1)[:, :, None])
    before = np.maximum(count - 1, 0)
    gammas = np.maximum(GAMMA[FIRST_SMOOTHINGS], 1.0 / (before[:, :, None] // m[:, None, None] + 1))
    gammas *= ((count > m[:, None]) & (m > 1)[:, None])[:, :, None]
    deltas = np.maximum(DELTA[SECOND_SMOOTHINGS], 1.0 / (before[:, :, None] // n[:, None, None] + 1))
    deltas *= ((count > n[:, None]) & (n > m)[:, None])[:, :, None]
    now, now2 = before % m[:, None], before % n[:, None]
    ends = ((count == m[:, None]) | (count == 2 * m[:, None])) & started & (m > 1)[:, None]
    ends2 = (count == n[:, None]) & started & (n > m)[:, None]
    some_end, some_end2 = ends.any(0), ends2.any(0)
    places, places2 = ((before[:, :, None] + far) % s[:, None, None] for s in (m, n))
    firsts, seconds = np.arange(len(FIRST_SMOOTHINGS)), np.arange(len(SECOND_SMOOTHINGS))
    for t in range(steps):
        here, there = is_known[:, t], started[:, t, None]
        moved = level + PHI * trend
        expected = moved.copy()
        of_first, of_second = (every, firsts, now[:, t, None]), (every, seconds, now2[:, t, None])
        expected[:, FIRST_SMOOTHINGS] += season[of_first]
        expected[:, SECOND_SMOOTHINGS] += second[of_second]
        value = np.where(here, x[:, t], np.where(there[:, 0], expected[:, FILLING], 0.0))
        values[:, reach + t] = value
        error = np.where(here[:, None], value[:, None] - expected, 0.0)
        raised = alphas[:, t] * error
        level = np.where(there, moved + raised, level)
        trend = np.where(there, PHI * trend + BETA * raised, trend)
        error -= raised
        season[of_first] += gammas[:, t] * error[:, FIRST_SMOOTHINGS]
        second[of_second] += deltas[:, t] * error[:, SECOND_SMOOTHINGS]
        if some_end[t]:
            for i in np.flatnonzero(ends[:, t]):
                _begin_first(values[i, : reach + t + 1], int(m[i]), int(count[i, t]), level[i], trend[i], season[i])
        if some_end2[t]:
            for i in np.flatnonzero(ends2[:, t]):
                _begin_second(values[i, : reach + t + 1], int(m[i]), int(n[i]), level[i], season[i], second[i])
        levels[:, t] = level
        size = len(far) if t in wanted else len(KNOTS)
        ahead = level[:, :, None] + trend[:, :, None] * of_trend[:, :size]
        ahead[:, FIRST_SMOOTHINGS] += season[every[:, :, None], firsts[:, None], places[:, t, None, :size]]
        ahead[:, SECOND_SMOOTHINGS] += second[every[:, :, None], seconds[:, None], places2[:, t, None, :size]]
        at_knots[:, t, : len(SMOOTHINGS)] = ahead[:, :, : len(KNOTS)]
        if t in wanted:
            simple[:, wanted[t], : len(SMOOTHINGS)] = ahead[:, :, len(KNOTS) :]
    _sum_up(x, is_known, known, state, sums)
    arguments = (
        values,
        reach,
        count,
        m,
        n,
        levels,
        sums,
        *_autoregressions(values, reach, is_known, count, m, n, sums, state),
    )
    at_once = steps == len(after) == 1  # a row that arrives alone
    others = _others(*arguments[:-2], np.arange(steps), max(KEPT_STEPS, horizon) if at_once else KEPT_STEPS)
    at_knots[:, :, len(SMOOTHINGS) :] = others[..., KNOTS - 1]
    if len(after):
        others = others if at_once else _others(*arguments[:-2], after, horizon)
        simple[:, :, len(SMOOTHINGS) :] = others[..., :horizon]
    all_ahead = np.concatenate([state.ahead, at_knots], 1)
    errors, weights = _errors(x, is_known, count, all_ahead, state, off)
    counts = np.maximum(known, 1)
    told = SimpleSteps(
        values[:, reach:], is_known, count, known, missing, sums[..., 0] / np.maximum(sums[..., 2], 1), sums[..., 3],
        off, errors, weights, sums[..., 4], sums[..., 5] / counts, sums[..., 6], sums[..., 7] / counts,
    )  # fmt: skip
    last = SimpleState(
        state.seasons, origin, count[:, -1], known[:, -1], missing[:, -1], level, trend, season, second,
        values[:, -reach:], all_ahead[:, -KEPT_STEPS:], errors[:, -1], weights[:, -1], *arguments[-2:], sums[:, -1],
    )  # fmt: skip
    return told, simple, last


def trend_weights(ahead: Counts) -> Numbers:
    """Return φ + ... + φ^h of each smoothing, (V, H)."""
    phi = PHI[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(phi == 1, ahead, phi * (1 - phi**ahead) / (1 - phi))


def _begin_first(past: Numbers, m: int, count: int, level: Numbers, trend: Numbers, season: Numbers) -> None:
    """Set the first season of a row, whose values so far are one or two whole seasons."""
    blocks = past[len(past) - count :].reshape(-1, m)
    means = blocks.mean(1)
    slope = (means[-1] - means[0]) / m
    line = slope * (np.arange(m) - (m - 1) / 2)
    pattern = (blocks - means[:, None] - line).mean(0)
    alpha = ALPHA[FIRST_SMOOTHINGS]
    level[FIRST_SMOOTHINGS] = (1 - alpha) * (means[-1] + line[-1]) + alpha * (past[-1] - pattern[-1])
    trend[FIRST_SMOOTHINGS] = np.where(BETA[FIRST_SMOOTHINGS] > 0, slope, 0.0)
    season[:, :m] = pattern


def _begin_second(past: Numbers, m: int, n: int, level: Numbers, season: Numbers, second: Numbers) -> None:
    """Set the second season of a row, whose values so far are one of it."""
    block = past[len(past) - n :]
    pattern = block - block.mean()
    for row, smoothing in enumerate(SECOND_SMOOTHINGS):
        own = pattern
        if GAMMA[smoothing] > 0:
            own = pattern - season[FIRST_SMOOTHINGS.tolist().index(int(smoothing)), np.arange(n) % m]
        second[row, :n] = own - own.mean()
    alpha, last = ALPHA[SECOND_SMOOTHINGS], second[:, n - 1]
    apart = np.array(
        [
            season[FIRST_SMOOTHINGS.tolist().index(int(v)), (n - 1) % m] if GAMMA[v] > 0 else 0.0
            for v in SECOND_SMOOTHINGS
        ]
    )
    level[SECOND_SMOOTHINGS] = (1 - alpha) * block.mean() + alpha * (past[-1] - last - apart)


def _sum_up(x: Numbers, is_known: NDArray[np.bool_], known: Counts, state: SimpleState, sums: Numbers) -> None:
    """Set the sums after each step."""
    now = state.sums.copy()
    before = state.level[:, 0].copy()  # the last known value
    for t in range(x.shape[1]):
        here, value = is_known[:, t], x[:, t]
        second = here & (known[:, t] > 1)
        change = np.where(second, np.abs(value - before), 0.0)
        now[:, 0] += change
        now[:, 1] += change * change
        now[:, 2] += second
        now[:, 3] += np.where(second, np.maximum(0.05, 1 / np.maximum(now[:, 2], 1)) * (change - now[:, 3]), 0.0)
        for k, beyond in ((4, np.less), (6, np.greater)):
            new = here & beyond(value, now[:, k])
            equal = here & (value == now[:, k])
            now[:, k] = np.where(new, value, now[:, k])
            now[:, k + 1] = np.where(new, 1.0, now[:, k + 1] + equal)
        before = np.where(here, value, before)
        sums[:, t] = now


def _autoregressions(
    values: Numbers, reach: int, is_known: NDArray[np.bool_], count: Counts, m: Counts, n: Counts, sums: Numbers,
    state: SimpleState,
) -> tuple[Numbers, Numbers, Numbers]:  # fmt: skip
    """Return the weights (B, T, 3, q) of the autoregressions after each step, and their last sums."""
    rows, steps = is_known.shape
    x = _lagged(values, reach - 1 + np.arange(steps), count - 1, m, n)
    lags = _largest_lags(m, n)
    valid = is_known[:, :, None] & (count[:, :, None] > lags[:, None])
    x = x * valid[..., None]
    target = values[:, reach:, None, None]
    products = x[..., None] * x[..., None, :]
    products[:, 0] += state.products
    along = x * target
    along[:, 0] += state.along
    products, along = products.cumsum(1), along.cumsum(1)
    power = sums[..., 1] / np.maximum(sums[..., 2], 1)
    power = np.where(power > 0, power, 1.0)[:, :, None, None]
    ridge = RIDGE * np.where(np.arange(LAGS) == 0, 0.02, power)
    prior = np.tile(PRIOR, (rows, 1, 1))
    prior[:, SEASONAL_AR] = np.where((m > 1)[:, None], PRIOR[SEASONAL_AR], PRIOR[AR])
    left = products + ridge[..., None] * np.eye(LAGS)
    right = along + ridge * prior[:, None]
    weights = np.linalg.solve(left, right[..., None])[..., 0]
    fresh = count[:, :, None] <= lags[:, None]
    weights = np.where(fresh[..., None], PRIOR[AR], weights)
    return weights, products[:, -1], along[:, -1]


def _largest_lags(m: Counts, n: Counts) -> Counts:
    """Return how many values each autoregression reads at least, (B, 3)."""
    return np.stack([np.full_like(m, SHORT_LAGS), np.where(m > 1, m + 1, 2), m], 1)


def _lagged(values: Numbers, last: Counts, count: Counts, m: Counts, n: Counts) -> Numbers:
    """Return what the autoregressions read after the steps whose columns are `last`: (B, T, 3, q).

    Lags before the first value are 0; the season of the regression is then the last value.
    """
    rows = np.arange(len(values))[:, None]

    def lag(steps: Counts) -> Numbers:
        return values[rows, np.maximum(last + 1 - steps[:, None], 0)]

    result = np.zeros((len(values), len(last), 3, LAGS))
    result[..., 0] = 1.0
    for steps in range(1, SHORT_LAGS + 1):
        result[:, :, AR, steps] = values[rows, np.maximum(last + 1 - steps, 0)]
    result[:, :, SEASONAL_AR, 1:3] = result[:, :, AR, 1:3]
    is_second = (n > m)[:, None]
    there, there2 = count >= m[:, None], (count >= n[:, None]) & is_second
    of_m, of_n = lag(m), lag(n)
    result[:, :, SEASONAL_AR, 3] = np.where(there, of_m, 0.0)
    result[:, :, SEASONAL_AR, 4] = np.where(count > m[:, None], lag(m + 1), 0.0)
    result[:, :, SEASONAL_AR, 5] = np.where(there2, of_n, 0.0)
    result[:, :, SEASONAL_AR, 6] = np.where((count > n[:, None]) & is_second, lag(n + 1), 0.0)
    result[:, :, REGRESSION, 1] = np.where(there, of_m, result[:, :, AR, 1])
    result[:, :, REGRESSION, 2] = np.where(count >= 2 * m[:, None], lag(2 * m), 0.0)
    result[:, :, REGRESSION, 3] = np.where(there2, of_n, 0.0)
    return result


def _others(
    values: Numbers, reach: int, count: Counts, m: Counts, n: Counts, levels: Numbers, sums: Numbers, weights: Numbers,
    after: Counts, horizon: int,
) -> Numbers:  # fmt: skip
    """Return the forecasts that are no smoothings after some steps, (B, N, 8, H)."""
    rows, last = np.arange(len(values))[:, None], reach + after
    count, weights, sums = count[:, after], weights[:, after], sums[:, after]
    naive = levels[:, after, 0]
    result = np.empty((len(values), len(after), len(OTHERS), horizon))
    ahead = np.arange(1, horizon + 1)
    seasonal = []
    for s in (m, n):
        behind = ahead - s[:, None] * -(-ahead // s[:, None])  # (B, H), at most 0
        read = values[rows[:, :, None], np.maximum(last[:, None] + behind[:, None], 0)]
        seasonal.append(np.where((count >= s[:, None])[..., None], read, naive[..., None]))
    seasonal[1] = np.where(((n > m)[:, None] & (count >= n[:, None]))[..., None], seasonal[1], seasonal[0])
    result[:, :, 0], result[:, :, 1] = seasonal
    # The order of this sum is that of no other steps: the bits are those of a row that comes alone.
    columns = np.arange(values.shape[1])
    changes = values - values[rows, np.maximum(columns - m[:, None], 0)]
    change = np.zeros_like(naive)
    for k in range(m.max() if (m > 1).any() else 0):
        change += changes[:, np.maximum(last - k, 0)] * (k < m)[:, None]
    change = np.where((count >= 2 * m[:, None]) & (m > 1)[:, None], change / m[:, None], 0.0)
    seasons = -(-ahead // m[:, None])
    result[:, :, 2] = seasonal[0] + change[..., None] * seasons[:, None]
    drift = (naive / np.maximum(count - 1, 1))[..., None] * ahead
    result[:, :, 3] = naive[..., None] + drift
    result[:, :, 4] = levels[:, after, THETA, None] + drift / 2
    least, most = sums[..., 4], sums[..., 6]
    low, high = ((2 * least - most)[:, :, None], (2 * most - least)[:, :, None])
    x = _lagged(values, last, count, m, n)

    def lag(steps: Counts, h: int, path: Numbers) -> Numbers:
        """Return the value, or its forecast, some steps before step h + 2 ahead."""
        column = last + h + 2 - steps[:, None]
        read = values[rows, np.clip(column, 0, last)]
        if (column > last).any():
            of_path = np.take_along_axis(path, np.clip(column - last - 1, 0, h)[..., None], 2)[..., 0]
            read = np.where(column > last, of_path, read)
        return read

    paths = result[:, :, 5:]
    is_second = (n > m)[:, None]
    for h in range(horizon):
        forecast = np.clip((x * weights).sum(3), low, high)
        paths[..., h] = forecast
        if h + 1 == horizon:
            break
        x[:, :, AR, 2 : SHORT_LAGS + 1] = x[:, :, AR, 1:SHORT_LAGS]
        x[:, :, AR, 1] = forecast[:, :, AR]
        x[:, :, SEASONAL_AR, 2::2] = x[:, :, SEASONAL_AR, 1::2]
        x[:, :, SEASONAL_AR, 1] = forecast[:, :, SEASONAL_AR]
        there = count + h + 1
        is_n = (there >= n[:, None]) & is_second
        x[:, :, SEASONAL_AR, 3] = np.where(there >= m[:, None], lag(m, h, paths[:, :, SEASONAL_AR]), 0.0)
        x[:, :, SEASONAL_AR, 5] = np.where(is_n, lag(n, h, paths[:, :, SEASONAL_AR]), 0.0)
        x[:, :, REGRESSION, 1] = np.where(there >= m[:, None], lag(m, h, paths[:, :, REGRESSION]), naive)
        x[:, :, REGRESSION, 2] = np.where(there >= 2 * m[:, None], lag(2 * m, h, paths[:, :, REGRESSION]), 0.0)
        x[:, :, REGRESSION, 3] = np.where(is_n, lag(n, h, paths[:, :, REGRESSION]), 0.0)
    return result


def _errors(
    x: Numbers, is_known: NDArray[np.bool_], count: Counts, ahead: Numbers, state: SimpleState, off: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the running means of absolute errors (B, T, K, J, 2), and their numbers (B, T, J), after each step.

    off: (B, T, K), set to the errors of the forecasts one step ahead.
    """
    rows, steps = x.shape
    errors = np.empty((rows, steps, COUNT, len(KNOTS), 2))
    numbers = np.empty((rows, steps, len(KNOTS)))
    valid = is_known[:, :, None] & (count[:, :, None] > KNOTS)
    came = np.empty((rows, steps, COUNT, len(KNOTS)))
    for j, h in enumerate(KNOTS):
        came[..., j] = x[:, :, None] - ahead[:, KEPT_STEPS - h : KEPT_STEPS - h + steps, :, j]
    np.copyto(off, came[..., 0] * valid[..., :1])
    came = np.abs(came)
    numbers[:] = state.weights[:, None] + valid.cumsum(1)
    rates = np.maximum(RATES, 1 / np.maximum(numbers, 1)[..., None]) * valid[..., None]
    now = state.errors
    for t in range(steps):
        now = now + rates[:, t, None] * (came[:, t, ..., None] - now)
        errors[:, t] = now
    return errors, numbers
