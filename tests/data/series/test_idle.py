"""Series from which nothing is learnt are left out of a panel and named; others stay, whatever their times."""

from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")

from scanl.data.series.idle import without_idle  # noqa: E402
from scanl.data.series.series import Roles  # noqa: E402

HORIZON = 6
PATH = Path("t.csv")
ROLES = Roles(["y"], "ds", ["id"])


def panel(**series):
    """Return series of months from a date, by name: (first month, numbers)."""
    parts = [
        pd.DataFrame({"id": name, "ds": pd.date_range(first, periods=len(y), freq="MS"), "y": np.array(y, float)})
        for name, (first, y) in series.items()
    ]
    return pd.concat(parts, ignore_index=True)


def walk(rows, seed=0):
    return np.random.default_rng(seed).normal(size=rows).cumsum()


WHOLE = {"a": ("2015-01", walk(60)), "b": ("2015-01", walk(60, 1)), "c": ("2017-01", walk(36, 2))}


def left_out(frame, roles=ROLES, **options):
    kept, reasons = without_idle(frame, PATH, roles, HORIZON, **options)
    assert set(kept.id) == set(frame.id) - reasons.keys()
    return dict(reasons)


def test_series_that_are_dead_are_left_out_with_the_reason():
    fallow = np.concatenate([walk(30), np.full(30, np.nan)])
    frame = panel(
        **WHOLE,
        nothing=("2015-01", [np.nan] * 60),
        zero=("2015-01", [0] * 60),
        level=("2015-01", [2.5] * 20 + [np.nan] * 20 + [2.5] * 20),
        old=("2015-01", walk(20)),
        fallow=("2015-01", fallow),
    )
    assert left_out(frame) == {
        "nothing": "has no number",
        "zero": "is always 0",
        "level": "is always 2.5",
        "old": "ended 2016-08-01",
        "fallow": "ended 2017-06-01",
    }
    text = frame.assign(ds=frame.ds.dt.strftime("%Y %b"))
    assert left_out(text)["old"] == "ended 2016 Aug"
    without_times = Roles(["y"], None, ["id"])
    assert list(left_out(frame, without_times)) == ["nothing", "zero", "level"]


def test_others_stay():
    """A late report, a series that has just begun, changes at the end, a single series, and none but dead ones."""
    late = panel(
        **WHOLE, late=("2015-01", walk(60 - HORIZON)), young=("2019-10", [0, 0, 0]), woken=("2015-01", [0] * 59 + [1])
    )
    assert left_out(late) == {}
    assert left_out(panel(a=("2015-01", [1] * 60))) == {}
    assert left_out(panel(a=("2015-01", [1] * 60), b=("2015-01", [2] * 60))) == {}


def test_series_of_other_times_are_not_ended():
    """Such as those of a competition: most of them do not end together."""
    frame = panel(**{f"s{i}": (f"{1960 + 7 * i}-01", walk(60, i)) for i in range(6)}, t=("1995-01", walk(60, 9)))
    assert left_out(frame) == {}


def test_two_targets():
    """A series is left out if one of them has no number, or if both are always equal."""
    frame = panel(**WHOLE, half=("2015-01", walk(60)), still=("2015-01", [1] * 60), empty=("2015-01", walk(60)))
    frame["z"] = np.where(frame.id.isin(["half", "still"]), 7.0, np.where(frame.id == "empty", np.nan, frame.y))
    roles = Roles(["y", "z"], "ds", ["id"])
    assert left_out(frame, roles) == {"still": "is always 1, 7", "empty": "has no number"}


def test_after_training_only_the_series_that_were_left_out_are():
    frame = panel(**WHOLE, still=("2015-01", [1] * 60), nothing=("2015-01", [np.nan] * 60), x=("2015-01", [3] * 60))
    assert left_out(frame, known={"x": "is always 3"}) == {"nothing": "has no number", "x": "is always 3"}
