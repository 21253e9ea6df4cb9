"""Frames come out as they went in: forecasts, updates, cross-validation, and files."""

import re

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")

from scanl.errors import CheckpointError, ConfigError, DataError  # noqa: E402
from scanl.learning.forecasting.frames import ANSWER, Frames, levels_of  # noqa: E402

SMALL = {"layer": "lru", "dim": 8, "steps": 2, "batch_size": 4, "sequence_length": 12}


def frame(rows=80, freq="D", **more):
    dates = pd.date_range("2024-01-01", periods=rows, freq=freq)
    parts = [
        pd.DataFrame({"unique_id": name, "ds": dates, "y": level + np.sin(2 * np.pi * np.arange(rows) / 7), **more})
        for name, level in (("b", 0.0), ("a", 50.0))
    ]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("freq", ["MS"])
def test_a_frame_goes_in_and_comes_out(freq):
    table = frame(freq=freq)
    model = Frames(7, layer="lru", dim=8, steps=60, lr=0.02, season=7, sequence_length=28).fit(table)
    answers = model.predict(levels=[80])
    assert list(answers.columns) == ["unique_id", "ds", "scanl", "scanl-lo-80", "scanl-hi-80"]
    assert answers["unique_id"].tolist() == ["b"] * 7 + ["a"] * 7
    expected = pd.date_range("2024-01-01", periods=87, freq=freq)[80:]
    assert answers["ds"].tolist() == [*expected, *expected]
    assert bool((answers["scanl-lo-80"] < answers["scanl"]).all())
    assert bool((answers["scanl"] < answers["scanl-hi-80"]).all())
    truth = np.sin(2 * np.pi * np.arange(80, 87) / 7)
    assert np.abs(answers["scanl"][:7] - truth).mean() < 0.45  # the mean of the waves is off by 0.64
    assert np.abs(answers["scanl"][7:] - truth - 50).mean() < 0.45


def test_a_quantile_is_a_bound_of_an_interval_and_the_median_is_the_answer():
    assert levels_of([0.05, 0.5, 0.9]) == ([90, 80], [f"{ANSWER}-lo-90", ANSWER, f"{ANSWER}-hi-80"])


def test_rows_may_come_in_any_order_and_as_an_index():
    expected = Frames(3, **SMALL).fit(frame()).predict()
    assert list(expected.columns[3:]) == ["scanl-lo-80", "scanl-hi-80", "scanl-lo-95", "scanl-hi-95"]
    for other in (
        frame().groupby("unique_id", sort=False).sample(frac=1, random_state=1),
        frame().set_index(["unique_id", "ds"]),
    ):
        pd.testing.assert_frame_equal(Frames(3, **SMALL).fit(other).predict(), expected)


def known(table, rows):
    return table.assign(price=np.random.default_rng(4).normal(size=len(table))).iloc[rows]


COVARIATES = {"past": ["demand"], "future": ["price"], "static": ["size"]}


def with_covariates(rows):
    draw = np.random.default_rng(4)
    table = frame(rows, size=2.0)
    return table.assign(price=draw.normal(size=len(table)), demand=draw.normal(size=len(table)))


def test_an_update_equals_all_rows_at_once(tmp_path):
    """One by one, in a chunk that overlaps, with a new series; and after a round trip through a file."""
    table = with_covariates(60)
    day = table.groupby("unique_id").cumcount()
    first, X = table[day < 40], table[day >= 50][["unique_id", "ds", "price"]]
    model = Frames(3, **SMALL, **COVARIATES).fit(first)
    expected = model.predict(table[day < 50], X)
    model.save(tmp_path / "saved")
    for days in (range(40, 50), [range(40, 45), range(43, 50)], [range(day, day + 1) for day in range(40, 50)]):
        for other in (Frames.load(tmp_path / "saved"),):
            for some in [days] if isinstance(days, range) else days:
                other.update(table[day.isin(some)])
            pd.testing.assert_frame_equal(other.predict(X=X), expected)
    model.update(table[(day >= 40) & (day < 50)])
    pd.testing.assert_frame_equal(model.predict(X=X), expected)
    with pytest.raises(DataError, match="frames: df: two rows of series 'c' have the same time 'ds'"):
        model.update(table[day < 50].assign(unique_id="c"))
    model.update(table[(day < 50) & (table.unique_id == "a")].assign(unique_id="c"))
    more = model.predict(X=pd.concat([X, X.assign(unique_id="c")]).drop_duplicates(["unique_id", "ds"]))
    assert more["unique_id"].unique().tolist() == ["b", "a", "c"]
    pd.testing.assert_frame_equal(more[:6], expected)


