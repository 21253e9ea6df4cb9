r"""The season of series that no calendar tells, found in their numbers.

The differences of each series, without their largest peaks, have the autocorrelations r_k; those of several series are
averaged. A lag m is a season if r_m is a peak that stands above the lags before it and above chance, and if r_{2m} is
high too:

.. math:: r_m > z \, s_m, \quad s_m^2 = \Bigl(1 + 2 \sum_{k \le m/4} r_k^2\Bigr) / n, \quad z = \sqrt{2 \ln K} + 0.7

K is the number of lags that are tried, and n that of the known numbers, where several series that move together count
as one. s is the standard error by Bartlett's formula: Brockwell and Davis, "Time Series: Theory and Methods", 2nd ed.,
1991, section 7.2. If there is none, means of 2, 4, 8, ... steps are tried in place of the steps, because noise hides a
long season in the differences.
"""

from collections.abc import Sequence

import numpy as np

from scanl.data.series.columns import Numbers
from scanl.data.series.naive import unit_of

MAX_SEASON = 400  # steps
MIN_SEASONS = 4  # in a series
MARGIN = 0.7  # standard errors above those that the highest of K peaks has by chance
MIN_CORRELATION = 0.2  # of a season
REPEATED_SHARE = 0.3  # of the autocorrelation of a season that two seasons have at least
SHORTER_SHARE = 0.85  # of the highest peak that a shorter season needs to be the season
MAX_DEVIATIONS = 3.0  # of a difference
MIN_STEPS = 24  # or means of steps, in which a season is looked for
MISSED_PART = 16  # of a season, by which its autocorrelation may miss it: one of so many parts
MAX_SERIES, MAX_ROWS = 200, 50_000  # that are read
COMPARED_ROWS = 2000  # in which series are compared with each other


