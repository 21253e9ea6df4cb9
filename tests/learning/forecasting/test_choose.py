"""A forecaster that a table chooses."""

import itertools
import statistics
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from scanl.cli.train import run as train
from scanl.data import Table
from scanl.data.base import LEVELS
from scanl.errors import ConfigError
from scanl.learning import RunFolder
from scanl.learning.evaluation import baselines, measures
from scanl.learning.forecasting import choose as choosing
from scanl.learning.forecasting.backtests import BacktestWindows, PastTargets
from scanl.learning.forecasting.choose import ForecasterChoice, _factors, _Mark, choose, fitted
from scanl.learning.forecasting.intervals import MIN_ERRORS, Intervals
from scanl.learning.forecasting.work import Plan
from scanl.learning.progress import SILENCE, Progress

COVERS = ["learning/forecasting/work"]
ROWS = 96


class Heard(Progress):
    """A listener that keeps what it takes."""

    def __init__(self):
        self.lines, self.shares = [], []

    def note(self, line):
        self.lines.append(line)

    def at(self, share, count):
        self.shares.append(share)


def airline(path, rows=ROWS, series=1, **options):
    """Return a table of monthly series that grow by ratios, with a season."""
    draw = np.random.default_rng(3)
    months, season = np.arange(rows), np.exp(0.3 * np.sin(2 * np.pi * np.arange(rows) / 12))
    frames = [
        pd.DataFrame(
            {
                "id": f"s{i}",
                "ds": pd.date_range("2010-01-31", periods=rows, freq="ME"),
                "y": 100 * np.exp(0.01 * months) * season * np.exp(0.02 * draw.normal(size=rows)),
            }
        )
        for i in range(series)
    ]
    pd.concat(frames).to_csv(path / "t.csv", index=False)
    return Table([path / "t.csv"], "forecast", "y", **{"time": "ds", "series": "id", "horizon": 4, **options})


def test_the_choice_is_better_than_the_seasonal_naive_and_covers(tmp_path):
    source, heard = airline(tmp_path), Heard()
    choice = choose(source, {}, 60, heard)
    assert choice.options.keys() | {"minutes"} == choosing.DEFAULTS.keys()  # the help has what is chosen
    assert choice.options["log"]
    assert choice.options["steps"] == 0
    assert choice.options["span"] == 24
    assert any("simple forecasts of the logarithm" in line for line in heard.lines)
    assert heard.shares == sorted(heard.shares)
    assert 0 < heard.shares[0] < 0.1
    assert 0.8 < heard.shares[-1] <= 1
    source = airline(tmp_path, distribution="quantiles", sequence_length=choice.options["sequence_length"])
    model, exam = fitted(source, choice, 0), source.exam()
    scores, naive = measures(model, source, exam.examples), baselines(source, exam)["seasonal naive"]
    assert scores["MASE"] < 0.6 * naive["MASE"]
    assert 0.75 < scores["coverage"] <= 1
    assert "the seasonal naive," in choice.table()


def test_fixed_options_are_kept(tmp_path):
    fixed = {"log": False, "span": 7.0, "start": ["seasonal", "drift(6)"], "dim": 8, "layer": "lru", "lags": 20}
    choice = choose(airline(tmp_path), fixed, 60)
    assert {name: choice.options[name] for name in fixed} == fixed
    seasonal = np.zeros((4, 12))
    seasonal[np.arange(4), 11 - np.arange(4)] = 1
    assert choice.weights.shape == (4, 12)
    drift = np.zeros((4, 12))
    drift[:, 0], drift[:, 6] = 1 + np.arange(1, 5) / 6, -np.arange(1, 5) / 6
    np.testing.assert_allclose(choice.weights, (seasonal + drift) / 2)


def test_nothing_better_than_the_naive_is_said(tmp_path, monkeypatch):
    source, heard = airline(tmp_path, rows=60), Heard()
    monkeypatch.setattr(
        "scanl.learning.forecasting.choose.combined",
        lambda windows, trials, _=None: [max(trials, key=lambda t: t.error)],
    )
    choice = choose(source, {"log": False, "pretrained": 0.0}, 60, heard)
    assert choice.options["start"] == ["seasonal"]
    assert heard.lines[-1].startswith("nothing is better than the seasonal naive in the backtests")


