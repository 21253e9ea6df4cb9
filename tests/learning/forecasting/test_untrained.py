import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from scanl.errors import DataError
from scanl.learning.forecasting.untrained import HistoryTable, UntrainedForecasts, guessed


def rows(count, start="2024-01-01", freq="D", seed=0):
    draw = np.random.default_rng(seed)
    when = pd.date_range(start, periods=count, freq=freq)
    y = 20 + draw.normal(size=count).cumsum() + 5 * np.sin(2 * np.pi * np.arange(count) / 7)
    return pd.DataFrame({"ds": when.strftime("%Y-%m-%d"), "y": y})


@pytest.fixture
def panel(tmp_path):
    both = [rows(60, seed=0).assign(shop="a"), rows(45, "2024-01-16", seed=1).assign(shop="b")]
    path = tmp_path / "panel.csv"
    pd.concat(both).to_csv(path, index=False)
    return path


def forecasts(path, horizon=3, **more):
    return UntrainedForecasts.of(
        HistoryTable([path], "forecast", "y", time="ds", horizon=horizon, distribution="quantiles", **more)
    )


def test_forecast_of_a_panel(panel):
    answers = forecasts(panel, series="shop").after([80])
    assert answers.columns.tolist() == ["shop", "ds", "y", "y-lo-80", "y-hi-80"]
    assert answers["ds"].dt.strftime("%Y-%m-%d").tolist() == ["2024-03-01", "2024-03-02", "2024-03-03"] * 2
    assert (answers["y-lo-80"] < answers["y"]).all()
    assert (answers["y"] < answers["y-hi-80"]).all()
    alone = panel.with_name("alone.csv")
    frame = pd.read_csv(panel)
    frame[frame["shop"] == "b"].to_csv(alone, index=False)
    other = forecasts(alone, series="shop").after([80])
    assert_frame_equal(other, answers[3:].reset_index(drop=True), rtol=1e-9)


def test_follow_is_whole(panel):
    """Rows one by one, several at once, and with steps that are absent, give the forecasts after all rows."""
    more = pd.concat([rows(72, seed=0)[60:].assign(shop="a"), rows(57, "2024-01-16", seed=1)[45:].assign(shop="b")])
    more = more.drop(index=[63, 47]).sort_values(["ds", "shop"], kind="stable")
    lines = [",".join(map(str, row)) for row in more[["shop", "ds", "y"]].itertuples(index=False)]
    stream = forecasts(panel, series="shop").follow([["shop,ds,y"], lines[:1], lines[1:9], lines[9:]], [80])
    followed = pd.concat(list(stream))
    assert len(followed) == 3 * len(lines)
    both = panel.with_name("both.csv")
    pd.concat([pd.read_csv(panel), more]).to_csv(both, index=False)
    whole = forecasts(both, series="shop").after([80])
    last = followed[followed["cutoff"] == pd.Timestamp("2024-03-12")].sort_values("shop", kind="stable")
    assert_frame_equal(last[whole.columns].reset_index(drop=True), whole, rtol=1e-9, check_dtype=False)


def test_follow_without_times(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text("y\n1\n2\n3\n4\n5\n")
    table = HistoryTable([path], "forecast", "y", horizon=2, distribution="quantiles")
    (frame,) = UntrainedForecasts.of(table).follow([["y", "6", "7"]], [80])
    assert frame["cutoff"].tolist() == [1, 1, 2, 2]
    assert frame["step"].tolist() == [1, 2, 1, 2]


def test_rows_of_a_stream_that_do_not_follow(panel):
    def read(*lines):
        list(forecasts(panel, series="shop").follow([["shop,ds,y", *lines]]))

    with pytest.raises(DataError, match=r"stream: two rows of series 'a' have the same time"):
        read("a,2024-02-29,1")
    with pytest.raises(DataError, match=r"go back"):
        read("a,2024-02-20,1")
    with pytest.raises(DataError, match=r"not on the steps"):
        read("a,2024-03-01 06:00,1")


def test_columns_are_guessed(panel, tmp_path):
    assert guessed(panel, None, None, None) == ("y", "ds", "shop")

    def columns(**values):
        path = tmp_path / "table.csv"
        pd.DataFrame(values).to_csv(path, index=False)
        return guessed(path, None, None, None)

    days = ["2024-01-01", "2024-01-02"]
    assert columns(when=days, level=[1.5, 2.5]) == ("level", "when", None)
    assert columns(year=[2001, 2002], level=[1.5, 2.5]) == ("level", "year", None)
    assert columns(level=[1.5, 2.5]) == ("level", None, None)
    with pytest.raises(DataError, match="target is none, expected one of high, low; give --target COLUMN"):
        columns(when=days, high=[1.5, 2.5], low=[0.5, 1.5])
    with pytest.raises(DataError, match="time is none, expected one of begin, end"):
        columns(begin=days, end=days, y=[1.5, 2.5])
    with pytest.raises(DataError, match="series is none, expected columns whose values name a series"):
        columns(when=[days[0]] * 2, y=[1.5, 2.5])
