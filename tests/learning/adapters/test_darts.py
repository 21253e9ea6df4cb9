"""The models for darts go through what darts does with its global models."""

import numpy as np
import pytest

pytest.importorskip("darts", reason="darts is not installed: pip install 'scanl[darts]'")
pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

import pandas as pd
from darts import TimeSeries
from darts.metrics import mae
from darts.models import NaiveSeasonal, RegressionEnsembleModel

from scanl.errors import ConfigError, DataError
from scanl.learning.adapters.darts import DartsForecaster, PretrainedDartsForecaster
from scanl.learning.forecasting.frames import Frames

pytestmark = pytest.mark.filterwarnings("ignore")  # of darts
SMALL = {"layer": "lru", "dim": 8, "steps": 2, "sequence_length": 24}
N, H = 96, 6


def series(values, static=None):
    months = pd.date_range("2020-01-01", periods=len(values), freq="MS")
    return TimeSeries.from_times_and_values(months, values, columns=["y"], static_covariates=static)


WAVE = 10 * np.sin(2 * np.pi * np.arange(N + 24) / 12) + np.random.default_rng(0).normal(size=N + 24)
ONE, OTHER = (series(level + WAVE[:N], pd.DataFrame({"size": [level]})) for level in (100.0, 50.0))
PAST, FUTURE = series(np.arange(N) % 3.0), series(np.arange(N + 24) % 5.0)
COVARIATES = {"past_covariates": PAST, "future_covariates": FUTURE}


@pytest.fixture(scope="module")
def model():
    both = {name: [each, each] for name, each in COVARIATES.items()}
    return DartsForecaster(H, quantiles=[0.1, 0.5, 0.9], options=SMALL).fit([ONE, OTHER], **both)


def test_series_with_covariates_are_the_frame_of_one_model(model):
    """Medians, quantiles and samples, for one series and for several, as far as is wanted."""
    frames = [
        pd.DataFrame({"unique_id": name, "ds": one.time_index, "y": one.values()[:, 0], "size": size,
                      "past": np.arange(N) % 3.0, "future": np.arange(N) % 5.0})
        for name, one, size in (("0", ONE, 100.0), ("1", OTHER, 50.0))
    ]  # fmt: skip
    roles = {"past": ["past"], "static": ["size"], "future": ["future"]}
    expected = Frames(H, freq="MS", **roles, **SMALL).fit(pd.concat(frames))
    months = FUTURE.time_index[N : N + H]
    known = [pd.DataFrame({"unique_id": i, "ds": months, "future": np.arange(N, N + H) % 5.0}) for i in "01"]
    answers = expected.predict(X=pd.concat(known), levels=[80])
    both = {name: [each, each] for name, each in COVARIATES.items()}
    found = model.predict(4, [ONE, OTHER], **both)
    for number, one in enumerate(found):
        rows = answers[answers["unique_id"] == str(number)]
        np.testing.assert_allclose(one.values()[:, 0], rows["scanl"][:4], rtol=1e-6)
        assert one.time_index.tolist() == rows["ds"].tolist()[:4]
    quantiles = model.predict(H, OTHER, **COVARIATES, predict_likelihood_parameters=True)
    assert quantiles.components.tolist() == ["y_q0.100", "y_q0.500", "y_q0.900"]
    np.testing.assert_allclose(quantiles.values(), rows[["scanl-lo-80", "scanl", "scanl-hi-80"]], rtol=1e-6)
    samples = model.predict(H, OTHER, **COVARIATES, num_samples=4000, random_state=1)
    width = rows["scanl-hi-80"] - rows["scanl-lo-80"]
    for p, name in ((0.1, "scanl-lo-80"), (0.5, "scanl"), (0.9, "scanl-hi-80")):
        assert (np.abs(samples.quantile(p).values()[:, 0] - rows[name]) < 0.06 * width).all()
    assert samples == model.predict(H, OTHER, **COVARIATES, num_samples=4000, random_state=1)


def test_more_steps_read_the_medians_before_them(model):
    found = model.predict(H + 2, ONE, **COVARIATES)
    first = model.predict(H, ONE, **COVARIATES)
    rest = model.predict(2, ONE.append(first), **COVARIATES)
    np.testing.assert_allclose(found.values(), np.concatenate([first.values(), rest.values()]))
    assert found.time_index.equals(FUTURE.time_index[N : N + H + 2])