def test_a_stack_learns_where_it_helps_and_the_quantiles_are_calibrated(tmp_path, monkeypatch):
    """The number depends on the sign of a covariate that the simple forecasts do not read."""
    rows, draw = 240, np.random.default_rng(0)
    u = np.sign(draw.normal(size=rows))
    frame = pd.DataFrame(
        {"step": np.arange(rows), "u": u, "y": np.abs(10 + 4 * np.roll(u, 0) + draw.normal(size=rows))}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.setattr("scanl.learning.forecasting.choose.LEAST_ROWS", 100)
    monkeypatch.setattr("scanl.learning.forecasting.choose.STEPS", 30)
    options = {"time": "step", "future": ["u"], "horizon": 2}
    choice = choose(Table([tmp_path / "t.csv"], "forecast", "y", **options), {"log": False}, 60)
    assert choice.options["steps"]
    assert choice.options["calibrated"]
    assert choice.calibration.shape == (2, 11)
    assert (choice.calibration > 0).all()
    assert (choice.calibration[:, 5] == 1).all()
    more = {"distribution": "quantiles", "sequence_length": choice.options["sequence_length"]}
    source = Table([tmp_path / "t.csv"], "forecast", "y", **options, **more)
    model = fitted(source, choice, 0)
    np.testing.assert_allclose(model.calibration.numpy(), choice.calibration, rtol=1e-6)
    scores = measures(model, source, source.exam().examples)
    choice.options["steps"] = 0
    simple = measures(fitted(source, choice, 0), source, source.exam().examples)
    assert scores["MASE"] < 0.8 * simple["MASE"]


def measured(draw, n, log, steps=2):
    """Numbers about 5, whose deviation is 1.5 below the median and 0.8 above; quantiles of a normal one of 1."""
    z = draw.normal(size=(n, steps, 1))
    came, normal = 5 + np.where(z < 0, 1.5, 0.8) * z, statistics.NormalDist()
    quantiles = np.broadcast_to(5 + np.array([normal.inv_cdf(p) for p in LEVELS]), (n, steps, 1, len(LEVELS)))
    both = (torch.from_numpy(np.exp(x) if log else x.copy()) for x in (quantiles, came))
    return _Mark({}, *both)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [MIN_ERRORS // 2, 150])
def test_calibrated_quantiles_have_their_levels_in_the_backtests(n, log):
    """Below the median and above, of numbers and of logarithms. Few forecasts have the factors of all steps."""
    marks = [measured(np.random.default_rng(k), n, log) for k in range(2)]
    factors = _factors(marks, log)
    assert factors.shape == (2, len(LEVELS))
    came, quantiles = (torch.cat([getattr(mark, name) for mark in marks]) for name in ("came", "quantiles"))
    came, quantiles = (came.log(), quantiles.log()) if log else (came, quantiles)
    for k, level in enumerate(LEVELS):
        at = 5 + torch.from_numpy(factors[:, k])[:, None] * (quantiles[..., k] - 5)
        below = (came <= at + 1e-9).double().mean((0, 2)).numpy()
        if abs(level - 0.5) > 0.15:  # nearer, the factor may be at its bound
            np.testing.assert_allclose(below, level, rtol=0, atol=1.5 / (2 * n))
    few = [measured(np.random.default_rng(k), MIN_ERRORS // 4, log) for k in range(2)]
    one, two = _factors(few, log)
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(*factors)


def test_the_factors_of_a_calibration_are_bounded():
    mark = measured(np.random.default_rng(0), 300, False)
    far = _factors([_Mark({}, mark.quantiles, 5 + 100 * (mark.came - 5))], False)
    near = _factors([_Mark({}, mark.quantiles, 5 + (mark.came - 5) / 100)], False)
    others = np.array(LEVELS) != 0.5
    assert (far[:, others] == 4.0).all()
    assert (near[:, others] == 0.3).all()


SCRIPTS = {  # CRPS at each measurement, in the last backtest and in the one before, and the best of them
    "both gain": ([[1, 0.9, 0.7, 0.8, 0.9, 1, 1], [1, 0.9, 0.8, 0.9, 1, 1, 1]], 2),
    "one loses": ([[1, 0.9, 0.5, 0.9, 1, 1, 1], [1, 1, 1.01, 1, 1, 1, 1]], 0),
    "one hardly gains": ([[1, 0.9, 0.5, 0.9, 1, 1, 1], [1, 1, 0.995, 1, 1, 1, 1]], 0),
    "too little": ([[1, 0.99, 0.985, 1, 1, 1, 1], [1, 0.99, 0.985, 1, 1, 1, 1]], 0),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stack_stays_if_it_gains_in_both_last_backtests(name, tmp_path, monkeypatch):
    script, best = SCRIPTS[name]
    source = airline(tmp_path)
    past, borders, scores = PastTargets.of(source), [], iter([score for row in script for score in row])

    def mark(*_):
        score = next(scores)
        one = measured(np.random.default_rng(0), 300, False)
        return _Mark({"CRPS": score, "MASE": score}, one.quantiles, one.came)

    class Still:
        def __init__(self, *_):
            pass

        def go(self, step):
            pass

    part = choosing._part

    def parted(source, past, begin, end, options):
        borders.append((begin, end))
        return part(source, past, begin, end, options)

    monkeypatch.setattr(choosing, "_part", parted)
    monkeypatch.setattr(choosing, "_Training", Still)
    monkeypatch.setattr(choosing, "begun", lambda *_: SimpleNamespace(stack=torch.nn.Linear(1, 1)))
    monkeypatch.setattr(choosing._Mark, "of", mark)
    options = {"log": False, "lags": 3, "sequence_length": 16, "distribution": "quantiles", "calibrated": True}
    choice = ForecasterChoice(options | choosing.STACK, {}, np.zeros(0), Intervals(*[np.zeros(0)] * 2), 16)
    choosing._learn(source, past, choice, [np.zeros(0)] * 3, {}, Plan(1e6), SILENCE)
    assert choice.options["steps"] == choosing.STEPS * best // 6
    assert borders == [tuple(past.borders[2:4]), tuple(past.borders[1:3])]
    expected = _factors([measured(np.random.default_rng(0), 300, False)] * 2, False) if best else None
    np.testing.assert_array_equal(choice.calibration, expected)


def test_a_map_that_needs_more_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"start: \['ridge\(70, 1, naive\)'\] needs more rows than the table has"):
        choose(airline(tmp_path), {"start": ["ridge(70, 1, naive)"]}, 60)


@pytest.mark.parametrize(("error", "share"), [(0.0, 0.97), (1e9, 0.0), (np.nan, 0.5)])
def test_the_pretrained_forecaster_has_a_share_where_it_helps(error, share, tmp_path, monkeypatch):
    """One that knows what comes, up to an error, in place of the real one; NaN: it knows no number."""
    source = airline(tmp_path)
    past = PastTargets.of(source)

    class Prophet:
        def predict(self, x, *, horizon, season, levels):
            assert season == (12, 1)
            ahead = []
            for row in x[..., 0].numpy():
                (at,) = np.flatnonzero(np.isclose(past.arrays[0], row[-1], rtol=1e-9, atol=0))
                came = past.arrays[0][at + 1 : at + 1 + horizon]
                ahead.append(np.concatenate([came, np.zeros(horizon - len(came))]) + error)
            return SimpleNamespace(mean=torch.from_numpy(np.stack(ahead))[..., None]), None

    monkeypatch.setattr(choosing, "pretrained_forecaster", Prophet)
    choice = choose(source, {"steps": 0, "log": True, "lags": 13}, 60)
    assert choice.options["pretrained"] == share
    assert choice.options["sequence_length"] == (choosing.MIN_READ_STEPS if share else choice.length)


def test_nothing_is_chosen_on_the_test_part(tmp_path):
    source = airline(tmp_path)
    expected = choose(source, {}, 60)
    source.collection.series[0].target[-round(0.2 * ROWS) :] = 1e6
    again = choose(source, {}, 60)
    assert again.options == expected.options
    assert (again.weights == expected.weights).all()


def test_the_command_writes_what_it_chose_and_can_be_told_it(tmp_path, capfd):
    airline(tmp_path)
    line = [
        "--data",
        str(tmp_path / "t.csv"),
        "--question",
        "forecast",
        "--target",
        "y",
        "--time",
        "ds",
        "--horizon",
        "4",
    ]
    assert train([*line, "--series", "id", "--dim", "8", "--out", str(tmp_path / "run")]) == 0
    out, err = capfd.readouterr()
    assert "seasonal naive" in out
    assert "\nchosen: " in err
    assert "of the logarithm; beside it the model in the package, with a share of 0." in err
    assert err.endswith(f"next: scanl forecast {tmp_path / 'run'} --out next.csv --picture next.png\n")
    folder = RunFolder.open(tmp_path / "run")
    for path in (folder.weights, folder.choice, folder.path / "forecast.png"):
        assert path.exists()
    written = yaml.safe_load(folder.config_file.read_text("utf-8"))
    assert written["head"]["start"]
    assert written["training"]["steps"] == 0
    assert written["stack"]["dim"] == 8
    again = ["--config", str(folder.config_file), "--out", str(tmp_path / "again")]
    assert train(again) == 0
    first, second = (RunFolder.open(tmp_path / name).load_model().state_dict() for name in ("run", "again"))
    assert first.keys() == second.keys()
    for name in first.keys() - {"head.bias", "usual_errors"}:  # of intervals: a start that is told was not chosen
        torch.testing.assert_close(second[name], first[name], rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="run is complete: its model was chosen; to choose again"):
        train(["--resume", str(tmp_path / "run")])


def test_what_the_minutes_leave_out_is_said(tmp_path, monkeypatch):
    source, heard = airline(tmp_path), Heard()
    choice = choose(source, {"log": False}, 1e-9, heard)
    said = [
        line for line in heard.lines if line.startswith("left out: simple forecasts from 9 last values, for which ")
    ]
    assert len(said) == 1
    assert said[0].endswith(" seconds are planned; give more minutes")
    assert said[0] in choice.exceptions
    assert choice.options["lags"] <= 17
    monkeypatch.setattr(choosing, "LEAST_ROWS", 50)
    choice = choose(source, {"log": False}, 0.02, heard)
    assert [line for line in choice.exceptions if line.startswith("left out: a stack of hawk, for which ")]
    assert choice.options["steps"] == 0


def test_the_clock_and_other_programs_change_no_choice(tmp_path, monkeypatch):
    """A stack stops by the time of the processor in its own thread alone, and says so."""
    source = airline(tmp_path)
    monkeypatch.setattr(choosing, "LEAST_ROWS", 50)
    monkeypatch.setattr(choosing, "STEPS", 6)
    monkeypatch.setattr(choosing, "MARKS", 1)
    expected = choose(source, {"log": False}, 2)
    for name in ("monotonic", "perf_counter", "time", "process_time"):
        clock = itertools.count(1, 1e6)
        monkeypatch.setattr(time, name, lambda clock=clock: next(clock))
    again = choose(source, {"log": False}, 2)
    assert again.options == expected.options
    np.testing.assert_array_equal(again.weights, expected.weights)
    assert not again.exceptions
    clock = itertools.count(1, 1e6)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    slow = choose(source, {"log": False}, 2)
    assert slow.exceptions == ["left out: a stack of hawk, which is slower here than planned; give more minutes"]
    assert slow.options["steps"] == 0


def test_fewer_lags_than_a_season_are_kept(tmp_path):
    choice = choose(airline(tmp_path), {"lags": 3}, 60)
    assert choice.options["lags"] == 3
    assert choice.weights.shape[1] <= 3


def test_windows_are_made_for_each_channel(tmp_path):
    from scanl.learning.forecasting.backtests import PastTargets

    frame = pd.DataFrame({"step": np.arange(50), "a": np.arange(50.0), "b": -np.arange(50.0)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    source = Table([tmp_path / "t.csv"], "forecast", "a,b", time="step", horizon=2)
    windows = BacktestWindows(PastTargets.of(source), 3, False, None)
    assert set(windows.array) == {0, 1}
    choice = choose(source, {}, 60)
    assert choice.intervals.quantiles.shape == (2, 2, 11)
    assert (np.diff(choice.intervals.quantiles) >= 0).all()


def test_another_distribution_is_not_chosen_for(tmp_path):
    with pytest.raises(ConfigError, match="choose: distribution is points, expected quantiles because the errors in"):
        choose(airline(tmp_path), {"distribution": "points"}, 1)