def test_names_of_series_in_several_columns(tmp_path):
    """The answers are those of one name: of `fit`, `update`, `cross_validation`, and after a round trip."""
    table = frame(60)
    day = table.groupby("unique_id").cumcount()
    several = table.assign(state="S", region=table.unique_id).drop(columns="unique_id")
    one, two = Frames(3, **SMALL).fit(table[day < 50]), Frames(3, series="state,region", **SMALL).fit(several[day < 50])
    two.save(tmp_path / "saved")
    for model in (two, Frames.load(tmp_path / "saved")):
        expected, answers = (m.update(t[day >= 50]).predict() for m, t in ((one, table), (model, several)))
        assert list(answers.columns[:4]) == ["state", "region", "ds", "scanl"]
        pd.testing.assert_frame_equal(answers.iloc[:, 2:], expected.iloc[:, 1:])
    windows = [m.cross_validation(t, 2) for m, t in ((one, table), (two, several))]
    pd.testing.assert_frame_equal(windows[0].iloc[:, 1:], windows[1].iloc[:, 2:])
    with pytest.raises(DataError, match="df has no column 'state', expected state, region, ds and y"):
        two.predict(table)


def test_a_dead_series_is_left_out_and_named(tmp_path):
    table = pd.concat([frame(60), frame(60).assign(y=1.0, unique_id=lambda t: t.unique_id + "0")])
    with pytest.warns(UserWarning, match="^frames: series are left out: 'b0' is always 1, 'a0' is always 1$"):
        model = Frames(3, **SMALL).fit(table)
    model.save(tmp_path / "saved")
    for one in (model, Frames.load(tmp_path / "saved")):
        with pytest.warns(UserWarning, match="series are left out: 'b0' is always 1, 'a0' is always 1$"):
            assert one.predict()["unique_id"].unique().tolist() == ["b", "a"]
        assert one.predict(table)["unique_id"].unique().tolist() == ["b", "a", "b0", "a0"]


@pytest.mark.parametrize("days", [[49], [45, 47], [3], [0, 20, 48, 50, 51], [47, 48, 49, 50]])
def test_a_corrected_row_replaces_the_earlier_one(days):
    """The forecast begins after the last row, and reads what follows the correction."""
    table = frame(52)
    day = table.groupby("unique_id").cumcount()
    whole = table.assign(y=table.y.where(~day.isin(days), 7.0))
    model = Frames(3, **SMALL).fit(table[day < 50])
    model.update(whole[day.isin(days)])
    expected = whole[day <= max(49, *days)]
    pd.testing.assert_frame_equal(model.predict(), model.predict(expected))
    assert model.predict().ds.min() == expected.ds.max() + pd.Timedelta("1D")


def test_an_update_of_what_is_known_changes_nothing():
    model = Frames(3, **SMALL).fit(frame(50))
    expected = model.predict()
    pd.testing.assert_frame_equal(model.update(frame(50).iloc[[3, 60]]).predict(), expected)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_rows_of_another_time_zone_have_the_hours_of_the_first(zone):
    """Over the night when clocks go forward in Berlin."""
    dates = pd.date_range("2024-03-27", periods=140, freq="h", tz="Europe/Berlin")
    table = frame(140).assign(ds=[*dates, *dates])
    hour = table.groupby("unique_id").cumcount()
    model = Frames(3, **SMALL).fit(table[hour < 80])
    expected = model.predict(table)
    other = table.assign(ds=table.ds.dt.tz_convert(zone))
    pd.testing.assert_frame_equal(model.predict(other), expected)
    pd.testing.assert_frame_equal(model.update(other[hour >= 80]).predict(), expected)


