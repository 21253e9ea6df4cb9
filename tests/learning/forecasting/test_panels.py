"""Panels in partitions: a folder of Parquet files, and a frame of Dask."""

import json

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from scanl.cli import main
from scanl.errors import ConfigError
from scanl.learning.forecasting import panels
from scanl.learning.forecasting.frames import Frames
from scanl.learning.forecasting.panels import PanelFolder

SERIES = [f"s{number}" for number in range(5)]


def rows(names: list[str]) -> pd.DataFrame:
    """Return series of 40 days and more."""
    frames = []
    for name in names:
        count = 40 + int(name[1:])
        y = np.random.default_rng(count).normal(size=count).cumsum()
        ds = pd.date_range("2024-01-01", periods=count, freq="D")
        frames.append(pd.DataFrame({"unique_id": name, "ds": ds, "y": y}))
    return pd.concat(frames, ignore_index=True)


@pytest.fixture
def folder(tmp_path):
    for number, names in enumerate((SERIES[:2], SERIES[2:4], SERIES[4:])):
        file = tmp_path / "panel" / f"part={number}" / "rows.parquet"
        file.parent.mkdir(parents=True)
        rows(names).to_parquet(file, index=False)
    return tmp_path / "panel"


def whole() -> pd.DataFrame:
    return Frames.pretrained(3).fit(rows(SERIES)).predict(levels=(80,))


def test_partitions_have_the_forecasts_of_the_whole(folder, tmp_path, capfd):
    argv = ["forecast", str(folder), "--horizon", "3", "--levels", "80", "--series", "unique_id"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    written = [tmp_path / "out" / f"part={number}" / "rows.parquet" for number in range(3)]
    assert capfd.readouterr().out.split() == list(map(str, written))
    answers = pd.concat(map(pd.read_parquet, written), ignore_index=True)
    assert answers["unique_id"].tolist() == np.repeat(SERIES, 3).tolist()
    of_one = whole().rename(columns=lambda name: name.replace("scanl", "y"))
    assert_frame_equal(answers[of_one.columns], of_one, rtol=1e-9, check_dtype=False)


def test_an_interrupted_run_goes_on(folder, tmp_path, monkeypatch):
    given = {"target": None, "time": None, "series": "unique_id", "season": None, "freq": None}
    panel = PanelFolder(folder, tmp_path / "out", 3, **given)
    first = next(panel.run())
    before = first.stat().st_mtime_ns
    write = panels.write_table
    monkeypatch.setattr(panels, "write_table", lambda frame, file: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(panel.run())
    monkeypatch.setattr(panels, "write_table", write)
    assert len(list(PanelFolder(folder, tmp_path / "out", 3, **given).run())) == 2
    assert first.stat().st_mtime_ns == before
    assert json.loads((tmp_path / "out/forecast.json").read_text())["columns"]["target"] == "y"
    with pytest.raises(ConfigError, match="forecasts of another horizon; name another folder"):
        PanelFolder(folder, tmp_path / "out", 4, **given)
    for inside in (folder, folder / "out"):
        with pytest.raises(ConfigError, match="expected a folder outside of"):
            PanelFolder(folder, inside, 3, **given)
    with pytest.raises(ConfigError, match="has no run and no file of"):
        PanelFolder(tmp_path / "out/part=9", tmp_path / "other", 3, **given)


def test_a_frame_of_dask_has_the_forecasts_of_one_of_pandas():
    pytest.importorskip("fugue")
    pytest.importorskip("distributed")
    from dask import dataframe
    from dask.distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        panel = dataframe.from_pandas(rows(SERIES), npartitions=3)  # which cuts series
        answers = Frames.pretrained(3).predict_panel(panel, levels=(80,)).compute()
    answers = answers.sort_values(["unique_id", "ds"]).reset_index(drop=True)
    assert_frame_equal(answers, whole(), rtol=1e-9, check_dtype=False)
