"""A user's own table: what is read and split, what is refused, and what a run leaves."""

import gzip
import math
import re
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scanl.cli import main
from scanl.data import IGNORED, Table
from scanl.data.base import LEVELS
from scanl.data.batch import Outcomes
from scanl.data.series.naive import naive, season_errors
from scanl.errors import ConfigError, DataError
from scanl.learning import RunFolder
from scanl.learning.questions import answerer
from scanl.models import Forecaster, SequenceClassifier, SequenceLabeler, SequenceRegressor

COVERS = [
    "data/series/columns",
    "data/series/rows",
    "data/series/series",
    "data/series/forecast",
    "data/series/label",
    "data/series/windows",
    "data/series/source",
    "data/series/whole",
]

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

TINY = "--accelerator cpu --layer lru --dim 8 --depth 1 --steps 3 --batch-size 4 --log-every 1".split()  # noqa: SIM905


def waves(rows=200, series=1, step="D", **more):
    """Daily waves of a week, each series at its own level."""
    time = np.arange(rows)
    frames = []
    for i in range(series):
        y = 10 * i + np.sin(2 * np.pi * time / 7) + 0.1 * np.random.default_rng(i).normal(size=rows)
        dates = pd.date_range("2024-01-01", periods=rows, freq=step)
        frames.append(pd.DataFrame({"id": f"s{i}", "ds": dates, "y": y, "u": np.cos(time), "size": i * 1.0, **more}))
    return pd.concat(frames, ignore_index=True)


def table(tmp_path, frame, name="table.csv", **options):
    path = tmp_path / name
    frame.to_parquet(path) if name.endswith("parquet") else frame.to_csv(path, index=False)
    given = {"ask": "forecast", "target": "y", "time": "ds", "horizon": 5, "sequence_length": 20, **options}
    return Table([path], **given)


def timed(source):
    """Whether the steps have durations."""
    return (source.batch(0, 1).inputs if source.asked.ahead else source.batch(0, 1)).timespans is not None


def test_windows_hold_what_the_table_has(tmp_path):
    """Channels in their order, targets the next steps, and nothing from behind the training part."""
    frame = waves(series=2)
    source = table(tmp_path, frame, series="id", past=["u"], static=["size"], future=["u"][:0])
    source.check()
    question = source.question
    assert (question.target, question.past, question.static) == (1, 1, 1)
    assert (question.horizon, question.season) == (5, 7)
    assert question.future == 2  # sine and cosine of the week; two years are not there
    columns, targets, mask, *_ = source.batch(3, 50)
    assert [part.shape for part in columns[:4]] == [(50, 20, 1), (50, 20, 1), (50, 1), (50, 25, 2)]
    assert (targets.shape, mask, columns.timespans) == ((50, 20, 5, 1), None, None)
    for target, past, static, future, wanted in zip(*columns[:4], targets, strict=True):
        one = frame[frame["size"] == static[0]].reset_index()
        (first,) = np.flatnonzero(one.y.to_numpy() == target[0, 0])
        np.testing.assert_allclose(np.hstack([target, past]), one[["y", "u"]].to_numpy()[first : first + 20])
        for step in range(20):
            for ahead in range(5):
                row = first + step + 1 + ahead
                expected = one.y[row] if row < 140 else math.nan  # 70 % of 200 are for training
                np.testing.assert_allclose(wanted[step, ahead, 0], expected, rtol=1e-6)
                turn = 2 * math.pi * (one.ds[row] - pd.Timestamp(0)).total_seconds() / (7 * 86400)
                np.testing.assert_allclose(future[step + 1 + ahead, 0], math.sin(turn), atol=1e-5)
    training = frame[frame.groupby("id").cumcount() < 140]
    expected = [(part.mean(), part.std(ddof=0)) for part in (training.y, training.u, training["size"])]
    np.testing.assert_allclose(question.scales[:3], expected)


def test_a_window_longer_than_its_series_keeps_what_is_constant(tmp_path):
    """Behind the end of a short series all is missing but the static covariates, which are of the series."""
    long, short = waves(), waves(rows=12).assign(id="short", size=7.0)
    source = table(tmp_path, pd.concat([long, short], ignore_index=True), series="id", static=["size"])
    static = [source.batch(step, 50).inputs.static for step in range(9)]
    assert set(np.concatenate(static).ravel().tolist()) == {0.0, 7.0}
    target = np.concatenate([source.batch(step, 50).inputs.target for step in range(9)])
    assert np.isnan(target[np.concatenate(static)[:, 0] == 7][:, 12:]).all()


