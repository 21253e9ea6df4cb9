"""`scanl forecast TABLE`: a forecast without training. Forecasts of runs are in tests/learning/forecasting."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scanl.cli import forecast, main


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    """A table of days with one column of numbers, in the working directory."""
    monkeypatch.chdir(tmp_path)
    y = 50 + 8 * np.sin(2 * np.pi * np.arange(84) / 7) + 0.1 * np.random.default_rng(0).normal(size=84)
    frame = pd.DataFrame({"day": pd.date_range("2024-01-01", periods=84).strftime("%Y-%m-%d"), "sold": y})
    frame[:70].to_csv("sales.csv", index=False)
    return frame


def test_a_table_is_forecast_at_once(table, capfd):
    words = ["--horizon", "14", "--levels", "80", "--out", "next.csv", "--picture", "next.png"]
    assert main(["forecast", "sales.csv", *words]) == 0
    assert "guessed: target sold, time day" in capfd.readouterr().err
    answer = pd.read_csv("next.csv")
    assert answer.columns.tolist() == ["day", "sold", "sold-lo-80", "sold-hi-80"]
    assert answer["day"].tolist() == table["day"][70:].tolist()
    assert (answer["sold"] - table["sold"][70:].to_numpy()).abs().max() < 2
    assert Path("next.png").read_bytes()[:4] == b"\x89PNG"


def test_rows_are_followed(table, monkeypatch, capfd):
    """The forecast after the last row of a stream is that after all rows."""
    table[70:74].to_csv("more.csv", index=False)
    with Path("more.csv").open(encoding="utf-8") as stream:
        monkeypatch.setattr(forecast.sys, "stdin", stream)
        assert main(["forecast", "sales.csv", "--horizon", "2", "--follow"]) == 0
    followed = pd.read_csv(io.StringIO(capfd.readouterr().out))
    assert followed["cutoff"].tolist() == table["day"][70:74].repeat(2).tolist()
    table[:74].to_csv("whole.csv", index=False)
    assert main(["forecast", "whole.csv", "--horizon", "2"]) == 0
    whole = pd.read_csv(io.StringIO(capfd.readouterr().out))
    pd.testing.assert_frame_equal(followed[-2:][whole.columns].reset_index(drop=True), whole, rtol=1e-9)
