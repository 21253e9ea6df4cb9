"""Forecasts after a table: what `scanl forecast` writes, from a run whose model has not been trained."""

import re

import numpy as np
import pytest
import torch

from scanl.cli import main
from scanl.errors import DataError
from scanl.learning import RunFolder, forecast
from scanl.learning.forecasting.forecasts import Forecasts
from scanl.learning.run.config import TrainConfig, seeded_model
from scanl.models import SeriesColumns

COVERS = ["data/series/outlook", "learning/forecasting/picture"]

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

LENGTH, HORIZON = 24, 4


def made(path, data, **options):
    """A run folder on a table of days, and its model."""
    roles = {"target": "y", "time": "ds", "question": "forecast", "horizon": HORIZON, "sequence_length": LENGTH}
    small = {"layer": "lru", "dim": 8, "depth": 1, "accelerator": "cpu", "lags": 2}
    config = TrainConfig.of(**{**small, **roles, "out": str(path), "data": [str(data)], **options})
    folder, model = RunFolder.fresh(config), seeded_model(config, config.open_source().question)
    folder.create(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder.save_model(model, "0")
    return folder.path, model.eval()


def days(rows=60, names=("a", "b"), start="2024-01-01"):
    draw, frames = np.random.default_rng(3), []
    for i, name in enumerate(names):
        dates = pd.date_range(start, periods=rows + 10 * i, freq="D")
        numbers = {column: draw.normal(size=len(dates)).round(3) for column in ("y", "z", "p", "f")}
        frames.append(pd.DataFrame({"id": name, "ds": dates, **numbers, "size": float(i)}))
    return pd.concat(frames, ignore_index=True)


ROLES = {"target": "y,z", "series": "id", "past": ["p"], "future": ["f"], "static": ["size"]}


@pytest.fixture
def run(tmp_path):
    """A run on two series with every kind of covariate, its model, its table, and the covariates ahead."""
    frame = days()
    frame.to_csv(tmp_path / "t.csv", index=False)
    path, model = made(tmp_path / "run", tmp_path / "t.csv", **ROLES)
    ahead = days(80)[["id", "ds", "f"]].iloc[::-1]  # the past and more than is needed, in another order
    return path, model, frame, ahead


def by_hand(model, frame, ahead, name, levels):
    """Quantiles (H, 2, Q) after a series, whose covariates of the calendar are made here: a week, from Monday."""
    rows = frame[frame.id == name]
    dates = pd.date_range(rows.ds.iloc[0], periods=len(rows) + HORIZON, freq="D")
    later = ahead[ahead.id == name].set_index("ds").f.reindex(dates[len(rows) :])
    turn = 2 * np.pi * (dates - pd.Timestamp("1970-01-01")).total_seconds().to_numpy() / (7 * 86400)
    future = np.stack([np.concatenate([rows.f, later]), np.sin(turn), np.cos(turn)], 1)
    tensor = lambda values: torch.tensor(np.asarray(values, np.float64))[None]  # noqa: E731
    columns = SeriesColumns(
        tensor(rows[["y", "z"]][-LENGTH:]),
        tensor(rows[["p"]][-LENGTH:]),
        tensor(rows["size"].iloc[:1]),
        tensor(future[-LENGTH - HORIZON :]),
    )
    made, _ = model.predict(columns, levels=levels)
    return made.quantiles[0].numpy()


def test_a_forecast_is_the_model_s_after_the_last_rows(run):
    path, model, frame, ahead = run
    result = forecast(path, future=ahead, levels=[80, 99])
    assert list(result.columns) == [
        "id", "ds", *(f"{y}{bound}" for y in "yz" for bound in ("", "-lo-80", "-hi-80", "-lo-99", "-hi-99")),
    ]  # fmt: skip
    for name in "ab":
        one, last = result[result.id == name], frame[frame.id == name].ds.iloc[-1]
        assert one.ds.tolist() == [last + pd.Timedelta(days=k) for k in range(1, HORIZON + 1)]
        quantiles = by_hand(model, frame, ahead, name, [0.5, 0.1, 0.9, 0.005, 0.995])
        np.testing.assert_allclose(one.iloc[:, 2:].to_numpy().reshape(HORIZON, 2, 5), quantiles, rtol=1e-5, atol=1e-5)
    short = forecast(path, future=ahead, levels=[80, 99], horizon=2)
    pd.testing.assert_frame_equal(short, result.groupby("id").head(2).reset_index(drop=True))


def test_newer_rows_follow_the_table(run, tmp_path):
    """Rows of a day, a week, or the table once more with some behind it: the forecast is that of all rows at once."""
    path, model, frame, ahead = run
    longer = days(67).assign(f=1.0)
    longer.loc[longer.ds.isin(frame[frame.id == "a"].ds) & (longer.id == "a"), "f"] = frame[
        frame.id == "a"
    ].f.to_numpy()
    newer = longer[longer.id == "a"].tail(7)
    longer = pd.concat([frame[frame.id == "a"], newer], ignore_index=True)
    expected = by_hand(model, longer, ahead, "a", [0.5])[..., 0]
    newer.to_csv(tmp_path / "newer.csv", index=False)
    for data in (newer, tmp_path / "newer.csv", longer):
        result = forecast(path, data, ahead)
        assert set(result.id) == {"a"}
        assert result.ds.iloc[0] == newer.ds.iloc[-1] + pd.Timedelta(days=1)
        np.testing.assert_allclose(result[["y", "z"]], expected, rtol=1e-5, atol=1e-5)
    gap = forecast(path, newer.iloc[3:], ahead)  # three days are absent
    holes = longer.assign(**{c: longer[c].where(~longer.ds.isin(newer.ds[:3])) for c in ("y", "z", "p", "f")})
    np.testing.assert_allclose(gap[["y", "z"]], by_hand(model, holes, ahead, "a", [0.5])[..., 0], rtol=1e-5, atol=1e-5)
    late = newer.assign(ds=newer.ds + pd.Timedelta(days=400))  # nothing before it counts
    known = ahead.assign(ds=ahead.ds + pd.Timedelta(days=400))
    np.testing.assert_allclose(
        forecast(path, late, known)[["y", "z"]],
        by_hand(model, late, known, "a", [0.5])[..., 0],
        rtol=1e-5,
        atol=1e-5,
    )


def test_names_of_series_in_several_columns(tmp_path, monkeypatch, capfd):
    """The forecasts are those of the same series by one name: of the table, of newer rows and of a stream."""
    frame = days(names=("A, B/c", "A/B, c")).drop(columns=["z", "p", "f", "size"])
    parts = frame.id.str.split("/", expand=True)
    several = frame.assign(state=parts[0], region=parts[1]).drop(columns="id")
    for name, table in (("one", frame), ("two", several)):
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        path, _ = made(tmp_path / name, tmp_path / f"{name}.csv", series="id" if name == "one" else "state, region")
    one = tmp_path / "one"
    (path / "model.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    answers = forecast(path)
    assert list(answers.columns[:3]) == ["state", "region", "ds"]
    pd.testing.assert_frame_equal(answers.iloc[:, 2:], forecast(one).iloc[:, 1:])
    newer = several.groupby("region", sort=False).head(3).assign(ds=several.ds + pd.Timedelta(days=75))
    newer.to_csv(tmp_path / "newer.csv", index=False)
    assert (
        main(["forecast", str(path), "--data", str(tmp_path / "newer.csv"), "--picture", str(tmp_path / "p.png")]) == 0
    )
    (tmp_path / "f.csv").write_text(capfd.readouterr().out)
    of_newer = pd.read_csv(tmp_path / "f.csv", parse_dates=["ds"])
    assert of_newer.groupby(["state", "region"], sort=False).ngroups == 2
    with (tmp_path / "newer.csv").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["forecast", str(path), "--follow"]) == 0
    (tmp_path / "f.csv").write_text(capfd.readouterr().out)
    followed = pd.read_csv(tmp_path / "f.csv", parse_dates=["ds"]).drop(columns="cutoff")
    last = followed.groupby(["state", "region"], sort=False).tail(HORIZON).reset_index(drop=True)
    pd.testing.assert_frame_equal(last, of_newer, rtol=1e-4)


def test_a_dead_series_is_left_out_and_named(tmp_path, capfd):
    """In training and in forecasts, until newer rows of it come."""
    frame = days(names=("a", "b", "still", "old")).drop(columns=["z", "p", "f", "size"])
    frame = frame[frame.ds < np.where(frame.id == "old", "2024-01-20", "2024-03-01").astype("M8[us]")]
    frame.loc[frame.id == "still", "y"] = 0.0
    frame.to_csv(tmp_path / "t.csv", index=False)
    words = (
        f"train --data {tmp_path}/t.csv --question forecast --target y --time ds --series id --horizon 4 --layer lru "
    )
    words += f"--dim 8 --depth 1 --steps 1 --accelerator cpu --out {tmp_path}/run --season 7"
    note = "scanl: table: series are left out: 'still' is always 0, 'old' ended 2024-01-19"
    assert main(words.split()) == 0
    assert capfd.readouterr().err.splitlines().count(note) == 1
    assert main(["forecast", f"{tmp_path}/run", "--out", f"{tmp_path}/f.csv"]) == 0
    assert capfd.readouterr().err.splitlines() == [note]
    assert pd.read_csv(tmp_path / "f.csv").id.unique().tolist() == ["a", "b"]
    newer = frame[frame.id.isin(["a", "still"])].groupby("id").tail(2).assign(ds=["2024-03-11", "2024-03-12"] * 2)
    assert forecast(tmp_path / "run", newer).id.unique().tolist() == ["a", "still"]


def test_a_table_without_times(tmp_path):
    """Newer rows are those after the table."""
    frame = days(names="a").drop(columns=["ds", "id"])
    frame[:50].to_csv(tmp_path / "t.csv", index=False)
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", time=None, future=["f"])
    whole, _ = made(tmp_path / "whole", tmp_path / "t.csv", time=None, future=["f"])
    ahead = frame[["f"]].tail(HORIZON)
    result = forecast(path, frame[50:], ahead)
    assert result.columns[0] == "step"
    assert result.step.tolist() == [1, 2, 3, 4]
    (tmp_path / "run" / "model.safetensors").rename(whole / "model.safetensors")
    frame.to_csv(tmp_path / "t.csv", index=False)
    pd.testing.assert_frame_equal(forecast(whole, future=ahead), result)


def test_the_command_writes_tables_and_a_picture(run, tmp_path, capfd):
    path, _, _, ahead = run
    ahead.to_csv(tmp_path / "ahead.csv", index=False)
    expected = forecast(path, future=tmp_path / "ahead.csv", levels=[50])
    argv = ["forecast", str(path), "--future-data", str(tmp_path / "ahead.csv"), "--levels", "50"]
    assert main(argv) == 0
    (tmp_path / "out.csv").write_text(capfd.readouterr().out)
    picture = tmp_path / "p.png"
    assert main([*argv, "--out", str(tmp_path / "f.parquet"), "--picture", str(picture)]) == 0
    out, err = capfd.readouterr()
    assert (out.strip(), err.strip()) == (str(tmp_path / "f.parquet"), str(picture))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out.csv", parse_dates=["ds"]), expected, check_dtype=False)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "f.parquet"), expected)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_panel_for_each_series_and_says_which(run, tmp_path, monkeypatch):
    from scanl.learning.forecasting import picture as forecast_picture

    path, _, frame, ahead = run
    figures = []
    monkeypatch.setattr(forecast_picture, "save_figure", lambda figure, path: figures.append(figure))
    table = RunFolder.open(path).source
    forecast_picture.save_forecasts(tmp_path / "p.png", frame, forecast(path, future=ahead), table)
    (figure,) = figures
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["a, y", "a, z", "b, y", "b, z"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "the table", "80 % interval", "95 % interval", "median",
    ]  # fmt: skip
    past, median = shown[0].get_lines()
    assert past.get_xdata()[-1] == median.get_xdata()[0] == frame[frame.id == "a"].ds.iloc[-1]
    many = pd.concat([frame.assign(id=f"s{i}") for i in range(7)])
    other = pd.concat([forecast(path, future=ahead).head(4).assign(id=f"s{i}") for i in range(7)])
    forecast_picture.save_forecasts(tmp_path / "p.png", many, other, table)
    assert figures[1].get_suptitle() == "the first 12 of 14 forecasts"


def test_the_picture_of_the_exam_has_dates_names_and_the_same_intervals(run, tmp_path, monkeypatch):
    from scanl.learning.run import picture as exam_picture

    path, model, frame, _ = run
    figures = []
    monkeypatch.setattr(exam_picture, "save_figure", lambda figure, path: figures.append(figure))
    exam_picture.save_forecast(tmp_path / "p.png", RunFolder.open(path).source, model)
    first, last, *_ = figures[0].axes
    assert [axes.get_title() for axes in (first, last)] == [
        "a: first forecast of the test part", "b: last forecast of the test part",
    ]  # fmt: skip
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == ["the table", "80 % interval", "95 % interval", "median", "what came"]
    read, _, came = last.get_lines()
    rows = frame[frame.id == "b"].iloc[-HORIZON:]
    assert list(came.get_xdata()) == list(rows.ds.astype("datetime64[s]").to_numpy())
    assert list(came.get_ydata()) == pytest.approx(list(rows.y))
    assert read.get_xdata()[-1] < came.get_xdata()[0]


@pytest.mark.parametrize("irregular", [False, True])
def test_a_stream_is_forecast_after_each_row_as_the_table_up_to_it(tmp_path, irregular):
    """Two series in turn, of which a day is absent; in batches of any size, of which the last breaks off in a row."""
    frame = days().drop(columns=["f", "size"]).sort_values(["ds", "id"])
    frame = frame[~((frame.id == "a") & (frame.ds == "2024-02-20"))]
    if irregular:
        frame = frame[np.random.default_rng(0).uniform(size=len(frame)) < 0.7]
    first, newer = frame[frame.ds < "2024-02-10"], frame[frame.ds >= "2024-02-10"].head(30)
    first.to_csv(tmp_path / "t.csv", index=False)
    options = {"series": "id", "past": ["p"], "freq": "D" if irregular else None}
    path, model = made(tmp_path / "run", tmp_path / "t.csv", **options, gaps="durations" if irregular else None)
    assert bool(model.timed) == irregular
    lines = newer.to_csv(index=False).splitlines()
    frames = list(Forecasts.open(path).follow([lines[:1], lines[1:3], lines[3:]], levels=[80]))
    stream = pd.concat(frames, ignore_index=True)
    assert len(stream) == HORIZON * len(newer)
    for row in (1, 2, 9, len(newer)):
        expected = forecast(path, newer[:row], levels=[80])
        last = newer.iloc[row - 1]
        one = stream.iloc[HORIZON * (row - 1) : HORIZON * row].reset_index(drop=True)
        assert set(one.cutoff) == {last.ds}
        pd.testing.assert_frame_equal(
            one.drop(columns="cutoff"),
            expected[expected.id == last.id].reset_index(drop=True),
            check_dtype=False,
            rtol=1e-4,
            atol=1e-5,
        )


def test_a_stream_corrects_rows_of_the_table(tmp_path):
    """In one batch, or row by row, the forecast begins after the last row of the series. A stream does not go back."""
    frame = days(names="a").drop(columns=["f", "size"])
    frame[:50].to_csv(tmp_path / "t.csv", index=False)
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", past=["p"])
    whole = frame[:52].assign(y=frame.y.where(~frame.index.isin([46, 49]), 9.0))
    newer = whole.iloc[[46, 48, 49, 50, 51]]
    lines = newer.to_csv(index=False).splitlines()
    for batches in ([lines], [[line] for line in lines]):
        stream = pd.concat(Forecasts.open(path).follow(batches, levels=[80]), ignore_index=True)
        ends = frame.ds.iloc[[49, 49, 49, 50, 51]].repeat(HORIZON)
        assert pd.to_datetime(stream.cutoff).tolist() == pd.to_datetime(ends).tolist()
        for row in range(1, 6):
            expected = forecast(path, newer[:row], levels=[80])
            one = stream[HORIZON * (row - 1) : HORIZON * row].drop(columns="cutoff").reset_index(drop=True)
            pd.testing.assert_frame_equal(one, expected, check_dtype=False, rtol=1e-4, atol=1e-5)
    by_hand = forecast(path, whole, levels=[80])
    pd.testing.assert_frame_equal(one, by_hand, check_dtype=False, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="table: stream: the times 'ds' go back to 2024-"):
        list(Forecasts.open(path).follow([lines, lines[2:3]]))


def test_the_command_follows_the_standard_input_and_a_growing_file(tmp_path, monkeypatch, capfd):
    from scanl.cli.forecast import lines_of

    frame = days(names="a").drop(columns=["ds", "id", "p", "f", "size"])
    frame[:50].to_csv(tmp_path / "t.csv", index=False)
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", time=None)
    (tmp_path / "stream.csv").write_text(frame[50:53].to_csv(index=False).strip())
    with (tmp_path / "stream.csv").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["forecast", str(path), "--follow", "--levels", "80", "--horizon", "2"]) == 0
    (tmp_path / "out.csv").write_text(capfd.readouterr().out)
    result = pd.read_csv(tmp_path / "out.csv")
    assert list(result.columns) == ["cutoff", "step", "y", "y-lo-80", "y-hi-80"]
    assert result[["cutoff", "step"]].to_numpy().tolist() == [[c, s] for c in (1, 2, 3) for s in (1, 2)]
    np.testing.assert_allclose(result.y[4:], forecast(path, frame[50:53], horizon=2).y, rtol=1e-4)
    growing = tmp_path / "growing.csv"
    growing.write_text("y,z\n1,2\n3,")
    lines = lines_of(str(growing))
    assert next(lines) == ["y,z", "1,2"]
    with growing.open("a") as file:
        file.write("4\n")
    assert next(lines) == ["3,4"]
    for argv, message in (
        (
            ["--follow", "--out", "a.csv"],
            "out is a.csv, expected none because --follow writes rows to the st",
        ),
        (["--follow", "--data", str(tmp_path / "none")], "none, which does not exist"),
    ):
        assert main(["forecast", str(path), *argv]) == 2
        assert message in capfd.readouterr().err