def season_of(series: Sequence[Numbers]) -> int:
    """Return the steps of the season that series (n,) have in common; 1 if none is certain. NaN is a missing number.

    >>> month = np.arange(240)
    >>> noise = np.random.default_rng(0).normal(size=240)
    >>> season_of([np.sin(2 * np.pi * month / 12) + 0.3 * noise]), season_of([noise.cumsum()])
    (12, 1)
    """
    chosen = np.unique(np.linspace(0, len(series) - 1, min(len(series), MAX_SERIES)).round().astype(int))
    rows = [(y / unit_of(np.nan_to_num(y)))[-MAX_ROWS:] for y in (series[i] for i in chosen)]
    width = 1
    while max(map(len, rows)) // width >= MIN_STEPS:
        if lags := _peak([_means(y, width) for y in rows], MAX_SEASON // width):
            reach = max(width - 1, width * lags[0] // MISSED_PART)
            return _refined(rows, range(max(3, width * lags[0] - reach), width * lags[-1] + reach + 1))
        width *= 2
    return 1


def _peak(series: Sequence[Numbers], longest: int) -> list[int]:
    """Return the lags about the season in the differences that are nearly as high as it; none if there is no season."""
    steps = [_clipped(np.diff(y)) for y in series]
    parts = [_autocorrelations(x, 2 * longest) for x in steps]
    counts = np.array([count for _, count in parts])
    if not counts.any():
        return []
    r, usual = np.average([r for r, _ in parts], 0, counts), np.average(counts, weights=counts)
    longest = min(longest, int(usual) // MIN_SEASONS)
    if longest < 3:
        return []
    before = np.zeros(len(r))
    before[3:] = r[2:-1].cumsum() / np.arange(1, len(r) - 2)  # the mean of r_2 to r_{m-1}; high where r decays slowly
    above = (r - np.maximum(before, 0))[: longest + 1]
    lags = np.arange(longest + 1)
    n = usual * _independent([x for x, (_, count) in zip(steps, parts, strict=True) if count])
    errors = np.sqrt((1 + 2 * (r[1:] ** 2).cumsum()[np.maximum(lags // 4, 1) - 1]) / n)
    least = np.maximum((np.sqrt(2 * np.log(longest)) + MARGIN) * errors, MIN_CORRELATION)
    high = (
        (r[lags] > r[lags - 1]) & (r[lags] >= r[lags + 1]) & (above > least) & (r[2 * lags] > REPEATED_SHARE * r[lags])
    )
    high[:2] = False
    if not high.any():
        return []
    lag = int((high & (above > SHORTER_SHARE * above[high].max())).argmax())
    if lag == 2:  # numbers that only alternate have no season
        return []
    low = np.flatnonzero(r < SHORTER_SHARE * r[lag])
    return list(range(low[low < lag][-1] + 1, low[low > lag][0]))


def _independent(series: Sequence[Numbers]) -> float:
    """Return how many independent series have as much chance in their mean as these, by their correlations."""
    width = min(COMPARED_ROWS, max(map(len, series)))
    x = np.zeros((len(series), width))
    for row, y in zip(x, series, strict=True):
        y = np.nan_to_num(y - np.nanmean(y))[-width:]
        row[width - len(y) :] = y / (np.linalg.norm(y) or 1.0)
    return len(x) ** 2 / max(float(((x @ x.T) ** 2).sum()), len(x))


def _autocorrelations(x: Numbers, lags: int) -> tuple[Numbers, int]:
    """Return r_0 to r_{lags+1} of numbers, 0 beyond their length, and how many are known; 0 if all are equal."""
    known, result = ~np.isnan(x), np.zeros(lags + 2)
    if not known.any():
        return result, 0
    both = np.stack([np.where(known, x - x[known].mean(), 0.0), known])
    size = 1 << (2 * len(x)).bit_length()
    sums, pairs = np.fft.irfft(np.abs(np.fft.rfft(both, size)) ** 2, size)[:, : min(lags + 1, len(x))]
    if sums[0] <= np.finfo(float).tiny:
        return result, 0
    shares = 1 - np.arange(len(sums)) / len(x)  # so that of two lags alike the longer one is lower
    result[: len(sums)] = shares * (sums / np.maximum(pairs.round(), 1)) / (sums[0] / pairs[0])
    return result, int(known.sum())


def _clipped(x: Numbers) -> Numbers:
    """Return numbers without peaks, as far as half of them differ."""
    if np.isnan(x).all():
        return x
    middle = np.nanmedian(x)
    spread = 1.4826 * np.nanmedian(np.abs(x - middle)) or np.nanstd(x)
    return np.clip(x, middle - MAX_DEVIATIONS * spread, middle + MAX_DEVIATIONS * spread)


def _means(y: Numbers, width: int) -> Numbers:
    """Return the means of every `width` steps, the last of which are at the end."""
    blocks = y[len(y) % width :].reshape(-1, width)
    known = ~np.isnan(blocks)
    sums, counts = np.where(known, blocks, 0.0).sum(1), known.sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _refined(series: Sequence[Numbers], seasons: Sequence[int]) -> int:
    """Return the one of some seasons that has the most of the variance in all series: that between its steps."""
    parts = np.zeros(len(seasons))
    for y in series:
        x = _clipped(y - _running_mean(y, int(np.mean(seasons))))
        known = np.flatnonzero(~np.isnan(x))
        x = x[known]
        for i, season in enumerate(seasons):
            sums, counts = (np.bincount(known % season, weights, season) for weights in (x, None))
            between = float((sums**2 / np.maximum(counts, 1)).sum() / max(float((x**2).sum()), np.finfo(float).tiny))
            free = len(x) - np.count_nonzero(counts)
            parts[i] += len(x) - (1 - between) * len(x) ** 2 / free if free > 0 else 0.0
    return seasons[int(parts.argmax())]


def _running_mean(y: Numbers, width: int) -> Numbers:
    """Return the mean of the known numbers about each step."""
    known = ~np.isnan(y)
    sums, counts = (np.concatenate([[0.0], part.cumsum()]) for part in (np.where(known, y, 0.0), known))
    first, last = (np.clip(np.arange(len(y)) + shift, 0, len(y)) for shift in (-(width // 2), width - width // 2))
    return (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
