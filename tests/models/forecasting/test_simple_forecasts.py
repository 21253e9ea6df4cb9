import numpy as np
import pytest
from numpy.testing import assert_allclose

from scanl.models.forecasting.simple_forecasts import COUNT, OTHERS, SMOOTHINGS, Seasons, nothing_read, read

LAST = np.array([119])


def seasons(*pairs):
    first, second = zip(*pairs, strict=True)
    return Seasons(np.array(first), np.array(second))


@pytest.fixture
def series():
    draw = np.random.default_rng(0)
    y = 50 + draw.normal(size=(4, 120)).cumsum(1) + 5 * np.sin(2 * np.pi * np.arange(120) / 7)
    y[1, 30:40] = y[2, :9] = np.nan
    return y


def test_whole_is_cut(series):
    several = seasons((7, 28), (1, 1), (12, 12), (7, 60))
    whole, forecasts, last = read(series, nothing_read(several), LAST, 30)
    state, nowhere = nothing_read(several), np.array([], int)
    for begin, end in ((0, 1), (1, 55), (55, 119)):
        _, _, state = read(series[:, begin:end], state, nowhere, 1)
    told, again, state = read(series[:, 119:], state, np.array([0]), 30)
    assert_allclose(again, forecasts, rtol=1e-9, atol=1e-9)
    assert_allclose(told.errors[:, -1], whole.errors[:, -1], rtol=1e-9)
    for one, other in zip(state[1:], last[1:], strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_what_each_forecast_is():
    """A line with a season that repeats: what follows it is known."""
    season = np.array([3.0, -1.0, 0.0, -2.0])
    steps = np.arange(44)
    y = (10 + 2 * steps + season[steps % 4])[None]
    _, forecasts, state = read(y[:, :40], nothing_read(seasons((4, 4))), np.array([39]), 4)
    ahead = dict(zip([*range(len(SMOOTHINGS)), *OTHERS], forecasts[0, 0] + state.origin, strict=True))
    assert_allclose(ahead["seasonal drift"], y[0, 40:])
    assert_allclose(ahead["seasonal"], y[0, 36:40])
    assert_allclose(ahead[0], y[0, 39])
    assert_allclose(ahead["drift"], y[0, 39] + np.arange(1, 5) * (y[0, 39] - y[0, 0]) / 39)
    assert_allclose(ahead["seasonal autoregression"], y[0, 40:], atol=0.5)
    assert len(ahead) == COUNT


def test_errors_are_of_forecasts_made_before(series):
    told, *_ = read(series[:1], nothing_read(seasons((1, 1))), LAST, 1)
    naive = np.abs(np.diff(series[0]))
    rate, mean = 0.0, 0.0
    for number, error in enumerate(naive, 1):
        rate = max(0.1, 1 / number)
        mean += rate * (error - mean)
    assert told.errors[0, -1, 0, 0, 0] == pytest.approx(mean)