def test_intervals_of_quantiles_may_be_wider_than_the_outermost_ones(tmp_path):
    days(names="a").to_csv(tmp_path / "t.csv", index=False)
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", distribution="quantiles")
    assert list(forecast(path).columns) == ["ds", "y", "y-lo-80", "y-hi-80", "y-lo-95", "y-hi-95"]


WRONG = {
    "no covariates ahead": (
        [],
        "future_data is none, expected a table with f at the 4 steps after the end because the",
    ),
    "horizon": (["--horizon", "5"], "horizon is 5, expected 1 to 4 because of the run's --horizon 4"),
    "no steps": (["--horizon", "0"], "horizon is 0, expected at least 1"),
    "levels": (["--levels", "80", "100"], r"levels is \[80.0, 100.0\], expected per cents above 0 and below 100"),
    "out": (["--out", "f.xls"], "out is f.xls, expected a file of .csv or .parquet"),
    "picture": (["--picture", "p.jpg"], "picture is p.jpg, expected a file of .png"),
    "few covariates": (
        ["--future-data", "few.csv"],
        "few.csv has no row at 2024-03-01 00:00:00 of series 'a', expected",
    ),
    "other names": (["--future-data", "other.csv"], "unknown column for a future covariate 'f'"),
    "no file": (["--future-data", "none.csv"], "future_data is none.csv, which does not exist"),
    "no newer file": (["--data", "none.csv"], "data is none.csv, which does not exist"),
    "no covariates": ([], "future_data is none"),
    "numbers for dates": (
        ["--data", "numbers.csv", "--future-data", "all.csv"],
        "the times 'ds' are numbers, expected dates without a time zone because of .*t.csv",
    ),
    "a lacking column": (
        ["--data", "all.csv", "--future-data", "all.csv"],
        "all.csv: unknown column for the target 'y'",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(run, kind, tmp_path, monkeypatch, capfd):
    path, _, frame, ahead = run
    ahead.to_csv(tmp_path / "all.csv", index=False)
    ahead[ahead.ds != pd.Timestamp("2024-03-01")].to_csv(tmp_path / "few.csv", index=False)
    ahead.rename(columns={"f": "g"}).to_csv(tmp_path / "other.csv", index=False)
    frame.assign(ds=np.arange(len(frame))).to_csv(tmp_path / "numbers.csv", index=False)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    options, message = WRONG[kind]
    assert main(["forecast", str(path), *options]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert re.search(message, err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_has_no_forecast_is_refused(tmp_path, capfd):
    days(names="a").to_csv(tmp_path / "t.csv", index=False)
    points, _ = made(tmp_path / "run", tmp_path / "t.csv", distribution="points")
    more, _ = made(tmp_path / "more", tmp_path / "t.csv")
    task = tmp_path / "task"
    folder = RunFolder.fresh(TrainConfig.of(data=["adding"], out=str(task), layer="lru", dim=4, depth=1))
    folder.create(TrainConfig.of(data=["adding"], out=str(task), layer="lru", dim=4, depth=1))
    weeks = days(names="a").assign(ds=pd.date_range("2026-01-01", periods=60, freq="7D"))
    weeks.to_csv(tmp_path / "weeks.csv", index=False)
    for argv, message in (
        ([more, "--data", tmp_path / "weeks.csv"], "a step of the times 'ds' lasts 7 times as long as in the table of"),
        ([points, "--levels", "95"], "levels is [95.0], expected none because the distribution is points"),
        ([more, "--future-data", tmp_path / "t.csv"], "future_data is given, but the run reads no covariates ahead"),
        ([task], "was trained on adding, expected a run with --question forecast"),
    ):
        assert main(["forecast", *map(str, argv)]) == 2
        assert message in capfd.readouterr().err


def table(times, head="ds,y", row="{},{}"):
    return "\n".join([head, *(row.format(time, step % 7) for step, time in enumerate(times))]) + "\n"


def texts(form, freq, start="2015-01-05", rows=40):
    return [f"{time:{form}}" for time in pd.date_range(start, periods=rows, freq=freq)]


def quarters(first, count):
    return [f"{1970 + k // 4} Q{k % 4 + 1}" for k in range(first, first + count)]


MONTHS = texts("%B %Y", "MS", rows=44)
SPRING = [str(time) for time in pd.date_range("2024-03-01", periods=44, tz="Europe/Berlin")]
ODD = {  # times of a table, and of its forecast
    "months by name": (MONTHS[:40], MONTHS[40:]),
    "days with names of months": (texts("%d %b %Y", "D"), texts("%d %b %Y", "D", "2015-02-14", 4)),
    "quarters": (quarters(0, 40), quarters(40, 4)),
    "weeks": (texts("%G-W%V", "W-MON"), texts("%G-W%V", "W-MON", "2015-10-12", 4)),
    "offsets that change": (SPRING[:40], SPRING[40:]),
    "two readings after the end": (texts("%m/%d/%Y", "D"), texts("%m/%d/%Y", "D", "2015-02-14", 4)),
    "minutes": (texts("%Y-%m-%d %H:%M", "h"), texts("%Y-%m-%d %H:%M", "h", "2015-01-06 16:00", 4)),
    "numbers below 0": (range(-40, 0), [0, 1, 2, 3]),
    "numbers of 64 bits": (range(2**62, 2**62 + 40), range(2**62 + 40, 2**62 + 44)),
    "the end of 64 bits": (
        range(2**63 - 40, 2**63),
        "the 4 steps after 9223372036854775807 are beyond the times of 64",
    ),
    "the end of floating-point numbers": ([k * 4e306 for k in range(5, 45)], "are beyond the times of 64 bits"),
    "no frequency": (
        texts("%Y-%m-%d %H", "h", rows=36) + texts("%Y-%m-%d %H", "7h", "2016-01-05", 4),
        "have no frequency that can be inferred, expected one because rows follow; say it as pandas does: --freq D",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_times_of_a_forecast_are_as_the_table_writes_them(kind, tmp_path, capfd):
    times, expected = ODD[kind]
    (tmp_path / "t.csv").write_text(table(times))
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", gaps="durations" if kind == "no frequency" else None)
    code = main(["forecast", str(path), "--out", str(tmp_path / "f.csv")])
    err = capfd.readouterr().err
    if isinstance(expected, str):
        assert (code, len(err.splitlines())) == (2, 1)
        assert expected in err
    else:
        assert (code, err) == (0, "")
        assert pd.read_csv(tmp_path / "f.csv", dtype=str).ds.tolist() == [str(time) for time in expected]


def test_newer_rows_are_read_in_the_form_of_the_table(tmp_path, monkeypatch, capfd):
    """A day after the table that alone might be another month's: as a file with a picture, and as a stream."""
    (tmp_path / "t.csv").write_text(table(texts("%d/%m/%Y", "D", "2015-01-20", 42)))
    path, _ = made(tmp_path / "run", tmp_path / "t.csv")
    (tmp_path / "n.csv").write_text("ds,y\n03/03/2015,5\n04/03/2015,6\n")
    words = ["forecast", str(path), "--data", str(tmp_path / "n.csv")]
    assert main([*words, "--picture", str(tmp_path / "p.png")]) == 0
    assert [line[:10] for line in capfd.readouterr().out.splitlines()[1:]] == texts("%d/%m/%Y", "D", "2015-03-05", 4)
    with (tmp_path / "n.csv").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["forecast", str(path), "--follow", "--horizon", "1"]) == 0
    assert [line[:21] for line in capfd.readouterr().out.splitlines()[1:]] == [
        "04/03/2015,03/03/2015", "05/03/2015,04/03/2015",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("y-lo-80,y", {"series": "y-lo-80", "time": None}, "two columns called 'y-lo-80'; rename one in the table"),
        ("step,y", {"series": "step", "time": None}, "two columns called 'step'"),
        ("y,y-hi-95", {"target": "y,y-hi-95", "time": None}, "two columns called 'y-hi-95'"),
        ("cutoff,y", {"series": "cutoff", "time": None}, "two columns called 'cutoff'"),
    ],
)
def test_no_column_hides_another(names, options, message, tmp_path, monkeypatch, capfd):
    (tmp_path / "t.csv").write_text(table([1] * 40, names))
    path, _ = made(tmp_path / "run", tmp_path / "t.csv", **options)
    with (tmp_path / "t.csv").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main(["forecast", str(path), *(["--follow"] if "cutoff" in names else [])]) == 2
    assert message in capfd.readouterr().err


def test_a_table_at_another_path(tmp_path, capfd):
    days(names="a").to_csv(tmp_path / "t.csv", index=False)
    path, model = made(tmp_path / "run", tmp_path / "t.csv")
    folder = RunFolder.open(path)
    folder.save_model(model, folder.source.digest())
    expected = forecast(path)
    moved = (tmp_path / "t.csv").rename(tmp_path / "moved.csv")
    pd.testing.assert_frame_equal(forecast(path, moved), expected)
    days(names="a")[:50].to_csv(tmp_path / "other.csv", index=False)
    for data, message in (
        ([], "t.csv, does not exist; put it back, or name it at its new path: --data PATH"),
        (["--data", str(tmp_path / "other.csv")], "other.csv is another table; put it back, because newer rows follow"),
        (["--follow", "--data", str(moved)], "t.csv, does not exist; put it back, or name"),
    ):
        assert main(["forecast", str(path), *data]) == 2
        out, err = capfd.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert message in err


def test_a_picture_has_no_dates_beyond_those_of_matplotlib(tmp_path, capfd):
    (tmp_path / "t.csv").write_text(table(f"{year}-01-01" for year in range(9955, 9995)))
    path, _ = made(tmp_path / "run", tmp_path / "t.csv")
    assert main(["forecast", str(path), "--picture", str(tmp_path / "p.png")]) == 0
    with (tmp_path / "t.csv").open("a") as file:
        file.write("9995-01-01,1\n")
    capfd.readouterr()
    assert main(["forecast", str(path), "--picture", str(tmp_path / "q.png")]) == 2
    assert "has dates outside of the years 2 to 9998" in capfd.readouterr().err
    assert not (tmp_path / "q.png").exists()


ROW = "2024-02-10,1\n"
STREAMS = {  # what comes, and what is said; nothing where it is forecast
    "a mark of the order of bytes": (f"\ufeffds,y\n{ROW}", ""),
    "lines of Windows": (f"ds,y\r\n{ROW}".replace("\n", "\r\n"), ""),
    "other columns too": ('note,y,ds\n"a, b",1,2024-02-10\n', ""),
    "nothing": ("", ""),
    "names alone": ("ds,y\n", ""),
    "no target": (f"ds,z\n{ROW}", "stream: unknown column for the target 'y'"),
    "a short row": ("ds,y\n2024-02-10\n", "a row has 1 fields, expected 2 as in its line of names"),
    "a name twice": ("ds,y,y\n2024-02-10,1,1\n", "the line of names has two columns called 'y'"),
    "text": ("ds,y\n2024-02-10,many\n", "stream: column 'y' is 'many' in row 1, expected a number"),
    "infinite": ("ds,y\n2024-02-10,inf\n", "column 'y' is inf in row 1, expected a finite number"),
    "beyond float32": ("ds,y\n2024-02-10,1e300\n", "column 'y' is 1e+300 in row 1, expected a finite number"),
    "Latin-1": ("ds,y,n\n2024-02-10,1,\u00e4\n".encode("latin-1"), "data is not UTF-8: it has the invalid byte 0xe4"),
    "a long field": (f"ds,y\n2024-02-10,{'9' * 200_000}\n", "a row cannot be read: field larger than field limit"),
    "times that go back": (f"ds,y\n{ROW}2024-02-09,1\n", "the times 'ds' go back in its row"),
    "a time twice": (f"ds,y\n{ROW}{ROW}", "two rows have the same time 'ds'"),
    "numbers for dates": ("ds,y\n5,1\n", "the times 'ds' are numbers, expected dates without a time zone"),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_an_odd_stream_is_right_or_refused_in_one_line(kind, tmp_path, monkeypatch, capfd):
    text, message = STREAMS[kind]
    (tmp_path / "t.csv").write_text(table(texts("%Y-%m-%d", "D", "2024-01-01")))
    path, _ = made(tmp_path / "run", tmp_path / "t.csv")
    (tmp_path / "s.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with (tmp_path / "s.csv").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        code = main(["forecast", str(path), "--follow"])
    out, err = capfd.readouterr()
    if message:
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert message in err
    else:
        assert (code, err) == (0, "")
        assert len(out.splitlines()) == (1 + HORIZON if "2024" in text else 0)