def test_texts_with_the_offsets_of_summer_and_winter_keep_their_hours():
    dates = pd.date_range("2024-03-27", periods=140, freq="h", tz="Europe/Berlin").map(lambda time: time.isoformat())
    table = frame(140).assign(ds=[*dates, *dates])
    hour = table.groupby("unique_id").cumcount()
    model = Frames(3, **SMALL).fit(table[hour < 80])
    expected = model.predict(table)
    pd.testing.assert_frame_equal(model.update(table[hour >= 80]).predict(), expected)


@pytest.mark.parametrize(("first", "then"), [("int64", "str"), ("int64", "float64"), ("str", "int64")])
def test_ids_as_text_and_as_numbers_are_one(first, then, tmp_path):
    table = frame(60).assign(unique_id=lambda t: t.unique_id.map({"b": 2, "a": 1}).astype(first))
    day = table.groupby("unique_id").cumcount()
    model = Frames(3, **SMALL).fit(table[day < 50])
    expected = model.predict(table)
    model.update(table[day >= 50].assign(unique_id=lambda t: t.unique_id.astype(then)))
    pd.testing.assert_frame_equal(model.predict(), expected)
    with pytest.raises(DataError, match="expected numbers as in fit" if first != "str" else "expected text as in fit"):
        model.update(table[:9].assign(unique_id="c" if first != "str" else 5))
    model.save(tmp_path)
    pd.testing.assert_frame_equal(Frames.load(tmp_path).predict(), expected)


DAY = pd.Timedelta("1D")
UNFIT = {
    "twice": (lambda t: pd.concat([t, t[:1]]), "two rows of series 'b' have the same time 'ds'"),
    "none": (lambda t: t[:0], "df has no rows"),
    "hours": (lambda t: t.assign(ds=t.ds.min() + (t.ds - t.ds.min()) / 24), "no frequency that can be inferred"),
    "off": (lambda t: t.assign(ds=t.ds + DAY / 5), "no frequency that can be inferred"),
    "text": (lambda t: t.assign(y="x"), "column 'y' is 'x' in row 1, expected a number"),
    "infinite": (lambda t: t.assign(y=np.inf), "column 'y' is inf"),
    "numbers": (lambda t: t.assign(ds=np.arange(len(t))), "the times 'ds' are numbers, expected dates"),
    "zone": (lambda t: t.assign(ds=t.ds.dt.tz_localize("UTC")), "dates of a time zone, expected dates without"),
    "no time": (lambda t: t.assign(ds=pd.NaT), "column 'ds' is missing in row 1"),
    "no id": (lambda t: t.assign(unique_id=None), "column 'unique_id' is missing in row 1"),
    "long ago": (lambda t: t[:1].assign(ds=t.ds - 9999 * DAY), "steps are absent from the times 'ds'"),
    "no column": (lambda t: t.drop(columns="y"), "df has no column 'y'"),
}


@pytest.fixture(scope="module")
def fitted():
    model = Frames(3, **SMALL).fit(frame(50))
    return model, model.predict(), model._table.frame.copy()


@pytest.mark.parametrize("kind", UNFIT)
def test_an_update_that_fails_changes_nothing(kind, fitted):
    (model, expected, before), (change, message) = fitted, UNFIT[kind]
    table = frame(60)
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        model.update(change(table[table.groupby("unique_id").cumcount() >= 50].reset_index(drop=True)))
    pd.testing.assert_frame_equal(model._table.frame, before)
    pd.testing.assert_frame_equal(model.predict(), expected)


def test_an_update_may_be_unsorted_and_in_another_form():
    table = frame(60)
    day = table.groupby("unique_id").cumcount()
    model = Frames(3, **SMALL).fit(table[day < 50])
    more = table[day >= 50].sample(frac=1, random_state=1).assign(ds=lambda t: t.ds.astype(str))
    model.update(more[["y", "ds", "unique_id"]].astype({"y": object}))
    pd.testing.assert_frame_equal(model.predict(), model.predict(table))


