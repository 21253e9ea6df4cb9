from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from scanl.cli import main
from scanl.errors import ConfigError
from scanl.learning import TrainConfig
from scanl.learning.forecasting import tune
from scanl.learning.forecasting.backtests import PastTargets
from scanl.learning.forecasting.frames import Frames
from scanl.models import TunedForecaster, pretrained_forecaster

WORDS = {"data": ["t.csv"], "question": "forecast", "target": "y", "time": "ds", "horizon": 4, "init": "pretrained"}


@pytest.fixture(autouse=True)
def few_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "MARKS", (2, 10))
    monkeypatch.setattr(tune, "FORECASTS", 500)
    monkeypatch.setattr(tune, "MIN_STRETCHES", 4)


def source(y):
    """A table of days, and the frame."""
    days = pd.date_range("2024-01-01", periods=len(y)).strftime("%Y-%m-%d")
    frame = pd.DataFrame({"unique_id": "a", "ds": days, "y": y})
    frame.drop(columns="unique_id").to_csv("t.csv", index=False)
    return TrainConfig.of(**WORDS).open_source(), frame


def test_the_last_map_alone_learns_if_that_helps(monkeypatch):
    table, frame = source(np.random.default_rng(0).normal(size=150).cumsum())
    reading = tune.HeadOutputs.of(PastTargets.of(table))
    steps, ratios = tune.backtested(reading, tune.BORDERS)
    assert steps == 0 or max(ratios[steps]) <= 0.99
    assert (reading.before(0.6).came < 0.6).all()
    assert (reading.between(0.6, 0.8).origin >= 0.6).all()
    monkeypatch.setattr(tune, "GAIN", 9.0)
    monkeypatch.setattr(tune, "LEAST_GAIN", 9.0)
    monkeypatch.setattr(tune, "CERTAINTY", -9.0)
    choice = tune.choose(table, {}, 1.0)
    model, before = tune.fitted(table, choice, 0), pretrained_forecaster().state_dict()
    after = model.forecaster.state_dict()
    assert [name for name in after if (after[name] != before[name]).any()] == ["output.weight", "output.bias"]
    assert reading.loss(model.forecaster.float()) < reading.loss(tune.copy.deepcopy(pretrained_forecaster()).float())
    model.double().save("run")
    tuned, usual = (Frames.pretrained(4, run=run).fit(frame).predict()["scanl"] for run in ("run", None))
    assert (tuned != usual).all()


def test_a_table_that_is_too_short_keeps_the_model(capfd):
    """Its run, which goes on after an interruption, forecasts as the table is forecast without training."""
    source(np.arange(40.0) % 7)
    Path("run").mkdir()
    Path("run/config.yaml").write_text(TrainConfig.of(**WORDS).to_yaml(), "utf-8")
    assert main(["train", "--resume", "run"]) == 0
    assert "too short to tune it" in capfd.readouterr().err
    assert TunedForecaster.load("run").horizon == 4
    assert main(["forecast", "run", "--out", "tuned.csv"]) == 0
    assert main(["forecast", "t.csv", "--horizon", "4", "--out", "next.csv"]) == 0
    assert Path("tuned.csv").read_text("utf-8") == Path("next.csv").read_text("utf-8")


def test_a_gain_of_few_stretches_is_not_certain():
    """Forecasts of one stretch of steps err together, so they count as one."""
    gains = torch.tensor([1.0, -0.5, 1.0, -0.5, 1.0, -0.5]).repeat(9)
    assert tune._is_certain(gains, torch.arange(54))
    assert not tune._is_certain(gains, torch.arange(54) % 2)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("past", ["x"], "past is .* because the model in the package reads no covariates; leave out --init"),
        ("layer", "lru", "layer is lru, expected none because init is pretrained.* leave out --layer, or --init"),
        ("question", "classify", "init is pretrained, expected a run folder because question is classify"),
    ],
)
def test_options_of_other_models_are_refused(option, value, message):
    config = TrainConfig.of(**{"question": "forecast", "init": "pretrained", option: value})
    with pytest.raises(ConfigError, match=message):
        tune.check(config, {"init": "pretrained", option: value})