def test_origins_are_the_last_steps_of_a_window(tmp_path):
    frame = waves()
    whole, few, more = (table(tmp_path, frame, origins=origins) for origins in (None, 3, 99))
    (columns, targets, *_), (same, asked, *_) = whole.batch(3, 4), few.batch(3, 4)
    for one, other in zip(columns, same, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(asked[:, -3:], targets[:, -3:])
    assert np.isnan(asked[:, :-3]).all()
    np.testing.assert_array_equal(more.batch(3, 4).targets, targets)
    assert whole.digest() == few.digest()  # the data are the same
    for options, expected in (({"origins": 0}, "at least 1"), ({"ask": "label", "origins": 2}, "none because")):
        with pytest.raises(ConfigError, match=f"origins is {options['origins']}, expected {expected}"):
            table(tmp_path, frame, **options)


def test_forecasts_of_the_parts_read_only_the_past(tmp_path):
    frame = waves()
    source = table(tmp_path, frame)
    y = frame.y.to_numpy()
    for part, (begin, end) in ((1, (140, 160)), (2, (160, 200))):
        seen = []
        for origins, batch in source.asking.forecasts(part):
            for (_, length, last), window, numbers, scale in zip(
                origins, batch.inputs.target, *batch.targets, strict=True
            ):
                seen.append(last)
                assert length == 20
                np.testing.assert_array_equal(window[:, 0], y[last - 19 : last + 1])
                np.testing.assert_array_equal(numbers[:, 0], y[last + 1 : last + 6])
                np.testing.assert_allclose(scale, np.abs(y[7:140] - y[:133]).mean(), rtol=1e-5)
        assert seen == list(range(begin - 1, end - 5))
    few = table(tmp_path, waves(rows=4000))
    assert 700 < sum(batch.size for _, batch in few.asking.forecasts(2)) <= 1024


def test_series_are_split_by_their_names(tmp_path):
    frame = waves(rows=30, series=10)
    source = table(tmp_path, frame, series="id", split="series", horizon=3)
    source.check()
    parts = [[i for i, *_ in part] for part in source.parts]
    assert sorted(i for part in parts for i in part) == list(range(10))
    assert [len(part) for part in parts] == [7, 1, 2]
    again = table(tmp_path, frame.sample(frac=1, random_state=0).sort_values("ds"), series="id", split="series")
    names = [{again.collection.series[i].name for i, *_ in part} for part in again.parts]
    assert names == [{source.collection.series[i].name for i in part} for part in parts]
    values = source.batch(0, 200).inputs.target[..., 0]
    of = set(np.round(np.nanmean(values, 1) / 10).astype(int).tolist())
    assert of == {int(source.collection.series[i].name[1:]) for i in parts[0]}


def test_missing_numbers_and_irregular_times(tmp_path):
    frame = waves(rows=300)
    frame.loc[::10, "y"] = math.nan
    frame = frame.drop(index=range(5, 300, 3)).reset_index(drop=True)
    source = table(tmp_path, frame, past=["u"])
    source.check()
    assert timed(source)
    said = str(source)
    assert "10.0% of the target is missing" in said
    assert "times are irregular: durations are an input" in said
    columns, targets, *_ = source.batch(0, 40)
    spans = columns.timespans
    assert 0.05 < np.isnan(columns.target).mean() < 0.15
    assert np.isnan(targets).any()
    assert spans.shape == (40, 25)
    assert set(np.unique(spans)) == {1.0, 2.0}
    days = (frame.ds.diff().dt.days).to_numpy()
    for target, own in zip(columns.target[..., 0], spans, strict=True):
        (first,) = [i for i in range(len(frame) - 25) if np.array_equal(frame.y[i : i + 20], target, equal_nan=True)]
        np.testing.assert_allclose(own[1:], days[first + 1 : first + 25])


@pytest.mark.parametrize(
    ("step", "season", "regular"),
    [("h", 24, True), ("D", 7, True), ("7D", 52, True), ("MS", 12, True), ("YS", 7, True), ("B", 5, True)],
)
def test_the_calendar_says_the_season(tmp_path, step, season, regular):
    """Or else the numbers do, as of years."""
    source = table(tmp_path, waves(rows=120, step=step))
    assert source.asking.season == season
    assert timed(source) == (not regular)
    assert table(tmp_path, waves(rows=120, step=step), season=3).question.season == 3


def test_the_numbers_before_the_test_part_say_the_season(tmp_path):
    """Of rows without times, in several series; what comes in the test part is not read."""
    frame = waves(rows=120, series=2).drop(columns="ds")
    assert table(tmp_path, frame, series="id", time=None).question.season == 7
    later = frame.groupby("id").cumcount() >= 96
    frame.loc[~later, "y"] = np.random.default_rng(0).normal(size=192)
    frame.loc[later, "y"] *= 1000
    assert table(tmp_path, frame, series="id", time=None).question.season == 1
    assert table(tmp_path, frame, series="id", time=None, test=0.01).question.season == 7


@pytest.mark.parametrize("kind", ["h", "MS", "numbers", "digits"])
def test_absent_steps_are_rows_of_missing_numbers(kind, tmp_path):
    """In the middle, at a border of the parts and two in a row, in one of two series. The seasons stay in step."""
    whole = waves(rows=120, series=2, step="D" if kind in ("numbers", "digits") else kind)
    whole["name"] = "north"
    if kind == "numbers":
        whole["ds"] = np.tile(np.arange(120) * 0.5, 2)
    elif kind == "digits":
        whole["ds"] = whole.ds.dt.strftime("%Y%m%d").astype(int)
    gone = [3, 40, 41, 84, 130]
    options = {"series": "id", "past": ["u"], "static": ["name", "size"]}
    holes = whole.copy()
    holes.loc[gone, ["y", "u"]] = math.nan
    expected = table(tmp_path, holes, "holes.csv", **options)
    source = table(tmp_path, whole.drop(index=gone), **options)
    source.check()
    assert not timed(source)
    assert "5 absent steps are missing numbers" in str(source)
    assert source.asking.season == expected.asking.season
    for one, other in zip(source.collection.series, expected.collection.series, strict=True):
        for name in ("target", "past", "static"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        # A month that is absent lies between its neighbours, up to a day beside its beginning.
        far = 86400 * 1.6 if kind == "MS" else 1e-6
        np.testing.assert_allclose(one.times, other.times, atol=far, rtol=0)
        if kind != "MS":
            np.testing.assert_allclose(one.future, other.future, atol=1e-9)
    both = {**options, "gaps": "durations"}
    assert timed(table(tmp_path, whole.drop(index=gone), **both))


def test_what_is_no_gap_of_regular_times_is_not_filled(tmp_path):
    many = waves(rows=90).drop(index=range(5, 89, 6)).reset_index(drop=True)  # a seventh is absent
    assert timed(table(tmp_path, many))
    filled = table(tmp_path, many, gaps="fill")
    assert not timed(filled)
    assert len(filled.collection.series[0]) == 90
    odd = waves(rows=90)
    odd.loc[50:, "ds"] += pd.Timedelta(hours=5)  # no multiple of a day
    assert timed(table(tmp_path, odd, gaps="fill"))
    labels = labelled(rows=40, series=6).drop(index=[5, 46])
    labels["ds"] = [*range(5), *range(6, 46), *range(47, 241)][: len(labels)]
    given = {"ask": "classify", "target": "kind", "series": "id", "past": ["u"], "gaps": "fill"}
    assert timed(table(tmp_path, labels, **given))
    up = table(tmp_path, labels, **{**given, "ask": "label", "target": "up"})
    assert not timed(up)
    assert (up.collection.series[0].target < 0).sum() == 1
    with pytest.raises(ConfigError, match="gaps is 'leave', expected 'fill' or 'durations'"):
        table(tmp_path, many, gaps="leave")


def test_dates_of_eight_digits(tmp_path):
    frame = waves()
    frame["ds"] = frame.ds.dt.strftime("%Y%m%d").astype(int)
    assert not timed(table(tmp_path, frame))
    assert table(tmp_path, frame).asking.season == 7


def test_every_format_gives_the_same(tmp_path):
    frame = waves(series=2).drop(columns="ds")
    expected = table(tmp_path, frame, time=None, series="id").batch(0, 8)
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'scanl[series]'")
    found = table(tmp_path, frame, "table.parquet", time=None, series="id").batch(0, 8)
    for part, other in zip(found.inputs[:4], expected.inputs[:4], strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-6)
    arrays = {name: frame[name].to_numpy().reshape(2, 200) for name in ("y", "u")}
    np.savez(tmp_path / "table.npz", **arrays, size=np.arange(2.0))
    whole = Table(
        [tmp_path / "table.npz"], "forecast", "y", series="series", time="step", horizon=5, sequence_length=20
    )
    for part, other in zip(whole.batch(0, 8).inputs[:4], expected.inputs[:4], strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-6)
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    frame.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    frame.to_csv(tmp_path / "t.TSV.GZ", index=False, sep="\t", compression="gzip")
    frame.set_index("id").to_feather(tmp_path / "t.feather")
    for name in ("s0", "s1"):
        frame[frame.id == name].drop(columns="id").to_csv(tmp_path / f"part-{name}.csv", index=False)
    parts = [tmp_path / "part-s0.csv", tmp_path / "part-s1.csv"]
    files = [[tmp_path / name] for name in ("t.csv.gz", "t.tsv", "t.TSV.GZ", "t.feather")]
    for data in (*files, parts, [tmp_path / "part-*.csv"]):
        name = "id" if data in files else "file"
        other = Table(data, "forecast", "y", series=name, horizon=5, sequence_length=20)
        assert [one.name for one in other.collection.series] == (
            ["s0", "s1"] if data in files else ["part-s0", "part-s1"]
        )
        for one, same in zip(other.batch(0, 8).inputs[:4], expected.inputs[:4], strict=True):
            np.testing.assert_allclose(one, same, rtol=1e-6)
    frame.drop(columns="u").to_csv(tmp_path / "part-s2.csv", index=False)
    with pytest.raises(DataError, match=r"part-s2.csv has the columns .*, expected the columns of .*0.csv; 'id' is"):
        _ = Table([tmp_path / "part-*.csv"], "forecast", "y").collection


def test_a_workbook_is_its_first_sheet(tmp_path):
    pytest.importorskip("openpyxl", reason="openpyxl is not installed: pip install 'scanl[excel]'")
    frame = waves(rows=60)
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    series = Table([tmp_path / "t.xlsx"], "forecast", "y", time="ds", series="id").collection.series[0]
    np.testing.assert_allclose(series.target[:, 0], frame.y)
    with zipfile.ZipFile(tmp_path / "t.xlsx", "w") as file:
        file.writestr("a", "no workbook")
    with pytest.raises(DataError, match=r"t\.xlsx cannot be read: "):
        _ = Table([tmp_path / "t.xlsx"], "forecast", "y").collection


def test_texts_are_columns_of_0_and_1(tmp_path):
    """Before the present and ahead; of training, and of another table, which has a text that training has not."""
    frame = waves(rows=60).assign(sky=(["sun", "rain", "NA", "sun"] * 15), note=[f"n{i}" for i in range(60)])
    source = table(tmp_path, frame.assign(next=frame.sky), past=["u", "sky"], future=["next"], static=["id"])
    series, sky = source.collection.series[0], frame.sky.to_numpy()
    nan = np.where(sky == "NA", np.nan, 1)
    by_hand = np.stack([(sky == "rain") * nan, (sky == "sun") * nan], 1)
    np.testing.assert_array_equal(series.past, np.column_stack([frame.u, by_hand]))
    np.testing.assert_array_equal(series.future[:, :2], by_hand)
    assert series.static.tolist() == [1.0]
    assert source.collection.categories == {"sky": ["rain", "sun"], "next": ["rain", "sun"], "id": ["s0"]}
    later = frame.assign(sky=["snow", "sun"] * 30, next="rain", id="s7")
    other = source.collect(later, tmp_path / "b.csv", source.collection)
    assert other.series[0].past[:2, 1:].tolist() == [[0.0, 0.0], [0.0, 1.0]]
    assert other.series[0].static.tolist() == [0.0]
    assert other.notes == [
        "table: column 'sky' has 'snow', which training does not have; read as none of its texts",
        "table: column 'id' has 's7', which training does not have; read as none of its texts",
    ]
    long = pd.concat(
        [frame.assign(note=[f"{i}-{k}" for k in range(60)], id=f"s{i}", kind="ab"[i % 2]) for i in range(18)]
    )
    classify = table(tmp_path, long, "c.csv", ask="classify", target="kind", series="id")
    assert (classify.covariates, classify.left_out) == (["y", "u", "size", "sky"], ["note"])
    with pytest.raises(DataError, match="column 'note' has 1,080 different texts, expected at most 1000 because it"):
        _ = table(tmp_path, long, "c.csv", past=["note"], series="id").collection


def test_holidays_are_known_ahead(tmp_path):
    pytest.importorskip("holidays", reason="holidays is not installed: pip install 'scanl[holidays]'")
    frame = waves(rows=60, step="12h")
    for country, days in (("US", ["2024-01-01", "2024-01-15"]), ("DE-BY", ["2024-01-01", "2024-01-06"])):
        future = table(tmp_path, frame, holidays=country).collection.series[0].future
        assert frame.ds[future[:, 0] == 1].dt.normalize().unique().astype(str).tolist() == days
    for options, message in (
        ({"holidays": "Atlantis"}, "holidays is 'Atlantis', expected a country of the package"),
        ({"holidays": "US", "time": "u"}, "holidays is 'US', expected none because a step is longer than a day"),
    ):
        with pytest.raises(ConfigError, match=message):
            _ = table(tmp_path, frame.assign(u=np.arange(60.0)), **options).collection


def test_the_seasonal_naive_by_hand():
    y = np.array([[1.0], [2.0], [3.0], [5.0], [math.nan], [8.0]])
    mean, root = season_errors(y, 3)
    assert (mean[0], root[0]) == ((4 + 5) / 2, math.sqrt((16 + 25) / 2))
    found = naive(y, 3, 5, np.array([2.0]), LEVELS)
    np.testing.assert_array_equal(found[:, 0, LEVELS.index(0.5)], [5.0, 2.0, 8.0, 5.0, 2.0])
    widths = found[:, 0, -1] - found[:, 0, LEVELS.index(0.5)]
    np.testing.assert_allclose(widths, 1.6448536 * 2 * np.sqrt([1, 1, 1, 2, 2]), rtol=1e-6)
    np.testing.assert_array_equal(naive(y[:2], 3, 2, np.array([0.0]), LEVELS)[:, 0, 0], [2.0, 2.0])
    assert np.isnan(season_errors(y[:1], 3)[0]).all()


def test_scores_of_forecasts_by_hand(tmp_path):
    source = table(tmp_path, waves())
    quantiles = torch.tensor(LEVELS)[None, None, None] * 10  # 0.5 to 9.5, median 5
    numbers = torch.tensor([[2.0], [9.8], [math.nan]])
    targets = Outcomes(numbers[None], torch.full((1, 1), 4.0))
    found = answerer(source.question).scores(quantiles.expand(1, 3, 1, 11), targets)
    crps = sum(2 * max(p * (y - 10 * p), (p - 1) * (y - 10 * p)) / 11 for y in (2.0, 9.8) for p in LEVELS) / 4
    assert found["CRPS"] == (pytest.approx(crps, rel=1e-6), 2)
    assert found["MASE"] == (pytest.approx((3 + 4.8) / 4, rel=1e-6), 2)
    assert found["coverage"] == (1.0, 2)


def labelled(rows=40, series=12):
    frame = waves(rows=rows, series=series)
    frame["kind"] = np.where(frame["size"] % 2 == 0, "even", "odd")
    frame["up"] = np.where(frame.u > 0, "yes", "no")
    return frame


def test_classes_are_shared_out_evenly(tmp_path):
    frame = labelled()
    frame = frame.drop(index=frame.index[(frame.id == "s3") & (frame.groupby("id").cumcount() >= 25)])
    source = table(tmp_path, frame, ask="classify", target="kind", series="id", past=["y", "u"])
    source.check()
    assert source.collection.classes == ["even", "odd"]
    for part in source.parts:
        kinds = [int(source.collection.series[i].target[0]) for i, *_ in part]
        assert abs(kinds.count(0) - kinds.count(1)) <= 1
    inputs, targets, *_ = source.batch(0, 60)
    assert inputs.shape == (60, 40, 2)
    assert set(targets.tolist()) == {0, 1}
    short, answers, *_ = source.asking.together([(3, 0, 25)])
    assert np.isnan(short[0, :15]).all()
    np.testing.assert_allclose(short[0, 15:], frame[frame.id == "s3"][["y", "u"]], rtol=1e-6)
    assert answers.tolist() == [1]


@pytest.mark.parametrize("series", [None, "id"])
def test_labels_are_asked_in_their_part_alone(tmp_path, series):
    frame = labelled(rows=200, series=1 if series is None else 5)
    frame.loc[3, "up"] = None
    source = table(tmp_path, frame, ask="label", target="up", series=series, past=["u"])
    source.check()
    inputs, targets, *_ = source.batch(0, 60)
    known = targets != IGNORED
    np.testing.assert_array_equal(targets[known], (inputs[..., 0] > 0)[known].astype(int))
    asked = sum(int((batch.targets != IGNORED).sum()) for batch in source.asking.examples(2))
    assert asked == (40 if series is None else 200)


RUNS = {
    "forecast": (["--target", "y", "--horizon", "4", "--series", "id", "--past", "u", "--static", "size"], Forecaster),
    "recursive": (["--target", "y,u", "--horizon", "3", "--recursive", "--distribution", "points"], Forecaster),
    "classify": (["--target", "kind", "--series", "id", "--past", "y", "u"], SequenceClassifier),
    "label": (["--target", "up", "--series", "id", "--past", "y", "u", "--split", "time"], SequenceLabeler),
    "regress": (["--target", "size", "--series", "id", "--past", "y"], SequenceRegressor),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_table(name, tmp_path, capfd):
    """Trained, measured, drawn, loaded by the model's own class, resumed and measured again."""
    own, cls = RUNS[name]
    frame = labelled()
    frame = frame[frame.id == "s1"] if name == "recursive" else frame
    frame.to_csv(tmp_path / "table.csv", index=False)
    folder = tmp_path / "run"
    question = "forecast" if name == "recursive" else name
    command = ["--data", str(tmp_path / "table.csv"), "--question", question, "--time", "ds", *own]
    assert main(["train", *TINY, *command, "--sequence-length", "15", "--out", str(folder)]) == 0
    out, err = capfd.readouterr()
    assert type(cls.load(folder)) is cls
    assert f"15 steps of table.csv: {len(frame) // 40} series of 40" in err or question in ("classify", "regress")
    names = {path.name for path in folder.iterdir()} - {"forecast.png", "classes.png"}
    assert names == {"config.yaml", "metrics.csv", "loss.png", "model.safetensors", "checkpoint.ckpt"}
    assert (folder / "forecast.png").exists() == (question == "forecast")
    assert (folder / "classes.png").exists() == (question == "classify")
    assert ("seasonal naive" in out) == (question == "forecast")
    assert main(["eval", str(folder)]) == 0
    assert capfd.readouterr().out == out
    before = load_file(folder / "model.safetensors")
    assert main(["train", "--resume", str(folder)]) == 0
    for key, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(value, before[key])
    assert RunFolder.open(folder).config().source.target == own[1]


# Twenty kinds and more of bad tables. Each writes a file and says the options beside the usual ones, and the message.


def csv(path, frame):
    frame.to_csv(path, index=False)


def write(frame=None, text=None, name="t.csv"):
    def make(folder):
        path = folder / name
        if frame is not None:
            csv(path, frame)
        elif text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def changed(**columns):
    return waves(rows=60).assign(**columns)


def at(row, column, value, **options):
    frame = waves(rows=60, **options)
    frame[column] = frame[column].astype(object)
    frame.loc[row, column] = value
    return frame


def truncated_parquet(folder):
    path = folder / "t.parquet"
    waves(rows=60).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def pickled(folder):
    np.savez(folder / "t.npz", y=np.array([{}, {}], dtype=object))
    return folder / "t.npz"


def unequal(folder):
    np.savez(folder / "t.npz", y=np.zeros(5), u=np.zeros(6))
    return folder / "t.npz"


def damaged(folder):
    np.savez(folder / "t.npz", y=np.zeros(500))
    with zipfile.ZipFile(folder / "t.npz") as file:
        offset = file.infolist()[0].header_offset + 60
    data = bytearray((folder / "t.npz").read_bytes())
    data[offset + 200] ^= 255
    (folder / "t.npz").write_bytes(bytes(data))
    return folder / "t.npz"


def own_folder(folder):
    (folder / "tables.csv").mkdir()
    return folder / "tables.csv"


def late_target(*borders):
    """A target that is known from each first row to each second one alone."""
    known = np.zeros(60, bool)
    for begin, end in zip(borders[::2], borders[1::2], strict=True):
        known[begin:end] = True
    return changed().assign(y=lambda f: f.y.where(known))


def parquet(**columns):
    def make(folder):
        changed(**columns).to_parquet(folder / "t.parquet")
        return folder / "t.parquet"

    return make


def arrays(**columns):
    def make(folder):
        np.savez(folder / "t.npz", **columns)
        return folder / "t.npz"

    return make


TWO = waves(rows=60, series=2)


def backwards(folder):
    """One of two series goes back in time."""
    csv(folder / "t.csv", pd.concat([TWO[:60], TWO[60:][::-1]]))
    return folder / "t.csv"


FORECAST = ["--question", "forecast", "--target", "y", "--time", "ds", "--horizon", "3"]
LABEL = ["--question", "label", "--target", "up", "--past", "u"]
KINDS = ["--question", "classify", "--series", "id", "--past", "u", "--target"]
LATE = labelled(rows=60, series=1).assign(up=["no", "yes"] * 29 + ["maybe"] * 2)
BAD = {
    "no file": (lambda folder: folder / "none.csv", [], "none.csv, which does not exist"),
    "a folder": (own_folder, [], "tables.csv is a folder, expected one file"),
    "another format": (write(text="a", name="t.xls"), [], "has the format '.xls', expected one of .csv, .tsv, "),
    "empty": (write(text=""), [], "t.csv is empty, expected a line of names"),
    "names alone": (write(text="ds,y\n"), [], "t.csv has 0 rows, expected at least 2"),
    "one row": (write(text="ds,y\n2024-01-01,1\n"), [], "t.csv has 1 row, expected at least 2"),
    "wrong encoding": (write(text="ds,y,näme\n".encode("latin-1")), [], "t.csv is not UTF-8: it has the invalid byte"),
    "ragged rows": (write(text="ds,y\n1,2\n1,2,3\n"), [], "cannot be read: Error tokenizing data"),
    "longer rows": (write(text="ds,y\n1,2,3\n1,2,3\n"), [], "cannot be read: Length of header"),
    "a name twice": (write(text="ds,y,y\n1,2,3\n2,3,4\n"), [], "has two columns called 'y'; rename one"),
    "truncated Parquet": (truncated_parquet, [], "t.parquet cannot be read: "),
    "pickled objects": (pickled, [], "t.npz cannot be read: Object arrays cannot be loaded when allow_pickle=False"),
    "unequal arrays": (unequal, [], r"arrays of different lengths: y \(5,\), u \(6,\)"),
    "damaged arrays": (damaged, [], "t.npz cannot be read: "),
    "no such column": (write(TWO), ["--target", "yy"], "unknown column for the target 'yy'; did you mean 'y'"),
    "no time column": (write(TWO), ["--time", "date"], "unknown column for the time 'date'"),
    "text as target": (write(at(4, "y", "many")), [], "column 'y' is 'many' in row 5, expected a number because it is"),
    "times as target": (write(at(4, "y", "many")), ["--target", "ds", "--time", "u"], "column 'ds' is '2024-01-01' in"),
    "text as covariate": (write(at(2, "u", "x")), ["--past", "u"], "column 'u' is 'x' in row 3, expected a number"),
    "infinite": (write(at(7, "y", math.inf)), [], "column 'y' is inf in row 8, expected a finite number"),
    "beyond float32": (write(at(7, "y", 1e300)), [], r"column 'y' is 1e\+300 in row 8, expected a finite number"),
    "unsorted": (write(waves(rows=60).iloc[::-1]), [], "the times 'ds' go back in its row 2; sort the table by time"),
    "the same time twice": (write(TWO.sort_values("ds")), [], "same time 'ds'; name the series: --series id;"),
    "two series": (write(TWO), [], "go back in its row .*; name the series: --series id$"),
    "series of two names": (
        write(pd.concat([TWO.assign(shop="a"), TWO.assign(shop="b")])), ["--series", "id"],
        "the times 'ds' of series 's0' go back in its row 61; name the series: --series id,shop$",
    ),
    "names in two columns": (
        write(pd.concat([TWO.assign(id="x", site=TWO.id), TWO.assign(id="y", site=TWO.id)])), [],
        "go back in its row .*; name the series: --series id,site$",
    ),
    "time zones": (
        write(at(9, "ds", "2024-01-10T00:00:00+02:00")), [],
        "column 'ds' has times of several time zones or formats; write all alike",
    ),
    "several offsets": (
        write(changed(ds=["2024-01-01T00:00:00+01:00"] * 30 + ["2024-02-01T00:00:00+02:00"] * 30)), [],
        "two rows have the same time 'ds'; name the series: --series COLUMN; it is 2024-01-01 01:00:00",
    ),
    "no times": (write(changed(ds="soon")), [], "column 'ds' is no column of times; write them as 2024-12-31"),
    "a missing time": (write(at(5, "ds", None)), [], "column 'ds' is missing in row 6"),
    "a missing name": (write(at(5, "id", None)), ["--series", "id"], "column 'id' is missing in row 6"),
    "all missing": (write(TWO.assign(y=np.nan)), ["--series", "id"], "series 's0' has no value"),
    "two rows": (
        write(text="ds,y\n2024-01-01,1\n2024-01-02,2\n"), [],
        "the validation part has no row because the longest series has 2 steps; give a longer table, or other --val",
    ),
    "many short series": (
        write(waves(series=50, rows=3)), ["--series", "id"],
        "the validation part has no row because the longest series has 3 steps",
    ),
    "long horizon": (write(waves(rows=60)), ["--horizon", "40"], "horizon is 40, expected at most 6 because"),
    "target as covariate": (write(TWO), ["--past", "y"], "column 'y' is the target and a covariate of the past"),
    "two roles": (write(TWO), ["--static", "u", "--future", "u"], "is a static covariate and a future covariate"),
    "static that changes": (write(waves(rows=60)), ["--static", "u"], r"changes, expected one value .* among \['u'\]"),
    "negative counts": (
        write(changed(y=-1.0)), ["--distribution", "negative_binomial"],
        "the target is -1, expected counts 0, 1, 2, ... because the distribution is negative_binomial",
    ),
    "parts of counts": (write(changed(y=0.5)), ["--distribution", "negative_binomial"], "is 0.5, expected counts 0"),
    "unseen labels": (write(LATE), LABEL, "the label 'maybe' is in the test part but not in the training part"),
    "one class": (write(labelled(series=4).assign(kind="a")), [*KINDS, "kind"], r"the classes \['a'\], expected"),
    "class that changes": (write(labelled(series=4)), [*KINDS, "up"], "of series 's0' changes, expected one answer"),
    "few series": (write(labelled(series=2)), [*KINDS, "kind"], "has 2 series, expected more because a part"),
    "UTF-16": (write(text=changed().to_csv().encode("utf-16")), [], "t.csv is not UTF-8: it has the invalid byte 0xff"),
    "packed": (write(text=gzip.compress(b"ds,y\n1,2\n2,3\n")), [], "t.csv is not UTF-8: it has the invalid byte 0x8b"),
    "CSV as Parquet": (write(text="ds,y\n1,2\n", name="t.parquet"), [], "t.parquet cannot be read: .*Parquet"),
    "semicolons": (write(text="ds;y\n1;2\n2;3\n"), [], "t.csv has ';' between its columns, expected commas"),
    "thousands": (write(changed(y="1,234")), [], "column 'y' is '1,234' in row 1, expected a number"),
    "lists": (parquet(y=[[1.0, 2.0]] * 60), [], r"column 'y' is array\(\[1., 2.\]\) in row 1, expected a number"),
    "durations": (parquet(y=pd.to_timedelta(range(60), unit="h")), [], "column 'y' holds durations, expected real"),
    "complex numbers": (arrays(ds=np.arange(60), y=np.ones(60) * 1j), [], "column 'y' holds complex numbers, expected"),
    "four axes": (arrays(y=np.zeros((2, 3, 4, 5))), [], "cannot be read: expected arrays of one to three axes"),
    "no such day": (write(changed(ds="2024-13-01")), [], "column 'ds' is no column of times"),
    "one series unsorted": (backwards, ["--series", "id"], "the times 'ds' of series 's1' go back in its row 2"),
    "one series twice": (
        write(pd.concat([TWO, TWO[-1:]])), ["--series", "id"], "two rows of series 's1' have the same time 'ds'",
    ),
    "missing in training": (write(late_target(45, 60)), [], "the target has no value in the training part; split"),
    "missing in validation": (write(late_target(0, 40, 50, 60)), [], "has no value in the validation part; split"),
    "missing in test": (write(late_target(0, 48)), [], "the target has no value in the test part; split"),
    "one known step": (write(late_target(0, 1, 42, 60)), [], "the target has no value in the training part; split"),
    "too many absent": (
        write(changed(ds=[*range(59), 10**9])), ["--gaps", "fill"],
        "999,999,941 steps are absent from the times 'ds', expected at most nine times the 60 that are there",
    ),
    "a class that is missing": (
        write(labelled(series=4).assign(kind=lambda f: f.kind.where(f.id != "s3"))), [*KINDS, "kind"],
        "the target of series 's3' has no value at all; leave that series out",
    ),
    "a comment": (write(text="# a station\nds,y\n1,2\n2,3\n"), [], "begins with the comment '# a station', expected a"),
    "a title": (write(text="Station 5\nds,y\n1,2\n2,3\n"), [], "begins with 'Station 5', expected a line of names"),
    "a comment below": (write(text="ds,y\n1/13/2020,2\n# end,\n"), [], "is '# end' in row 2, expected a time"),
    "a line of units": (write(text="ds,y\ns,kWh\n1,2\n2,3\n"), [], "column '.*' is '.*' in row 1 and has numbers"),
    "decimal commas": (write(text="ds;y;u\n1;2,5;3,5\n2;3,5;4,5\n"), [], "has ';' between its columns, expected"),
    "tabs": (write(text="ds\ty\n1\t2\n2\t3\n"), [], r"has '\\t' between its columns, expected commas, and points"),
    "tildes": (write(text="ds~y\n1~2\n2~3\n"), [], "has '~' between its columns, expected commas, and points"),
    "no features": (
        write(labelled(series=6)[["id", "kind"]]), [*KINDS[:4], "--target", "kind"], "has no column to read",
    ),
}  # fmt: skip
MISUSED = {
    "two files": (["--data", "a.csv", "b.csv"], "data is a.csv, which does not exist"),
    "no file of a pattern": (["--data", "none-*.csv"], r"none-\*.csv stands for no file, expected one or more"),
    "holidays of nothing": (
        ["--question", "label", "--holidays", "US"],
        "holidays is 'US', expected none without a fo",
    ),
    "unknown question": (["--question", "forcast"], "unknown question 'forcast'; did you mean 'forecast'"),
    "unknown distribution": (["--distribution", "normal"], "unknown distribution 'normal'"),
    "split": (["--split", "rows"], "split is 'rows', expected 'time' or 'series'"),
    "parts": (["--test", "0.95"], r"validation \+ test is 1.05, expected below 1"),
    "held out": (["--held-out", "0.2"], "held_out is 0.2, but table does not use it; give --test and --validation"),
    "no target": (["--question", "label", "--target", ""], "unknown column for the target ''"),
    "no series": (["--question", "classify"], "series is none, expected the column of the series to classify"),
    "classes by time": (["--question", "classify", "--series", "id", "--split", "time"], "expected 'series' because"),
    "ahead of nothing": (["--question", "label", "--future", "u"], "future is given, expected none because nothing is"),
}


@pytest.mark.parametrize("kind", [*BAD, *MISUSED])
def test_a_bad_table_is_one_line_and_leaves_nothing(kind, tmp_path, monkeypatch, capfd):
    make, options, message = BAD[kind] if kind in BAD else (write(waves(rows=60)), *MISUSED[kind])
    path = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    usual = [] if "--question" in options and kind in BAD else FORECAST
    assert main(["train", *TINY, "--data", str(path), *usual, *options, "--out", "run"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err
    assert sorted(tmp_path.iterdir()) == before


DAYS = [f"2024-01-{day:02d}" for day in range(1, 31)]
WEEKLY = [str(day % 7) for day in range(30)]


def written(times=DAYS, values=WEEKLY, head="ds,y", row="{},{}"):
    return "\n".join([head, *(row.format(time, value) for time, value in zip(times, values, strict=True))]) + "\n"


def at_4(text):
    """The table of days, where the fourth value is a text."""
    return written(values=[*WEEKLY[:3], text, *WEEKLY[4:]])


def years(pattern, count=30):
    return [pattern.format(year) for year in range(count)]


MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()  # noqa: SIM905
ODD = {  # a text, and the steps of a season; or what is said of it
    "a mark of the order of bytes": ("\ufeff" + written(), 7),
    "lines of Windows": (written().replace("\n", "\r\n"), 7),
    "lines of old Macs": (written().replace("\n", "\r"), 7),
    "empty lines": (written().replace("\n", "\n\n") + "\n\n", 7),
    "no end of the last line": (written().strip(), 7),
    "quoted": (written(row='"{}","{}"', head='"ds","y"'), 7),
    "spaces behind commas": (written(row="{}, {}"), 7),
    "commas at the ends": (written(row="{},{},", head="ds,y,"), 7),
    "commas at the ends of rows": (written(row="{},{},"), 7),
    "exponents": (written(row="{},{}e0"), 7),
    "signs": (written(row="{},+{}"), 7),
    "a number beyond 64 bits": (at_4("12345678901234567890123"), 7),
    "a missing number": (at_4(""), 7),
    "NA": (at_4("NA"), 7),
    "truth": (written(values=["True", "False"] * 15), 7),
    "a constant": (written(values=["5"] * 30), 7),
    "months by name": (written([f"{month} {year}" for year in (2020, 2021, 2022) for month in MONTHS][:30]), 12),
    "quarters first": (written([f"Q{k % 4 + 1} {2000 + k // 4}" for k in range(30)]), 4),
    "months with an M": (written([f"{2000 + k // 12}M{k % 12 + 1:02d}" for k in range(30)]), 12),
    "no zeros before digits": (written([f"2024-1-{day}" for day in range(1, 31)]), 7),
    "the month first": (written([f"1/{day}/2024" for day in range(1, 31)]), 7),
    "the day first": (written([f"{day}.1.2024" for day in range(1, 31)]), 7),
    "the day first and the month by name": (written([f"{day}-Jan-2024" for day in range(1, 31)]), 7),
    "halves of a day": (
        written([f"2024-01-01 {h}:00 {p}" for p in ("AM", "PM") for h in (12, *range(1, 12))], WEEKLY[:24]), 1,
    ),
    "years": (written(years("19{:02d}")), 1),
    "years with a decimal": (written(years("19{:02d}.0")), 1),
    "before 1970": (written(years("18{:02d}-01-01")), 1),
    "beyond nanoseconds": (written(years("23{:02d}-01-01")), 1),
    "seconds since 1970": (written([str(1704067200 + 86400 * k) for k in range(30)]), 7),
    "milliseconds since 1970": (written([str(1704067200000 + 3600000 * k) for k in range(60)], WEEKLY * 2), 24),
    "UTC": (written(row="{}T00:00:00Z,{}"), 7),
    "offsets of summer": (written([f"2024-03-{d:02d}T00:00+0{1 + (d > 31)}:00" for d in range(2, 32)]), 7),
    "a space in a name": (written(head="ds, y"), "unknown column for the target 'y'; did you mean ' y'"),
    "hexadecimal": (at_4("0x1f"), "column 'y' is '0x1f' in row 4, expected a number because it is the target"),
    "dollars": (written(row="{},${}"), r"column 'y' is '\$0' in row 1, expected a number"),
    "per cents": (written(row="{},{}%"), "column 'y' is '0%' in row 1, expected a number"),
    "decimal commas": (written(row='{},"{},5"'), "column 'y' is '0,5' in row 1, expected a number"),
    "thousands by spaces": (at_4("1 000"), "column 'y' is '1 000' in row 4, expected a number"),
    "a dash": (at_4("-"), "column 'y' is '-' in row 4, expected a number"),
    "a question mark": (at_4("?"), r"column 'y' is '\?' in row 4, expected a number"),
    "infinite": (at_4("inf"), "column 'y' is inf in row 4, expected a finite number"),
    "beyond float64": (at_4("1e400"), "column 'y' is inf in row 4, expected a finite number"),
    "nothing known": (written(values=[""] * 30), "the target has no value at all; leave that series out"),
    "hour 24": (written([*DAYS[:29], "2024-01-30 24:00"]), "column 'ds' is '2024-01-30 24:00' in row 30, expected a t"),
    "hours alone": (written(years("12:{:02d}")), "column 'ds' is '12:00' in row 1, expected a year of four digits"),
    "days of the week": (written(["Mon"] * 30), "column 'ds' is no column of times; write them as 2024-12-31 23:59"),
    "a missing time": (written(["", *DAYS[1:]]), "column 'ds' is missing in row 1"),
    "a time twice": (written([DAYS[1], *DAYS[1:]]), "two rows have the same time 'ds'; name the series"),
    "two forms of times": (written([*DAYS[:29], "01/30/2024"]), "has times of several time zones or formats; write"),
    "a time zone by name": (written(row="{} 00:00 CET,{}"), "column 'ds' is no column of times; write them as"),
    "no names": (written()[5:], "unknown column for the time 'ds'"),
    "an open quote": (written().replace("2024-01-05", '"2024-01-05'), "cannot be read: Error tokenizing data"),
    "a page": ("<html><body>no table</body></html>\n", "has 0 rows, expected at least 2"),
    "JSON": ('[{"ds": "2024-01-01", "y": 1}]\n', "has 0 rows, expected at least 2"),
    "a long field": (at_4("9" * 200_000), "t.csv cannot be read: field larger than field limit"),
    "a week that is not": (
        written([f"2024-W{week}" for week in range(25, 55)]), "is '2024-W53' in row 29, expected a week of the cale",
    ),
    "bars": (written(head="ds|y", row="{}|{}"), r"has '\|' between its columns, expected commas, and points in its"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_table_is_right_or_refused_in_one_line(kind, tmp_path):
    text, expected = ODD[kind]
    (tmp_path / "t.csv").write_bytes(text.encode())
    source = Table([tmp_path / "t.csv"], "forecast", "y", time="ds", horizon=2)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected) as error:
            _ = source.collection
        assert "\n" not in str(error.value)
        return
    (series,), season = source.collection.series, source.collection.season
    assert (season, series.spans) == (expected, None)
    if kind not in ("truth", "a constant"):
        rows = len(series)
        values = np.arange(rows) % 7.0 if rows == 30 else np.tile(np.arange(30) % 7.0, 2)[:rows]
        odd = [3] if kind in ("a number beyond 64 bits", "a missing number", "NA") else []
        np.testing.assert_array_equal(np.delete(series.target[:, 0], odd), np.delete(values, odd))


def test_names_stay_as_they_are_written(tmp_path):
    """NA, None and null are names; 007 and 7 are two. Beside text, NA is a missing number where numbers are wanted."""
    names = ["NA", "None", "null", "007", "7", "1.0", "1", "nan"]
    rows = [
        f"{name},{i},{'NA' if i == 3 else i},{kind}" for name in names for i, kind in enumerate(["NA", "01", "1"] * 4)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["id,ds,y,kind", *rows]))
    options = {"series": "id", "time": "ds", "horizon": 1, "sequence_length": 4}
    source = Table([tmp_path / "t.csv"], "forecast", "y", **options)
    assert [one.name for one in source.collection.series] == names
    assert all(np.flatnonzero(np.isnan(one.target)).tolist() == [3] for one in source.collection.series)
    labels = Table([tmp_path / "t.csv"], "label", "kind", past=["y"], series="id", time="ds")
    assert labels.collection.classes == ["01", "1", "NA"]
    assert labels.collection.series[0].target.tolist() == [2, 0, 1] * 4


def test_row_numbers_are_no_covariates(tmp_path):
    frame = labelled().drop(columns=["ds", "size", "up"])
    mixed = frame.sample(frac=1, random_state=0).sort_values("id", kind="stable")
    mixed.to_csv(tmp_path / "mixed.csv")  # whose numbers have no name
    pd.read_csv(tmp_path / "mixed.csv").to_csv(tmp_path / "twice.csv")
    frame.reset_index().to_csv(tmp_path / "named.csv", index=False)
    mixed.to_parquet(tmp_path / "mixed.parquet")
    left = {"mixed.csv": ["Unnamed: 0"], "twice.csv": ["Unnamed: 0.1", "Unnamed: 0"], "named.csv": ["index"]}
    for name in (*left, "mixed.parquet"):
        source = Table([tmp_path / name], "classify", "kind", series="id")
        assert source.covariates == ["y", "u"]
        assert source.left_out == left.get(name, [])
        assert ("not read" in source.collection.summary) == (name in left)
    assert Table([tmp_path / "mixed.csv"], "classify", "kind", series="id", past=["Unnamed: 0"]).covariates == [
        "Unnamed: 0"
    ]


def test_an_index_of_parquet_is_a_column(tmp_path):
    frame = waves(rows=60)[["ds", "y"]].set_index("ds")
    for index, time in (("ds", "ds"), (None, "index")):
        frame.rename_axis(index).to_parquet(tmp_path / "t.parquet")
        assert Table([tmp_path / "t.parquet"], "forecast", "y", time=time).collection.season == 7