def test_texts_of_times_of_one_series_are_updated():
    table = frame(60).assign(ds=lambda t: t.ds.astype(str))
    day = table.groupby("unique_id").cumcount()
    model = Frames(3, **SMALL).fit(table[day < 50])
    for name in "ba":
        model.update(table[(day >= 50) & (table.unique_id == name)])
    pd.testing.assert_frame_equal(model.predict(), model.predict(table))


def test_known_covariates_have_one_row_a_time():
    table = with_covariates(53)
    day = table.groupby("unique_id").cumcount()
    model = Frames(3, **SMALL, **COVARIATES).fit(table[day < 50])
    X = table[day >= 50][["unique_id", "ds", "price"]]
    with pytest.raises(DataError, match="frames: X: two rows of series 'b' have the same time 'ds'"):
        model.predict(X=pd.concat([X, X[:1].assign(price=9.0)]))


def test_cross_validation_equals_refitting_by_hand():
    table = with_covariates(30)
    options = {**SMALL, **COVARIATES}
    result = Frames(4, **options).cross_validation(table, n_windows=2, step=3, levels=[50])
    assert list(result.columns) == ["unique_id", "ds", "cutoff", "y", "scanl", "scanl-lo-50", "scanl-hi-50"]
    day = table.groupby("unique_id").cumcount()
    for cut in (23, 26):
        X = table[(day >= cut) & (day < cut + 4)]
        by_hand = Frames(4, **options).fit(table[day < cut]).predict(X=X, levels=[50])
        one = result[result.cutoff == pd.Timestamp("2024-01-01") + pd.Timedelta(days=cut - 1)]
        pd.testing.assert_frame_equal(one[by_hand.columns].reset_index(drop=True), by_hand)
        assert one.y.tolist() == X.sort_values(["size", "unique_id"], ascending=[True, False]).y.tolist()
    usual = Frames(4, **options).cross_validation(table)
    assert usual.groupby("unique_id").ds.min().unique() == [pd.Timestamp("2024-01-27")]


@pytest.mark.parametrize("freq", ["M", "Q"])
def test_periods_stay_periods_in_every_method(freq, tmp_path):
    table = frame(30).assign(ds=[*pd.period_range("2020-01", periods=30, freq=freq)] * 2)
    model = Frames(3, **SMALL).fit(table)
    expected = [*pd.period_range("2020-01", periods=33, freq=freq)[30:]] * 2
    assert model.predict().ds.tolist() == expected
    model.save(tmp_path)
    pd.testing.assert_frame_equal(Frames.load(tmp_path).predict(), model.predict())
    day = table.groupby("unique_id").cumcount()
    later = Frames.load(tmp_path).update(table[day > 25])
    pd.testing.assert_frame_equal(later.predict(), model.predict())
    result = Frames(3, **SMALL).cross_validation(table)
    assert result.cutoff.unique().tolist() == [table.ds[26]]
    assert not result.y.isna().any()


def test_frames_that_cannot_be_learnt_from():
    for wrong, horizon, message in (
        (frame().drop(columns="ds"), 3, "^frames: df has no column 'ds', expected unique_id, ds and y"),
        (frame().assign(y="x"), 3, "^frames: df: column 'y' is 'x' in row 1, expected a number because it is the"),
        (frame(12), 12, "^frames: horizon is 12, expected at most 11 because the longest series has 12 steps"),
        (pd.concat([frame(), frame()]), 3, "^frames: df: two rows of series 'b' have the same time 'ds'"),
    ):
        with pytest.raises(DataError, match=message):
            Frames(horizon, **SMALL).fit(wrong)


