"""Simulated series of many kinds, on which the pretrained forecaster learns. No published table is read.

A series is a level with a trend, seasons and noise, added or multiplied. Then it is rounded, counted, cut or broken.

level: constant, linear, damped, exponential or logistic, with breaks of level and slope; a random walk, its integral,
or switching regimes.   seasons: none, one or two, of lengths that calendars have or of any; smooth, of free shape, in
peaks, of days with a night, of weeks with a weekend; their size and shape change slowly, or grow with the level.
noise: white, autoregressive or of moving averages; normal, with heavy tails or skewed; of a size that changes by
itself, with the level or with the season.   then: exponential of all that, counts (Poisson, negative binomial,
intermittent), outliers, holidays, series that begin late or end, values that are cut off or rounded, missing values.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# Steps of seasons that calendars have, a second one or 1, and how often they are drawn.
CALENDARS = (
    (1, 1, 14.0), (4, 1, 8.0), (12, 1, 20.0), (7, 1, 12.0), (7, 365, 3.0), (24, 168, 14.0), (24, 1, 5.0),
    (48, 336, 4.0), (52, 1, 5.0), (5, 1, 2.0), (96, 1, 1.5), (144, 1, 1.0), (288, 1, 0.5), (6, 1, 1.0), (3, 1, 0.5),
    (365, 1, 1.5),
)  # fmt: skip
ODD_SHARE = 0.1  # of seasons of any other length
MAX_ODD = 130
WRONG_SHARE = 0.06  # of series whose season is told wrongly


class SimulatedSeries(NamedTuple):
    """Series y (B, T), NaN where missing, and the steps of the two seasons that are told of each, (B,); 1 for none."""

    y: Numbers
    first: NDArray[np.int64]
    second: NDArray[np.int64]


def simulate(random: np.random.Generator, count: int, steps: int) -> SimulatedSeries:
    """Draw series. They are the same for the same state of the generator.

    >>> simulate(np.random.default_rng(0), 3, 50).y.shape
    (3, 50)
    """
    first, second = _seasons(random, count, steps)
    season, swing = _seasonal(random, first, second, steps)
    noise = _noise(random, count, steps, season)
    level = _level(random, count, steps)
    part = random.dirichlet((0.9, 0.9, 0.8), count) ** 1.3
    part[:, 1] *= (first > 1) & (random.random(count) > 0.18)
    part[:, 2] += 0.003
    z = part[:, :1] * level
    s, e = part[:, 1:2] * season * swing, part[:, 2:] * noise
    grows = np.clip(1 + _bent(random, count) * _standard(level), 0.1, 6.0)
    kind = random.random((count, 1))
    s = np.where(kind < 0.3, s * grows, s)
    e = np.where((kind < 0.15) | (kind > 0.9), e * grows, e)
    y = z + s + e
    y = np.where(random.random((count, 1)) < 0.3, _exponential(random, y), y)
    y = _lifted(random, y)
    counted = random.random(count) < 0.15
    if counted.any():
        y[counted] = _counts(random, y[counted])
    y = _holidays(random, y, np.where(second > 1, second, first))
    y = _outliers(random, y)
    y = _cut(random, y)
    y = _born_and_dead(random, y)
    y = _rounded(random, y)
    y = _missing(random, y)
    told_first, told_second = first.copy(), second.copy()
    wrong = random.random(count) < WRONG_SHARE
    told_first[wrong] = random.choice([1, 4, 7, 12, 24, 52], int(wrong.sum()))
    told_first[2 * told_first > steps] = 1
    lonely = (random.random(count) < 0.1) | wrong | (told_first < 2) | (2 * second > steps)
    told_second[lonely] = 1
    return SimulatedSeries(y, told_first, told_second)


def _seasons(random: np.random.Generator, count: int, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    weights = np.array([w * (2.2 * m <= steps) for m, _, w in CALENDARS])
    drawn = random.choice(len(CALENDARS), count, p=weights / weights.sum())
    first, second = (np.array([one[k] for one in CALENDARS])[drawn] for k in (0, 1))
    odd = random.random(count) < ODD_SHARE
    high = max(3, min(MAX_ODD, int(steps / 2.2)))
    first = np.where(odd, np.exp(random.uniform(np.log(2), np.log(high), count)).astype(int), first)
    return first, np.where(odd, 1, second)


def _standard(x: Numbers) -> Numbers:
    """Return rows with mean 0 and mean square 1; a constant row becomes 0."""
    x = x - x.mean(1, keepdims=True)
    spread = x.std(1, keepdims=True)
    return x / np.where(spread > 1e-12, spread, 1.0)


def _bent(random: np.random.Generator, count: int) -> Numbers:
    return random.uniform(0.1, 0.6, (count, 1))


def _pattern(random: np.random.Generator, m: int) -> Numbers:
    """Draw a season of m steps with mean 0 and mean square 1."""
    kind, phase = random.random(), np.arange(m) / m
    if kind < 0.35 or m < 4:
        order = np.arange(1, 1 + min(max(1, m // 2), int(random.integers(1, 7))))
        size = random.normal(size=(2, len(order))) / order ** random.uniform(0.3, 2.0)
        angle = 2 * np.pi * order[:, None] * phase
        x = size[0] @ np.cos(angle) + size[1] @ np.sin(angle)
    elif kind < 0.55:
        x = random.normal(size=m)
    elif kind < 0.7:  # a walk round a circle
        x = random.normal(size=m).cumsum()
        x -= np.linspace(0, x[-1], m)
    elif kind < 0.8:  # peaks
        x = random.exponential(0.1, m)
        x[random.integers(0, m, max(1, m // 8))] += random.exponential(2.0, max(1, m // 8))
    elif kind < 0.92:  # a day with a night
        x = np.maximum(0.0, np.cos(2 * np.pi * (phase - random.random())) + random.uniform(-0.6, 0.6))
        x = x ** random.uniform(0.4, 2.5)
        if random.random() < 0.5:
            x += 0.5 * np.maximum(0.0, np.cos(2 * np.pi * (phase - random.random())) - random.uniform(0.2, 0.8))
    else:  # two days of the week, or a block, that are lower
        x = np.ones(m)
        begin, size = random.integers(m), max(1, int(m * random.uniform(0.1, 0.4)))
        x[(begin + np.arange(size)) % m] = random.uniform(-1, 0.5)
        x += random.normal(0, 0.1, m)
    return _standard(x[None])[0]


def _seasonal(
    random: np.random.Generator, first: NDArray[np.int64], second: NDArray[np.int64], steps: int
) -> tuple[Numbers, Numbers]:
    """Return the seasonal parts (B, T), and factors by which their size changes slowly."""
    count, t = len(first), np.arange(steps)
    season = np.zeros((count, steps))
    for i, (m, n) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        if m < 2:
            continue
        shift = int(random.integers(m))
        row = _pattern(random, m)[(t + shift) % m]
        if random.random() < 0.25:  # the shape changes
            other = _pattern(random, m)[(t + shift) % m]
            mix = 1 / (1 + np.exp(-(t / steps - random.random()) * random.uniform(2, 10)))
            row = row * (1 - mix) + other * mix
        if m > 3 and random.random() < 0.15:  # every season has a size of its own, such as clouds give to days
            keep = random.random() * 0.8
            size = _autoregressive(random.normal(size=(1, steps // m + 2)), np.array([[keep, 0.0]]))[0]
            row = (row - row.min()) * np.exp(random.uniform(0.2, 0.8) * size)[(t + shift) // m - shift // m]
        if n > 1:
            if n % m == 0 and random.random() < 0.75:  # days of a week differ
                size = np.ones(n // m)
                kind = random.random()
                if kind < 0.5:
                    begin = random.integers(n // m)
                    size[[begin, (begin + 1) % (n // m)]] = random.uniform(0.2, 0.9)
                else:
                    size = random.uniform(0.5, 1.2, n // m)
                at = ((t + shift) % n) // m
                low = random.uniform(-1.5, 1.0) if random.random() < 0.5 else row.min()
                row = low + (row - low) * size[at]
                if random.random() < 0.3:
                    other = _pattern(random, m)[(t + shift) % m]
                    row = np.where(size[at] < np.median(size), 0.6 * other, row)
            else:
                row = row + random.lognormal(0, 0.7) * _pattern(random, n)[(t + random.integers(n)) % n]
        season[i] = row
    walk = random.normal(size=(count, steps)).cumsum(1) / np.sqrt(steps)
    speed = np.where(random.random((count, 1)) < 0.5, 0.0, random.uniform(0.1, 1.0, (count, 1)))
    return _standard(season), np.exp(np.clip(speed * walk, -2, 2))


def _autoregressive(x: Numbers, weights: Numbers) -> Numbers:
    """Filter rows x (B, T) by the weights (B, 2) of the last two results."""
    y = np.empty_like(x)
    before = last = np.zeros(len(x))
    for t in range(x.shape[1]):
        before, last = last, x[:, t] + weights[:, 0] * last + weights[:, 1] * before
        y[:, t] = last
    return y


def _drawn(random: np.random.Generator, count: int, steps: int) -> Numbers:
    """Draw independent numbers of a kind of its own for each row: normal, heavy-tailed or skewed."""
    kind = random.random((count, 1))
    x = random.normal(size=(count, steps))
    tail = random.standard_t(3.5, (count, steps)) / 1.5
    skewed = random.exponential(1.0, (count, steps)) - 1.0
    sign = np.where(random.random((count, 1)) < 0.7, 1.0, -1.0)
    return np.where(kind < 0.6, x, np.where(kind < 0.85, tail, sign * skewed))


def _volatility(random: np.random.Generator, count: int, steps: int) -> Numbers:
    """Return a factor of the noise: 1, in bursts, growing, or two regimes."""
    kind = random.random((count, 1))
    keep = random.uniform(0.8, 0.99, (count, 1))
    log = _autoregressive(random.normal(size=(count, steps)), np.concatenate([keep, 0 * keep], 1))
    bursts = np.exp(0.7 * log * np.sqrt(1 - keep**2))
    grown = np.exp(random.normal(size=(count, 1)) * np.linspace(-1, 1, steps))
    regimes = np.where(_regimes(random, count, steps, 2) == 0, 1.0, random.uniform(1.5, 5.0, (count, 1)))
    return np.where(kind < 0.6, 1.0, np.where(kind < 0.78, bursts, np.where(kind < 0.9, grown, regimes)))


def _regimes(random: np.random.Generator, count: int, steps: int, kinds: int) -> NDArray[np.int64]:
    """Return which regime (B, T) each step is in."""
    stay = 1 - 1 / np.exp(random.uniform(np.log(8), np.log(200), (count, 1)))
    switches = random.random((count, steps)) > stay
    drawn = random.integers(0, kinds, (count, steps))
    last = np.maximum.accumulate(np.where(switches, np.arange(steps), 0), 1)
    return np.take_along_axis(drawn, last, 1)


def _noise(random: np.random.Generator, count: int, steps: int, season: Numbers) -> Numbers:
    x = _drawn(random, count, steps) * _volatility(random, count, steps)
    kind = random.random((count, 1))
    slow = random.random((count, 1)) ** 0.6 * np.where(random.random((count, 1)) < 0.85, 0.98, -0.6)
    radius, angle = random.uniform(0.5, 0.97, (count, 1)), random.uniform(0.05, 2.0, (count, 1))
    weights = np.where(
        kind < 0.35, 0.0, np.where(kind < 0.8, np.concatenate([slow, 0 * slow], 1),
        np.concatenate([2 * radius * np.cos(angle), -(radius**2)], 1)),
    )  # fmt: skip
    mean = random.uniform(-0.9, 0.9, (count, 1)) * (random.random((count, 1)) < 0.25)
    x[:, 1:] += mean * x[:, :-1]
    x = _autoregressive(x, weights)
    fading = random.uniform(0.3, 0.95, (count, 1))
    shocks = random.standard_exponential((count, steps)) ** 2 * (random.random((count, steps)) < 6 / steps)
    shocks = _autoregressive(shocks, np.concatenate([fading, 0 * fading], 1))
    x += (
        np.where(random.random((count, 1)) < 0.07, random.uniform(1, 5, (count, 1)) * x.std(1, keepdims=True), 0.0)
        * shocks
    )
    with_season = random.random((count, 1)) < 0.12
    x = np.where(with_season, x * np.exp(0.5 * np.clip(season, -3, 3)), x)
    return x / np.maximum(x.std(1, keepdims=True), 1e-12)


def _level(random: np.random.Generator, count: int, steps: int) -> Numbers:
    """Return levels (B, T) whose mean square is about 1."""
    t = np.linspace(0, 1, steps)[None]
    one = random.random((count, 1))
    walk = random.normal(size=(count, steps))
    heavy = _drawn(random, count, steps) * _volatility(random, count, steps)
    slope = random.normal(size=(count, 1))
    breaks = random.random((count, steps)) < random.choice([1, 2, 4], (count, 1)) / steps
    shapes = [
        np.zeros((count, steps)),
        slope * t,
        slope * (1 - np.exp(-t * random.uniform(1, 8, (count, 1)))),
        np.exp(random.uniform(0.5, 3, (count, 1)) * t) * np.where(random.random((count, 1)) < 0.8, 1, -1),
        1 / (1 + np.exp(-(t - random.uniform(0, 1.2, (count, 1))) * random.uniform(5, 25, (count, 1)))),
        (breaks * random.normal(size=(count, steps))).cumsum(1),
        (breaks * random.normal(size=(count, steps))).cumsum(1).cumsum(1),
        heavy.cumsum(1) + random.normal(size=(count, 1)) * 0.1 * np.arange(steps),
        walk.cumsum(1) + np.abs(random.normal(size=(count, 1))) * 0.15 * np.arange(steps),
        _autoregressive(
            walk.cumsum(1), np.concatenate([random.uniform(0.3, 0.9, (count, 1)), np.zeros((count, 1))], 1)
        ),
        _autoregressive(walk, np.tile([1.9, -0.905], (count, 1))).cumsum(1),
        random.normal(size=(count, 3))[np.arange(count)[:, None], _regimes(random, count, steps, 3)],
        _autoregressive(walk, np.concatenate([np.full((count, 1), 0.97), np.zeros((count, 1))], 1)),
    ]
    weights = np.array([1.2, 1.5, 1, 0.8, 0.6, 1, 1, 2.2, 1.6, 1, 0.9, 0.8, 1.3])
    drawn = random.choice(len(shapes), (2, count), p=weights / weights.sum())
    stacked = np.stack([_standard(shape) for shape in shapes])
    rows = np.arange(count)
    level = stacked[drawn[0], rows]
    return level + np.where(one < 0.35, random.uniform(0, 0.7, (count, 1)), 0.0) * stacked[drawn[1], rows]


def _exponential(random: np.random.Generator, y: Numbers) -> Numbers:
    return np.exp(np.clip(random.uniform(0.15, 1.1, (len(y), 1)) * _standard(y), -6, 6))


def _lifted(random: np.random.Generator, y: Numbers) -> Numbers:
    """Shift most rows above 0."""
    spread = np.maximum(y.std(1, keepdims=True), 1e-9)
    lift = random.exponential(2.0, (len(y), 1)) * spread - y.min(1, keepdims=True)
    return np.where(random.random((len(y), 1)) < 0.8, y + lift, y)


def _counts(random: np.random.Generator, y: Numbers) -> Numbers:
    """Return counts whose means follow y."""
    rows = (len(y), 1)
    mean = np.maximum(y - y.min(1, keepdims=True), 0)
    mean = mean / np.maximum(mean.mean(1, keepdims=True), 1e-9) * np.exp(random.uniform(np.log(0.15), np.log(60), rows))
    shape = np.exp(random.uniform(np.log(0.5), np.log(20), rows))
    mean = np.where(random.random(rows) < 0.4, mean * random.gamma(shape, 1 / shape, mean.shape), mean)
    counts = random.poisson(np.minimum(mean, 1e6)).astype(np.float64)
    gaps = random.random(counts.shape) < np.where(random.random(rows) < 0.3, random.uniform(0.3, 0.9, rows), 0.0)
    return np.where(gaps, 0.0, counts)


def _holidays(random: np.random.Generator, y: Numbers, season: NDArray[np.int64]) -> Numbers:
    """Add the same jump at one or two steps of some seasons."""
    t = np.arange(y.shape[1])
    spread = y.std(1)
    for i in np.flatnonzero((random.random(len(y)) < 0.06) & (season > 6)):
        for _ in range(int(random.integers(1, 3))):
            y[i, t % season[i] == random.integers(season[i])] += random.normal() * 2 * spread[i]
    return y


def _outliers(random: np.random.Generator, y: Numbers) -> Numbers:
    rate = np.where(random.random((len(y), 1)) < 0.12, random.uniform(0.002, 0.02, (len(y), 1)), 0.0)
    size = random.standard_t(2, y.shape) * 3 * y.std(1, keepdims=True)
    return np.where(random.random(y.shape) < rate, y + np.abs(size) * np.sign(random.random((len(y), 1)) - 0.2), y)


def _cut(random: np.random.Generator, y: Numbers) -> Numbers:
    """Cut some rows off below or above."""
    kind = random.random((len(y), 1))
    low = np.quantile(y, random.uniform(0.02, 0.5), axis=1, keepdims=True)
    high = np.quantile(y, random.uniform(0.7, 0.99), axis=1, keepdims=True)
    return np.where(kind < 0.05, np.maximum(y, low), np.where(kind > 0.98, np.minimum(y, high), y))


def _born_and_dead(random: np.random.Generator, y: Numbers) -> Numbers:
    """Let some rows begin late, and let some end or fade."""
    steps, rows = y.shape[1], (len(y), 1)
    t, kind = np.arange(steps)[None], random.random(rows)
    border = random.uniform(0.05, 0.6, rows) * steps
    rest = np.where(random.random(rows) < 0.7, 0.0, y[:, :1])
    y = np.where((kind < 0.02) & (t < border), rest, y)
    border = random.uniform(0.2, 1.0, rows) * steps
    y = np.where((kind > 0.98) & (t > border), rest, y)
    fading = np.exp(-np.maximum(t - border, 0) / (random.uniform(0.01, 0.3, rows) * steps))
    return np.where((kind > 0.955) & (kind < 0.98), y * fading, y)


def _rounded(random: np.random.Generator, y: Numbers) -> Numbers:
    unit = np.maximum(y.std(1, keepdims=True), 1e-9) * np.exp(random.uniform(np.log(0.01), np.log(0.7), (len(y), 1)))
    return np.where(random.random((len(y), 1)) < 0.15, np.round(y / unit) * unit, y)


def _missing(random: np.random.Generator, y: Numbers) -> Numbers:
    """Take single values and runs away from some rows, and the first ones."""
    rows, steps = (len(y), 1), y.shape[1]
    rate = np.where(random.random(rows) < 0.06, random.uniform(0.01, 0.3, rows), 0.0)
    gone = random.random(y.shape) < rate
    begin, size = random.integers(0, steps, rows), random.integers(1, max(2, steps // 6), rows)
    t = np.arange(steps)[None]
    gone |= (random.random(rows) < 0.04) & (t >= begin) & (t < begin + size)
    gone |= (random.random(rows) < 0.02) & (t < steps // 4 * random.random(rows))
    return np.where(gone, np.nan, y)
