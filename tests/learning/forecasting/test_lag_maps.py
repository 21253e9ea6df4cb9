"""Simple forecasts as linear maps of the last values."""

import numpy as np
import pytest

from scanl.errors import ConfigError
from scanl.learning.forecasting.lag_maps import LagMap, candidates, widened

SERIES = np.random.default_rng(0).normal(size=40).cumsum()
SEASON, HORIZON = 4, 6


def forecast(name, series=SERIES, season=SEASON):
    """Return the forecast of a map from the end of a series."""
    weights = LagMap.of(name).weights(HORIZON, season)
    return weights @ series[::-1][: weights.shape[1]]


EXPECTED = {
    "naive": [SERIES[-1]] * HORIZON,
    "seasonal": np.resize(SERIES[-SEASON:], HORIZON),
    "zero": np.zeros(HORIZON),
    "mean(5)": [SERIES[-5:].mean()] * HORIZON,
    "seasonal_mean(2)": np.resize((SERIES[-4:] + SERIES[-8:-4]) / 2, HORIZON),
    "drift(10)": SERIES[-1] + np.arange(1, HORIZON + 1) * (SERIES[-1] - SERIES[-11]) / 10,
    "level(3, 0.5)": np.resize(SERIES[-4:], HORIZON) + 0.5 * (SERIES[-3:] - SERIES[-7:-4]).mean(),
    "ridge(7, 10, naive)": [SERIES[-1]] * HORIZON,  # before it is fitted
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_map_is_the_forecast_of_its_name(name):
    np.testing.assert_allclose(forecast(name), EXPECTED[name], rtol=1e-12, atol=1e-12)
    assert str(LagMap.of(name)) == name


def smoothed(series, season, gain, season_gain, trend, damping):
    """Return the forecast of exponential smoothing, written for numbers and not for weights."""
    first, second = series[:season].mean(), series[season : 2 * season].mean()
    slope = (second - first) / season if trend else 0.0
    seasons = {k: ((series[k] - first) + (series[season + k] - second)) / 2 for k in range(season)}
    level = first - slope * (season + 1) / 2
    for t, value in enumerate(series):
        error = value - (level + damping * slope + seasons[t % season])
        level += damping * slope + gain * error
        slope = damping * slope + trend * error
        seasons[t % season] += season_gain * error
    steps = [sum(damping**j for j in range(1, h + 1)) for h in range(1, HORIZON + 1)]
    return [level + steps[h] * slope + seasons[(len(series) + h) % season] for h in range(HORIZON)]


@pytest.mark.parametrize("numbers", [(0.3, 0.2, 0.05, 0.9), (0.7, 0.1, 0.0, 1.0), (0.05, 0.0, 0.01, 1.0)])
def test_smoothing_is_that_of_its_recursion(numbers):
    lags = 21
    options = ", ".join(f"{number:g}" for number in numbers)
    expected = smoothed(SERIES[-lags:], SEASON, *numbers)
    np.testing.assert_allclose(forecast(f"seasonal_smoothing({lags}, {options})"), expected, rtol=1e-9)


def test_smoothing_goes_on_with_a_line_and_with_a_season():
    line = 3 + 0.5 * np.arange(40)
    np.testing.assert_allclose(forecast("smoothing(20, 0.4, 0.04, 1)", line), 3 + 0.5 * (40 + np.arange(6)))
    wave = np.resize([1.0, 5, 2, 0], 40)
    np.testing.assert_allclose(forecast("seasonal_smoothing(20, 0.4, 0.1)", wave), np.resize(wave, 6), atol=1e-12)


def test_candidates_are_maps_whose_weights_add_up_to_one():
    """So a forecast does not depend on the location of the normalisation."""
    maps = list(candidates(17, 4))
    assert len(set(maps)) == len(maps) > 50
    for one in maps:
        assert one.lags(4) <= 17
        assert LagMap.of(str(one)) == one
        np.testing.assert_allclose(one.weights(HORIZON, 4).sum(1), 1, rtol=1e-9)
    assert {one.family for one in candidates(3, 4)} == {"naive", "mean", "smoothing"}


def test_candidates_reach_to_the_last_lag():
    """Two seasons of four are eight values; a level over three changes of a season reads seven."""
    names = [{str(one) for one in candidates(lags, 4)} for lags in (6, 7, 8)]
    assert [{"seasonal_mean(2)", "level(3, 1)", "mean(4)", "drift(4)"} <= each for each in names] == [
        False,
        False,
        True,
    ]
    assert "level(3, 1)" in names[1] - names[0]
    assert "drift(4)" not in {str(one) for one in candidates(4, 4)}


def test_weights_are_widened_with_zeros():
    assert widened(np.ones((2, 1)), 3).tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "a b": r"start: 'a b' is no map of lags, expected a name such as seasonal or drift\(12\)",
        "seasnal": "unknown start 'seasnal'; did you mean 'seasonal'",
        "drift": r"start: 'drift' has \(\), expected 1 numbers of at least 0",
        "mean(x)": r"start: 'mean\(x\)' has \(x\), expected 1 numbers of at least 0",
        "mean(-3)": r"start: 'mean\(-3\)' has \(-3\), expected 1 numbers of at least 0",
        "smoothing(9, 0.1, 0.2)": r"has \(9, 0.1, 0.2\), expected 2 or 4 numbers of at least 0",
        "ridge(9, 1)": r"has \(9, 1\), expected 2 numbers of at least 0 and a prior",
        "ridge(9, 1, ridge(9, 1, zero))": "expected 2 numbers of at least 0 and a prior",
    }.items(),
)
def test_what_is_no_map_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        LagMap.of(name)