def test_what_darts_does_with_models(model, tmp_path):
    """Historical forecasts, backtests, residuals, a search, an ensemble, and a file."""
    options = {"start": 0.9, "forecast_horizon": 3, "stride": 2}
    history = model.historical_forecasts(ONE, **COVARIATES, **options, retrain=False, last_points_only=False)
    one = history[1]
    expected = model.predict(3, ONE.drop_after(one.start_time()), **COVARIATES)
    np.testing.assert_allclose(one.values(), expected.values(), rtol=1e-6)
    both = {name: [each, each] for name, each in COVARIATES.items()}
    errors = model.backtest([ONE, OTHER], **both, **options, retrain=False, metric=mae)
    assert len(errors) == 2
    assert np.isfinite(errors).all()
    fresh = DartsForecaster(3, options=SMALL)
    assert np.isfinite(fresh.backtest(ONE, **options, retrain=True, metric=mae))
    assert np.isfinite(model.residuals(ONE, **COVARIATES, start=0.95, forecast_horizon=1, retrain=False).values()).all()
    choices = {"output_chunk_length": [3], "options": [SMALL, {**SMALL, "steps": 1}]}
    _, best, error = DartsForecaster.gridsearch(choices, ONE, **options, metric=mae)
    assert best["options"] in choices["options"]
    assert np.isfinite(error)
    ensemble = RegressionEnsembleModel([NaiveSeasonal(12), fresh.untrained_model()], regression_train_n_points=12)
    assert len(ensemble.fit(ONE).predict(3)) == 3
    model.save(tmp_path / "model.pkl")
    loaded = DartsForecaster.load(tmp_path / "model.pkl", trusted=True)
    assert loaded.predict(H, ONE, **COVARIATES) == model.predict(H, ONE, **COVARIATES)


def test_backtests_choose_for_steps_without_dates():
    wave = TimeSeries.from_values(np.sin(2 * np.pi * np.arange(80) / 8))
    found = DartsForecaster(4, minutes=0.01, options={"season": 8}).fit(wave).predict(4)
    assert found.time_index.tolist() == [80, 81, 82, 83]
    np.testing.assert_allclose(found.values()[:, 0], np.sin(2 * np.pi * np.arange(80, 84) / 8), atol=0.05)


def test_mistakes_are_one_line(model):
    both = {name: [each, each] for name, each in COVARIATES.items()}
    with pytest.raises(ConfigError, match="darts: n is 7, expected at most 6, output_chunk_length, for samples"):
        model.predict(7, ONE, **COVARIATES, num_samples=2)
    with pytest.raises(
        DataError, match="future_covariates have no row at 2028-01-01 00:00:00, expected one at each of"
    ):
        model.predict(2, ONE, PAST, FUTURE[:N])
    with pytest.raises(DataError, match="series has 2 components, expected 1; give them as several series"):
        DartsForecaster(3).fit(ONE.stack(OTHER.with_columns_renamed("y", "z")))
    with pytest.raises(DataError, match="past_covariates are 2 series, expected 1 as in series"):
        model.predict(2, [ONE], both["past_covariates"], [FUTURE])
    with pytest.raises(ValueError, match="trained with future covariates"):
        model.predict(2, ONE, PAST)


def test_the_model_in_the_package_is_its_frame(tmp_path):
    """It finds the season of what it reads, not of what it was fitted on; static covariates are not read."""
    model = PretrainedDartsForecaster(H, quantiles=[0.1, 0.5, 0.9]).fit(ONE)
    days = TimeSeries.from_times_and_values(pd.date_range("2020-01-01", periods=80), np.arange(80) % 7.0)
    frame = pd.DataFrame({"unique_id": "0", "ds": days.time_index, "y": days.values()[:, 0]})
    answers = Frames.pretrained(H, freq="D").fit(frame).predict(levels=[80])
    assert model.predict(H, days).values()[:, 0].tolist() == answers["scanl"].tolist()
    quantiles = model.predict(H, days, predict_likelihood_parameters=True)
    np.testing.assert_allclose(quantiles.values(), answers[["scanl-lo-80", "scanl", "scanl-hi-80"]])
    history = model.historical_forecasts(ONE, start=0.9, forecast_horizon=3, stride=3, retrain=False)
    assert np.isfinite(history.values()).all()
    model.save(tmp_path / "model.pkl")
    assert PretrainedDartsForecaster.load(tmp_path / "model.pkl", trusted=True).predict(2) == model.predict(2)
    for role in ("past", "future"):
        with pytest.raises(ConfigError, match=f"darts: {role}_covariates are given, expected none because the model"):
            model.predict(2, ONE, **{f"{role}_covariates": PAST})
        with pytest.raises(ConfigError, match=f"darts: {role}_covariates are given, expected none because the model"):
            PretrainedDartsForecaster(H).fit(ONE, **{f"{role}_covariates": PAST})