def test_mistakes_are_one_message(tmp_path):
    model = Frames(3, **SMALL).fit(frame(20))
    ahead = Frames(3, **SMALL, future=["y2"]).fit(frame(20, y2=1.0))
    points = Frames(3, **SMALL, distribution="points").fit(frame(20))
    assert list(points.predict().columns) == ["unique_id", "ds", "scanl"]
    for do, error, message in (
        (lambda: Frames(3).predict(), ConfigError, "frames: predict is called before fit, expected fit first"),
        (lambda: Frames(3).update(frame()), ConfigError, "frames: update is called before fit"),
        (lambda: model.predict(levels=[80, 100]), ConfigError, "levels is [80, 100], expected per cents above 0 and"),
        (lambda: model.predict(levels=80), ConfigError, "frames: levels is 80, expected a list of per cents"),
        (lambda: points.predict(levels=[50]), ConfigError, "levels is [50], expected none because the distribution is"),
        (lambda: model.predict(X=frame()), ConfigError, "frames: X is given, expected none because future is ()"),
        (lambda: ahead.predict(), ConfigError, "frames: X is none, expected a frame with y2 at the 3 steps ahead"),
        (
            lambda: ahead.predict(X=frame(20, y2=1.0)),
            DataError,
            "frames: X has no row at 2024-01-21 00:00:00 of",
        ),
        (lambda: model.update(frame().drop(columns="y")), DataError, "frames: df has no column 'y', expected"),
        (
            lambda: model.cross_validation(frame(12), 5),
            DataError,
            "n_windows is 5, expected at most 3 because the",
        ),
        (lambda: model.cross_validation(frame(12), 0), ConfigError, "n_windows is 0, expected a whole number of at"),
        (lambda: Frames.load(tmp_path), CheckpointError, "has no frames.json and rows.parquet, expected a folder of"),
        (lambda: Frames(3, season=0).fit(frame()), ConfigError, "frames: season is 0, expected at least 1"),
        (lambda: Frames(3, freq="h").fit(frame()), ConfigError, "frames: freq is 'h', expected none because the times"),
    ):
        with pytest.raises(error, match=re.escape(message)) as raised:
            do()
        assert "\n" not in str(raised.value)
        assert not str(raised.value).startswith("table")


def test_backtests_choose_what_is_left_open(tmp_path):
    """A season on a trend: far better than the seasonal naive. The model is saved with the choice."""
    at = np.arange(132)
    y = np.exp(0.01 * at) * (100 + 20 * np.sin(2 * np.pi * at / 12)) + np.random.default_rng(0).normal(size=132)
    table = pd.DataFrame({"unique_id": "a", "ds": pd.date_range("2015-01-31", periods=132, freq="ME"), "y": y})
    model = Frames(6).fit(table[:-6])
    answers = model.predict()
    assert np.abs(answers["scanl"] - y[-6:]).mean() < 0.3 * np.abs(y[-18:-12] - y[-6:]).mean()
    assert (answers["scanl-lo-95"] < answers["scanl-lo-80"]).all()
    assert model.chosen["distribution"] == "quantiles"
    model.save(tmp_path)
    pd.testing.assert_frame_equal(Frames.load(tmp_path).predict(), answers)
    with (
        pytest.warns(UserWarning, match="frames: left out: simple forecasts from 9 last values, for which"),
        pytest.warns(UserWarning, match="frames: left out: the model in the package, for which"),
    ):
        Frames(6, minutes=1e-9).fit(table)
    with pytest.warns(UserWarning, match="frames: the table is too short for several backtests, so the intervals"):
        short = Frames(1).fit(table[:5]).predict()
    assert bool((short["scanl-lo-80"] < short["scanl"]).all())


def test_pretrained_frames_need_no_training(tmp_path):
    table = frame(60)
    day = table.groupby("unique_id").cumcount()
    model = Frames.pretrained(3).fit(table)
    expected = model.predict()
    assert list(expected.columns) == [
        "unique_id",
        "ds",
        "scanl",
        "scanl-lo-80",
        "scanl-hi-80",
        "scanl-lo-95",
        "scanl-hi-95",
    ]
    assert (expected["scanl-lo-95"] <= expected["scanl"]).all()
    later = Frames.pretrained(3).fit(table[day < 50]).update(table[day >= 50])
    pd.testing.assert_frame_equal(later.predict(), expected)
    model.save(tmp_path / "saved")
    pd.testing.assert_frame_equal(type(model).load(tmp_path / "saved").predict(), expected)
    assert len(model.cross_validation(table, 2)) == 12
