"""The forecasters for sktime pass sktime's own checks; a panel is learnt by one model."""

import numpy as np
import pytest

pytest.importorskip("sktime", reason="sktime is not installed: pip install 'scanl[sktime]'")
pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

import pandas as pd
from sktime.utils.estimator_checks import check_estimator

from scanl.errors import ConfigError
from scanl.learning.adapters.sktime import PretrainedSktimeForecaster, SktimeForecaster
from scanl.learning.forecasting.frames import Frames

pytestmark = pytest.mark.filterwarnings("ignore")  # of sktime
SMALL = {"layer": "lru", "dim": 8, "steps": 2, "sequence_length": 12}


@pytest.mark.parametrize(
    ("forecaster", "number"), [(SktimeForecaster, 0), (SktimeForecaster, 1), (PretrainedSktimeForecaster, 0)]
)
def test_checks_of_sktime(forecaster, number):
    """With a fixed model, with backtests that choose, and without training."""
    results = check_estimator(forecaster(**forecaster.get_test_params()[number]), verbose=False)
    assert len(results) > 400
    assert {name: result for name, result in results.items() if result != "PASSED"} == {}


def panel(rows=40, start=0):
    """Two series of months, of which the second one ends a month earlier, and a covariate that is known ahead."""
    months = pd.period_range("2020-01", periods=rows, freq="M")
    frames = [pd.DataFrame({"y": np.sin(np.arange(n)) + 10 * (rows - n), "price": np.cos(np.arange(n))}, months[:n])
              for n in (rows, rows - 1)]  # fmt: skip
    both = pd.concat(frames, keys=["b", "a"], names=["shop", "month"])
    return both[both.index.get_level_values(1) >= months[start]]


def test_a_panel_is_the_frame_of_one_model():
    """Steps that are not next to each other, after each series' own end; with X; quantiles; and after an update."""
    table = panel()
    model = SktimeForecaster(options=SMALL).fit(table[["y"]], X=table[["price"]], fh=[1, 3])
    ahead = panel(43)[["price"]]
    found = model.predict(X=ahead)
    frame = table.rename_axis(["unique_id", "ds"]).reset_index()
    expected = Frames(3, future=["price"], **SMALL).fit(frame)
    known = ahead.rename_axis(["unique_id", "ds"]).reset_index()
    answers = expected.predict(X=known, levels=[80])
    one_and_three = answers.groupby("unique_id", sort=False).nth([0, 2])
    np.testing.assert_allclose(found["y"], one_and_three["scanl"])
    assert found.index.tolist() == [*zip(one_and_three["unique_id"], one_and_three["ds"], strict=True)]
    quantiles = model.predict_quantiles(X=ahead, alpha=[0.9, 0.5, 0.1])
    np.testing.assert_allclose(quantiles, one_and_three[["scanl-hi-80", "scanl", "scanl-lo-80"]])
    newer, later = panel(42, start=39), panel(45)[["price"]]
    model.update(newer[["y"]], X=newer[["price"]], update_params=False)
    more = pd.concat([table, newer[~newer.index.isin(table.index)]]).sort_index(level=0, sort_remaining=False)
    answers = expected.predict(
        more.rename_axis(["unique_id", "ds"]).reset_index(), later.rename_axis(["unique_id", "ds"]).reset_index()
    )
    found = model.predict(X=later)
    for shop in "ab":
        np.testing.assert_allclose(found.loc[shop]["y"], answers[answers["unique_id"] == shop]["scanl"].iloc[[0, 2]])
    with pytest.raises(ConfigError, match="frames: X is none, expected a frame with X price at the 3 steps ahead"):
        model.predict()


def test_an_absolute_horizon_reaches_from_the_first_end():
    months = pd.period_range("2023-05", periods=2, freq="M")  # the first and the second after b, the next ones after a
    found = SktimeForecaster(options=SMALL).fit(panel()[["y"]], fh=months).predict()
    assert found.index.tolist() == [(shop, month) for shop in "ba" for month in months]


def test_the_model_in_the_package_is_its_frame():
    """Without a horizon in `fit`; of any horizon; and after an update, where a row replaces an earlier one."""
    table = panel()
    model = PretrainedSktimeForecaster(season=6).fit(table[["y"]])
    expected = Frames.pretrained(5, season=6).fit(table.rename_axis(["unique_id", "ds"]).reset_index())
    answers = expected.predict(levels=[80]).groupby("unique_id", sort=False)
    assert model.predict(fh=[1, 3])["y"].tolist() == answers.nth([0, 2])["scanl"].tolist()
    quantiles = model.predict_quantiles(fh=[5], alpha=[0.9, 0.1])
    np.testing.assert_allclose(quantiles, answers.nth([4])[["scanl-hi-80", "scanl-lo-80"]])
    newer = panel(42, start=39)
    model.update(newer[["y"]])
    more = pd.concat([table[~table.index.isin(newer.index)], newer]).rename_axis(["unique_id", "ds"]).reset_index()
    answers = Frames.pretrained(5, season=6).fit(more).predict().groupby("unique_id", sort=False)
    assert model.predict(fh=[1])["y"].tolist() == answers.nth([0])["scanl"].tolist()
