"""Intervals from the errors in backtests."""

import numpy as np
import pytest

from scanl.data.base import LEVELS
from scanl.learning.forecasting.backtests import BacktestWindows, PastTargets
from scanl.learning.forecasting.intervals import ALIKE, MIN_ERRORS, Intervals, _quantiles
from scanl.learning.forecasting.lag_maps import LagMap
from scanl.models.forecasting.recent_errors import PRIOR, recent_steps


def test_a_step_with_few_errors_has_the_shape_of_all_steps():
    """By plain loops: the first step ahead has enough errors, the second has not."""
    draw = np.random.default_rng(0)
    errors = draw.gamma(2.0, [1.0, 3.0], size=(MIN_ERRORS, 2)) - [1.7, 5.0]
    errors[10:, 1] = np.nan
    known = [e[~np.isnan(e)] for e in errors.T]
    usual = np.array([np.abs(e).mean() for e in known])
    relative, count = np.concatenate([e / unit for e, unit in zip(known, usual, strict=True)]), MIN_ERRORS / 2
    shape = []
    for p in LEVELS:
        even = np.sign(p - 0.5) * np.quantile(np.abs(relative), abs(2 * p - 1))
        alike = ALIKE / (ALIKE + count)
        shape.append((1 + 1 / count) * (alike * even + (1 - alike) * np.quantile(relative, p)))
    found = _quantiles(errors, usual)
    for expected, row in zip((np.quantile(known[0], LEVELS), usual[1] * np.array(shape)), found, strict=True):
        assert (expected[:5] < 0).all()
        assert (expected[6:] > 0).all()
        np.testing.assert_allclose(row, [*expected[:5], 0, *expected[6:]], rtol=1e-12)


@pytest.mark.parametrize("channels", [1, 2])
def test_the_errors_are_in_units_of_those_before_an_origin(channels):
    """By a loop over the naive map, of series whose steps grow threefold in the last backtest."""
    draw, rows = np.random.default_rng(0), 200
    arrays = [(k + 1) * np.cumsum(draw.normal(size=rows) * np.where(np.arange(rows) < 160, 1, 3)) for k in range(2)]
    windows = BacktestWindows(PastTargets(arrays, [rows] * 2, [1.0] * 2, 1, 1, {0: rows}), 1, False, 40.0)
    weights = [LagMap("naive", ()).weights(1, 1)] * 3
    found = Intervals.of(windows, weights, channels)
    errors, factors, of_channel = [], [], []
    where = [(windows.array[row], windows.origin[row], row) for _, measured in windows.folds for row in measured]
    steps = [np.diff(y) for y in arrays]
    for i, t, row in where:
        if t + 1 < rows:
            errors.append(steps[i][t] / windows.scale[row])
            of_channel.append(i % channels)
    usual = [np.mean(np.abs(np.array(errors)[np.array(of_channel) == k])) for k in range(channels)]
    np.testing.assert_allclose(found.usual[:, 0], usual, rtol=1e-9)
    m = recent_steps(1)
    for i, t, row in where:
        if t + 1 < rows:
            recent = np.abs(steps[i][t - m : t]) / windows.scale[row] / usual[i % channels]
            factors.append((PRIOR + recent.sum()) / (PRIOR + m))
    for k in range(channels):
        mine = np.array(of_channel) == k
        expected = _quantiles((np.array(errors) / factors)[mine][:, None], np.array(usual[k : k + 1]))
        np.testing.assert_allclose(found.quantiles[k], expected, rtol=1e-9)


def test_few_errors_make_wide_and_even_intervals():
    errors = np.array([-1.0, -0.5, 0, 3])
    few, many = (_quantiles(np.tile(errors, n)[:, None], np.ones(1))[0] for n in (1, 40))
    assert few[-1] - few[0] > 1.2 * (many[-1] - many[0])
    assert -few[0] / few[-1] > 1.5 * -many[0] / many[-1]
