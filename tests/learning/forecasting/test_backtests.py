"""Rolling origins before the test part, and the simple forecasts that they choose."""

import numpy as np
import pandas as pd
import pytest
import torch

from scanl.data import Table
from scanl.learning.forecasting.backtests import (
    BacktestWindows,
    PastTargets,
    Trial,
    _step_by_step,
    combined,
    mean,
    trial,
)
from scanl.learning.forecasting.lag_maps import LagMap, candidates
from scanl.models import Forecaster, Normalization, Stack


def table(path, rows=100, series=2, **options):
    """Return a table of two series of different size, whose season has 4 steps."""
    draw = np.random.default_rng(0)
    wave = np.resize([3.0, 1, 2, 6], rows) + 10
    frames = [
        pd.DataFrame({"id": f"s{i}", "step": np.arange(rows), "y": 10**i * (wave + 0.1 * draw.normal(size=rows))})
        for i in range(series)
    ]
    pd.concat(frames).to_csv(path / "t.csv", index=False)
    return Table(
        [path / "t.csv"], "forecast", "y", **{"time": "step", "series": "id", "horizon": 3, "season": 4, **options}
    )


def test_nothing_of_the_test_part_is_in_the_past(tmp_path):
    source = table(tmp_path)
    past = PastTargets.of(source)
    assert past.ends == [80, 80]
    assert [len(array) for array in past.arrays] == [80, 80]
    source.collection.series[0].target[80:] = 1e9
    again = BacktestWindows(PastTargets.of(source), 5, False, 8.0)
    before = BacktestWindows(past, 5, False, 8.0)
    np.testing.assert_array_equal(again.values, before.values)
    np.testing.assert_array_equal(again.came, before.came)


def test_each_backtest_learns_from_rows_before_those_that_it_measures(tmp_path):
    windows = BacktestWindows(PastTargets.of(table(tmp_path)), 5, False, 8.0)
    assert len(windows.folds) == 3
    for k, (ends, rows) in enumerate(windows.folds):
        learnt = windows.learnt(5, k)
        assert len(learnt)
        assert (windows.origin[learnt] + 3 < ends[learnt]).all()
        assert (windows.origin[rows] + 1 >= ends[rows]).all()


def test_the_windows_are_normalised_as_a_forecaster_normalises(tmp_path):
    """A map in `lags` of a forecaster gives the forecast that was measured."""
    source = table(tmp_path)
    windows = BacktestWindows(PastTargets.of(source), 9, False, 8.0)
    weights = LagMap.of("seasonal_smoothing(9, 0.4, 0.1)").weights(3, 4)
    row = int(np.flatnonzero((windows.array == 1) & (windows.origin == 60))[0])
    expected = windows.location[row] + windows.scale[row] * windows.ahead(weights, np.array([row]))[0]
    model = Forecaster(3, Stack(4, 1, "lru"), distribution="points", lags=9, normalization=Normalization(8.0)).double()
    with torch.no_grad():
        model.lags.weight.copy_(torch.from_numpy(weights.copy()))
        model.head.weight.zero_()
        model.head.bias.zero_()
    y = torch.from_numpy(source.collection.series[1].target[:61].copy())[None]
    forecast, _ = model.predict(y)
    np.testing.assert_allclose(forecast.mean[0, :, 0].numpy(), expected, rtol=1e-9)


def test_a_ridge_finds_the_recurrence_of_a_series():
    y = np.empty(120)
    y[:2] = 1, 0.5
    for t in range(2, 120):
        y[t] = 1.6 * y[t - 1] - 0.9 * y[t - 2] + (2.0 if t % 17 == 0 else 0)
    windows = BacktestWindows(PastTargets([y], [120], [1.0], 1, 1, {0: 120}), 2, False, None)
    measured = trial(windows, LagMap.of("ridge(2, 0, naive)"))
    assert measured is not None
    assert measured.weights.shape == (1, 2)
    np.testing.assert_allclose(measured.weights[0], [1.6, -0.9], atol=0.15)
    naive = trial(windows, LagMap.of("naive"))
    assert measured.error < 0.5
    assert naive.error == pytest.approx(1)


def test_a_ridge_without_rows_to_learn_from_is_left_out(tmp_path):
    windows = BacktestWindows(PastTargets.of(table(tmp_path, rows=30, validation=0.2)), 17, False, 8.0)
    assert trial(windows, LagMap.of("ridge(17, 1, naive)")) is None


def test_the_error_weighs_backtests_equally_whatever_their_size():
    """A series that grows fiftyfold has the error ratio of one that does not."""
    draw = np.random.default_rng(1)
    y = draw.normal(size=90) + 5
    y[-14:] *= 50
    windows = BacktestWindows(PastTargets([y], [90], [1.0], 1, 1, {0: 90}), 3, False, None)
    assert trial(windows, LagMap.of("naive")).error == pytest.approx(1)
    assert trial(windows, LagMap.of("mean(3)")).error < 1.1


def test_the_best_of_each_family_are_combined_on_a_small_table(tmp_path):
    windows = BacktestWindows(PastTargets.of(table(tmp_path)), 9, True, 8.0)
    trials = [trial(windows, one) for one in candidates(9, 4)]
    chosen = combined(windows, trials)
    best = min(one.error for one in trials)
    assert len({(one.map.family, len(one.map.numbers)) for one in chosen}) == len(chosen) > 1
    assert all(one.error <= 1.2 * best for one in chosen)
    assert best < 1
    assert windows.error(mean(chosen)) < 1.1 * best


