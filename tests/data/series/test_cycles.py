"""Seasons that no calendar tells: found where they are, and not in noise."""

import numpy as np
import pytest

from scanl.data.series.cycles import MAX_SEASON, season_of

DRAW = np.random.default_rng


def autoregression(noise, *weights):
    y = np.zeros(len(noise))
    for t in range(len(weights), len(y)):
        y[t] = noise[t] + sum(w * y[t - 1 - k] for k, w in enumerate(weights))
    return y


NOISE = {
    "white": lambda e: e,
    "heavy tails": lambda e: e**3,
    "walk": lambda e: e.cumsum(),
    "drift": lambda e: (e + 0.3).cumsum(),
    "smooth": lambda e: e.cumsum().cumsum(),
    "trend": lambda e: e + 0.1 * np.arange(len(e)),
    "curve": lambda e: e + 50 / (1 + np.exp(4 - 8 * np.arange(len(e)) / len(e))),
    "growth": lambda e: np.exp(0.05 * e.cumsum()),
    "counts": lambda e: np.floor(np.abs(e)),
    "near one": lambda e: autoregression(e, 0.95),
    "alternating": lambda e: autoregression(e, -0.8),
    "second order": lambda e: autoregression(e, 0.5, 0.3),
}


def test_noise_has_no_season():
    """Of 288 series at most 3 have one, about 1 in 100."""
    found = [
        season_of([of(DRAW((n, seed)).normal(size=n))])
        for of in NOISE.values()
        for n in (60, 150, 700)
        for seed in range(8)
    ]
    assert sum(season > 1 for season in found) <= 3


@pytest.mark.parametrize("season", [3, 7, 12, 24, 78, 144])
def test_a_season_is_found(season):
    """A wave and a profile, with a walk, growth, holes and peaks; also its multiples are not taken for it."""
    n = max(60, 12 * season)
    t, e = np.arange(n), DRAW(season).normal(size=n)
    wave, profile = np.sqrt(2) * np.sin(2 * np.pi * t / season), DRAW(5).permutation(season)[t % season]
    profile = profile / profile.std()
    holes = np.where(DRAW(2).random(n) < 0.1, np.nan, profile + 0.3 * e)
    peaks = np.where(DRAW(3).random(n) < 0.02, 100.0, profile + 0.3 * e)
    for y in (profile + 0.3 * e, profile + 0.1 * e.cumsum(), np.exp(0.2 * profile + t / n), holes, peaks):
        assert season_of([y]) == season_of([1e200 * y]) == season
    assert abs(season_of([wave + 0.3 * e]) - season) <= season // 20


def test_series_share_a_season():
    """None of them shows it alone; a constant one, one without numbers and a short one say nothing."""
    n, season = 40, 8
    series = [
        np.sin(2 * np.pi * (np.arange(n) + DRAW(i).integers(season)) / season) + 0.6 * DRAW(i).normal(size=n)
        for i in range(60)
    ]
    assert sum(season_of([y]) == season for y in series) < 20
    assert season_of([*series, np.ones(n), np.full(n, np.nan), np.ones(2)]) == season
    assert season_of([np.ones(100)]) == season_of([np.full(100, np.nan)]) == season_of([np.arange(5.0)]) == 1


def test_cycles_of_nature():
    """The sunspots' eleven years; and those of their months, which noise hides from step to step."""
    data = pytest.importorskip("statsmodels.datasets", reason="statsmodels is not installed")
    years = data.sunspots.load_pandas().data["SUNACTIVITY"].to_numpy()
    assert season_of([years]) == 11
    months = np.interp(np.arange(12 * len(years)) / 12, np.arange(len(years)), years)
    assert abs(season_of([months + 20 * DRAW(0).normal(size=len(months))]) - 132) <= 8


def test_the_longest_season_bounds_the_work():
    y = np.sin(2 * np.pi * np.arange(6000) / (2 * MAX_SEASON)) + 0.1 * DRAW(0).normal(size=6000)
    assert season_of([y]) <= MAX_SEASON