@pytest.mark.parametrize("rows", [100, 600])
def test_a_backtest_that_does_not_count_changes_no_choice(rows, tmp_path):
    """With few origins and with many."""
    windows = BacktestWindows(PastTargets.of(table(tmp_path, rows=rows)), 9, False, 8.0)
    trials = [trial(windows, one) for one in candidates(9, 4)]
    expected, before = combined(windows, trials, without=1), combined(windows, trials)
    draw = np.random.default_rng(0)
    for one in trials:
        one.forecasts[1] = one.forecasts[1] + draw.normal(size=one.forecasts[1].shape)
        one.errors = windows.ratios(one.forecasts)
    assert [one.map for one in combined(windows, trials, without=1)] == [one.map for one in expected]
    assert [one.map for one in combined(windows, trials)] != [one.map for one in before]


def test_least_squares_with_missing_numbers_are_those_of_a_loop(tmp_path):
    source = table(tmp_path)
    source.collection.series[0].target[[20, 33]] = np.nan
    windows = BacktestWindows(PastTargets.of(source), 5, False, 8.0)
    rows, prior = windows.learnt(5, 1), np.random.default_rng(0).normal(size=(3, 5))
    assert np.isnan(windows.came[rows]).any()
    x, found = windows.values[rows, :5], windows.ridge(prior, 1, 2.0)
    for h in range(3):
        known = ~np.isnan(windows.came[rows, h])
        design = np.concatenate([x[known], np.sqrt(2.0) * np.eye(5)])
        off = np.concatenate([windows.came[rows, h][known] - x[known] @ prior[h], np.zeros(5)])
        np.testing.assert_allclose(found[h], prior[h] + np.linalg.lstsq(design, off)[0], rtol=1e-8)


def test_many_origins_combine_what_lowers_the_error_most(tmp_path):
    windows = BacktestWindows(PastTargets.of(table(tmp_path, rows=600)), 9, False, 8.0)
    trials = [trial(windows, one) for one in candidates(9, 4)]
    chosen = combined(windows, trials)
    assert windows.error(mean(chosen)) <= windows.error(mean(sorted(trials, key=lambda one: one.error)[:3]))


def test_the_best_prefix_of_an_ensemble_is_kept(tmp_path):
    """Of ten steps, each of which adds what lowers the error most, by plain loops; forecasts are off by a constant."""
    windows, sizes = BacktestWindows(PastTargets.of(table(tmp_path)), 9, False, 8.0), set()
    came = [np.nan_to_num(windows.came[rows]) for _, rows in windows.folds]
    for seed in range(6):
        library = []
        for off in np.random.default_rng(seed).normal(size=5):
            forecasts = [ahead + off for ahead in came]
            library.append(Trial(LagMap("mean", (off,)), came[0], came, forecasts, windows.ratios(forecasts)))
        library.sort(key=lambda one: one.error)
        ensemble, errors = list(library[:3]), []
        while True:
            errors.append(windows.error(mean(ensemble)))
            if len(ensemble) == 10:
                break
            ensemble.append(min(library, key=lambda one, so_far=ensemble: windows.error(mean([*so_far, one]))))
        size = 3 + int(np.argmin(errors))
        assert [one.map for one in _step_by_step(windows, library, [0, 1, 2])] == [one.map for one in ensemble[:size]]
        sizes.add(size)
    assert len(sizes) > 1
    assert min(sizes) < 10


def test_the_last_origin_of_what_is_learnt_and_measured_is_exact():
    """A horizon of 2: the numbers ahead of an origin that is learnt are before the border, by plain loops."""
    y = np.random.default_rng(0).normal(size=60).cumsum()
    windows = BacktestWindows(PastTargets([y], [60], [1.0], 1, 2, {0: 60}), 3, False, None)
    borders = [round(share * 60) for share in windows.past.borders]
    for k, (ends, rows) in enumerate(windows.folds):
        assert set(ends) == {borders[k]}
        assert windows.origin[rows].tolist() == [t for t in range(59) if borders[k] <= t + 1 < borders[k + 1]]
        expected = [t for t in range(60) if t - 2 >= 0 and t + 2 <= borders[k] - 1]
        assert windows.origin[windows.learnt(3, k)].tolist() == expected


def test_the_error_is_that_of_plain_loops():
    """Steps ahead whose last origins have no number yet count as much as the others."""
    y = np.random.default_rng(0).normal(size=40).cumsum()
    windows = BacktestWindows(PastTargets([y], [40], [2.0], 1, 3, {0: 40}), 3, False, None)

    def of(forecast):
        folds = []
        for _, rows in windows.folds:
            steps = []
            for h in range(3):
                ahead = [(forecast(t), y[t + 1 + h]) for t in windows.origin[rows] if t + 1 + h < 40]
                steps += [np.mean([abs(came - guess) / 2 for guess, came in ahead])] if ahead else []
            folds.append(np.mean(steps))
        return np.array(folds)

    naive = of(lambda t: y[t])
    expected = np.mean(of(lambda t: y[t - 2 : t + 1].mean()) / np.maximum(naive, naive.mean() / 100))
    assert trial(windows, LagMap.of("mean(3)")).error == pytest.approx(expected, rel=1e-9)


def test_small_counts_are_seen(tmp_path):
    counts = [np.array([0.0, 2, 1, np.nan, 3] * 8)]
    past = PastTargets(counts, [40], [1.0], 1, 2, {0: 40})
    assert past.whole
    assert past.least == 0
    assert not past.positive
    other = PastTargets([array - 0.5 for array in counts], [40], [1.0], 1, 2, {0: 40})
    assert not other.whole
    assert other.least is None
    windows = BacktestWindows(past, 2, False, None)
    rows = windows.folds[0][1]
    errors = windows.errors(windows.ahead(LagMap.of("mean(2)").weights(2, 1), rows), rows)
    assert set(np.unique(errors[~np.isnan(errors)] % 1)) == {0}
