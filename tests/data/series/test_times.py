"""Dates of the future and seasons: right for every frequency, or refused in one line."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'scanl[series]'")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'scanl[sklearn]'")

from pathlib import Path  # noqa: E402

from scanl.data.series.naive import naive, season_errors  # noqa: E402
from scanl.data.series.table import Table  # noqa: E402
from scanl.errors import ConfigError, DataError, ScanlError  # noqa: E402
from scanl.learning.forecasting.frames import Frames  # noqa: E402

COVERS = ["data/series/frequency"]

AHEAD = 9


def forecast(ds, ahead=AHEAD, **options):
    """Return the dates of a forecast, and the season by which it was made."""
    frame = pd.DataFrame({"unique_id": "a", "ds": ds, "y": np.random.default_rng(0).normal(size=len(ds))})
    model = Frames(ahead, layer="lru", dim=4, steps=1, batch_size=1, sequence_length=8, **options).fit(frame)
    found = model.predict()["ds"]
    assert frame["ds"].dtype.kind != "M" or found.dtype == frame["ds"].dtype
    return list(found), model._table.asking.season


REGULAR = {  # alias: steps of a season
    "ME": 12, "MS": 12, "BME": 12, "BMS": 12, "2ME": 6, "6MS": 2, "18ME": 1, "WOM-3FRI": 12, "QE-NOV": 4, "QS": 4,
    "BQS-OCT": 4, "BQE": 4, "YE-FEB": 1, "YS-APR": 1, "BYE": 1, "2YS": 1, "D": 7, "B": 5, "W-THU": 1, "4W-WED": 13,
    "28D": 13, "30D": 12, "91D": 4, "364D": 1, "365D": 1, "10D": 1, "h": 24, "7h": 24, "6h": 4, "30min": 1, "15min": 1,
    "s": 1, "10ms": 1,
}  # fmt: skip


@pytest.mark.parametrize("start", ["2021-01-31", "2023-11-30 09:30"])
@pytest.mark.parametrize("alias", REGULAR)
def test_the_steps_that_follow_are_those_of_pandas(alias, start):
    dates = pd.date_range(start, periods=60 + AHEAD, freq=alias)
    assert forecast(dates[:60]) == (list(dates[60:]), REGULAR[alias])
    holes = dates[:60].delete([20, 21, 41])
    assert forecast(holes)[0] == list(dates[60:])


ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("alias", ["D", "B", "W-MON", "MS", "ME", "h", "15min", "12h"])
def test_the_clock_changes(zone, alias):
    """Both ways, before the forecast and in it. Days are days of the clock on the wall, and hours last an hour."""
    rows = {"h": 500, "15min": 2000}.get(alias, 60)
    for start in ("2024-03-08", "2024-10-06", "2024-09-20"):
        dates = pd.date_range(start, periods=rows + 40, freq=alias, tz=zone)
        assert forecast(dates[:rows], 40)[0] == list(dates[rows:])
    if alias == "h":  # an hour of the clock on the wall is left out
        dates = pd.date_range("2024-03-25", periods=400, freq="h", tz="Europe/Berlin").tz_localize(None)
        assert forecast(dates[:300], 100)[0] == list(dates[300:])


def days(*written):
    return pd.DatetimeIndex([pd.Timestamp(day) for day in written])


BY_HAND = {  # times, the two that follow
    "months from a 30th": (
        days("2023-11-30", "2023-12-30", "2024-01-30", "2024-02-29"), days("2024-03-30", "2024-04-30"),
    ),
    "months from a 15th": (days("2024-10-15", "2024-11-15", "2024-12-15"), days("2025-01-15", "2025-02-15")),
    "months of 31 days": (days("2023-07-01", "2023-08-01", "2023-09-01"), days("2023-10-01", "2023-11-01")),
    "31 days": (days("2024-01-10", "2024-02-10", "2024-03-12", "2024-04-12"), days("2024-05-13", "2024-06-13")),
    "years from 29 February": (
        days("2020-02-29", "2021-02-28", "2022-02-28", "2023-02-28"), days("2024-02-29", "2025-02-28"),
    ),
    "years from 15 March": (days("2021-03-15", "2022-03-15", "2023-03-15"), days("2024-03-15", "2025-03-15")),
    "Monday to Friday and Monday": (
        days("2024-05-06", "2024-05-07", "2024-05-08", "2024-05-09", "2024-05-10", "2024-05-13"),
        days("2024-05-14", "2024-05-15"),
    ),
    "years": ([1999, 2000, 2001], [2002, 2003]),
    "seconds since 1970": ([1704067200, 1704070800, 1704074400], [1704078000, 1704081600]),
    "nanoseconds since 1970": (
        [1704067200_000000001, 1704067201_000000001, 1704067202_000000001],
        [1704067203_000000001, 1704067204_000000001],
    ),
    "tenths": ([0.1, 0.2, 0.3], [0.4, 0.5]),
    "whole steps with a hole": ([*range(5, 50, 5), *range(55, 90, 5)], [90, 95]),
    "milliseconds since 1970": ([1704067200000, 1704070800000, 1704074400000], [1704078000000, 1704081600000]),
    "seconds of month ends": ([1706659200, 1709164800, 1711843200, 1714435200], [1717113600, 1719705600]),
    "numbers that are dates": ([20231230, 20231231, 20240101], [20240102, 20240103]),
    "numbers that are months": ([202311, 202312, 202401], [202402, 202403]),
    "years and months": (["2023-11", "2023-12", "2024-01"], ["2024-02", "2024-03"]),
    "years as text": (["2022", "2023", "2024"], ["2025", "2026"]),
    "quarters": (["2023Q2", "2023Q3", "2023Q4"], ["2024Q1", "2024Q2"]),
    "quarters with a space": (["1970 Q1", "1970 Q2", "1970 Q3"], ["1970 Q4", "1971 Q1"]),
    "quarters with a dash": (["1970-q1", "1970-q2", "1970-q3"], ["1970-q4", "1971-q1"]),
    "quarters first": (["Q2 2023", "Q3 2023", "Q4 2023"], ["Q1 2024", "Q2 2024"]),
    "months with an M": (["2023M11", "2023M12", "2024M01"], ["2024M02", "2024M03"]),
    "months with a name": (["2005 Feb", "2005 Mar", "2005 Apr"], ["2005 May", "2005 Jun"]),
    "months with a whole name": (["November 2005", "December 2005", "January 2006"], ["February 2006", "March 2006"]),
    "months first": (["11/2005", "12/2005", "01/2006"], ["02/2006", "03/2006"]),
    "weeks": (["2024-W51", "2024-W52", "2025-W01"], ["2025-W02", "2025-W03"]),
    "weeks without a dash": (["2024W51", "2024W52", "2025W01"], ["2025W02", "2025W03"]),
    "weeks with a space": (["1991 W51", "1991 W52", "1992 W01"], ["1992 W02", "1992 W03"]),
    "days of weeks": (["2024-W52-6", "2024-W52-7", "2025-W01-1"], ["2025-W01-2", "2025-W01-3"]),
    "periods": (pd.period_range("2024-01", periods=9, freq="M"), pd.period_range("2024-10", periods=2, freq="M")),
    "periods of weeks": (
        pd.period_range("2024-01-03", periods=9, freq="W-SUN"), pd.period_range("2024-03-06", periods=2, freq="W-SUN"),
    ),
    "days with offsets that change": (
        [date.isoformat() for date in pd.date_range("2024-03-29", periods=5, tz="Europe/Berlin")],
        ["2024-04-03T00:00:00+02:00", "2024-04-04T00:00:00+02:00"],
    ),
    "hours with offsets that change": (
        [date.isoformat(" ") for date in pd.date_range("2024-10-26 20:00", periods=9, freq="h", tz="Europe/Berlin")],
        ["2024-10-27 04:00:00+01:00", "2024-10-27 05:00:00+01:00"],
    ),
    "hours in UTC": (
        ["2024-10-27T21:00:00.000Z", "2024-10-27T22:00:00.000Z", "2024-10-27T23:00:00.000Z"],
        ["2024-10-28T00:00:00.000Z", "2024-10-28T01:00:00.000Z"],
    ),
    "an offset without a colon": (
        ["2024-10-27 22:00+0300", "2024-10-27 22:30+0300", "2024-10-27 23:00+0300"],
        ["2024-10-27 23:30+0300", "2024-10-28 00:00+0300"],
    ),
    "any order": (days("2024-01-03", "2024-01-01", "2024-01-04", "2024-01-02"), days("2024-01-05", "2024-01-06")),
    "days first, seen by the 13th": (["12/02/2024", "13/02/2024", "14/02/2024"], ["15/02/2024", "16/02/2024"]),
    "months first, seen by the 13th": (["02/12/2024", "02/13/2024", "02/14/2024"], ["02/15/2024", "02/16/2024"]),
    "as a spreadsheet has them": (
        ["1/30/2024 8:05", "1/31/2024 8:05", "2/1/2024 8:05"], ["2/2/2024 8:05", "2/3/2024 8:05"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_HAND)
def test_the_steps_that_follow_by_hand(kind):
    times, following = BY_HAND[kind]
    assert forecast(times, 2)[0] == list(following)


def test_days_of_business():
    """With holidays; and other days than Monday to Friday."""
    monday = pd.date_range("2024-01-01", periods=120, freq="B")
    holidays = pd.DatetimeIndex(["2024-01-15", "2024-02-19", "2024-03-29"])
    assert forecast(monday[:80].difference(holidays)) == (list(monday[80 : 80 + AHEAD]), 5)
    for week in ("Mon Tue Wed Thu Fri Sat", "Sun Mon Tue Wed Thu", "Mon Wed Fri"):
        dates = pd.date_range("2024-01-01", periods=60 + AHEAD, freq=pd.offsets.CustomBusinessDay(weekmask=week))
        assert forecast(dates[:60]) == (list(dates[60:]), len(week.split()))


def days_of_steps(days, begin, rows, step):
    """Return dates of `rows` steps from a time of each day."""
    return pd.DatetimeIndex([day + pd.Timedelta(begin) + k * pd.Timedelta(step) for day in days for k in range(rows)])


DAILY = pd.date_range("2024-01-01", periods=30)
MARKET = pd.date_range("2024-01-02", periods=30, freq="B").delete([9, 17])
NIGHTS = {  # times, steps of a day
    "a market": (days_of_steps(MARKET, "9h30min", 13, "30min"), 13),
    "in its time zone": (days_of_steps(MARKET, "9h30min", 13, "30min").tz_localize("America/New_York"), 13),
    "with a pause at noon": (
        days_of_steps(MARKET, "9h", 5, "30min").union(days_of_steps(MARKET, "13h", 6, "30min")), 11,
    ),
    "a shop, every day": (days_of_steps(pd.date_range("2024-01-02", periods=30), "8h", 12, "1h"), 12),
    "three times a day": (
        days_of_steps(DAILY, "7h", 2, "5h").union(days_of_steps(DAILY, "19h30min", 1, "1h")), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NIGHTS)
def test_nights_are_absent(kind, tmp_path):
    """From evening to morning is a step, and so is a weekend; holidays and other rows that lack are missing numbers."""
    dates, season = NIGHTS[kind]
    rows = len(dates) - 40
    assert forecast(dates[:rows], 40) == (list(dates[rows:]), season)
    assert forecast(dates[:rows].delete([20, 21, 41]), 40)[0] == list(dates[rows:])
    assert len(collection("fill", a=dates[:rows].delete([20, 21, 41])).series[0]) == len(
        collection(a=dates[:rows]).series[0]
    )
    one = pd.DataFrame({"unique_id": "a", "ds": dates, "y": np.random.default_rng(0).normal(size=len(dates))})
    model = Frames(2, layer="lru", dim=4, steps=1, sequence_length=9).fit(one[:rows])
    model.save(tmp_path)
    assert Frames.load(tmp_path).update(one[rows:-2]).predict()["ds"].tolist() == list(dates[-2:])


SAID = ["SME", "SMS", "2B", "h", "W-WED", "ME", pd.DateOffset(months=2), pd.offsets.Hour(5), "LWOM-MON"]


@pytest.mark.parametrize("freq", SAID, ids=str)
def test_a_user_says_the_frequency(freq):
    """Of one row, of times that pandas infers nothing from, and of irregular times."""
    freq = pd.offsets.LastWeekOfMonth(weekday=0) if freq == "LWOM-MON" else freq
    dates = pd.date_range("2024-01-31", periods=30 + AHEAD, freq=freq)
    for rows, ahead in ((30, AHEAD), (2, 1)):
        assert forecast(dates[:rows], ahead, freq=freq)[0] == list(dates[rows : rows + ahead])
    irregular = dates[[0, 3, 4, 9, 11, 12, 17]]
    assert forecast(irregular, 5, freq=freq)[0] == list(dates[18:23])


RANDOM = pd.Timestamp("2024-01-01") + pd.to_timedelta([0, 1, 5, 6, 9, 14, 15, 17, 22], unit="h")
UNKNOWN = "of series 'a' have no frequency that can be inferred"
HOURS = pd.date_range("2024-10-26", periods=60, freq="h", tz="Europe/Berlin")
REFUSED = {  # times, freq, message
    "one row": (DAILY[:1], None, UNKNOWN),
    "a week that is not": (["2024-W53", "2025-W01"], None, "is '2024-W53' in row 1, expected a week of the calendar"),
    "two rows": (DAILY[:2], None, UNKNOWN),
    "irregular times": (RANDOM, None, UNKNOWN),
    "irregular numbers": ([0.0, 1.0, 2.5, 7.0], None, UNKNOWN),
    "hours of work": (DAILY[:1].append(pd.date_range("2024-01-02 08:00", periods=60, freq="h")), None, UNKNOWN),
    "half a month": (pd.date_range("2024-01-31", periods=20, freq="SME"), None, UNKNOWN),
    "months of other days": (DAILY[[0, 29]].append(pd.date_range("2024-03-02", periods=9, freq="MS")), None, UNKNOWN),
    "twice": (DAILY.insert(4, DAILY[4]), None, "two rows of series 'a' have the same time 'ds'"),
    "hours that are there twice": (
        HOURS.tz_localize(None), None,
        "if the clock goes back there, write times in UTC; it is 2024-10-27 02",
    ),
    "two readings": (
        ["01/02/2020", "01/03/2020"], None,
        "is '01/02/2020' in row 1, which is 2 January or 1 February; write times as 2024",
    ),
    "two readings with points": (["01.12.2020 10:00", "01.12.2020 11:00"], None, "which is 12 January or 1 December"),
    "readings that exclude each other": (["13/01/2020", "01/13/2020"], None, "several time zones or formats"),
    "years of two digits": (
        ["20/01/02", "20/01/03"], None,
        "is '20/01/02' in row 1, expected a year of four digits",
    ),
    "no dates": (["12:30", "12:45"], None, "is '12:30' in row 1, expected a year of four digits"),
    "text in a row": (
        ["2024-01-01", "soon"], None,
        "is 'soon' in row 2, expected a time; write times as 2024-12-31 23:59",
    ),
    "numbers and text": ([1, "2024"], None, "is 1 in row 1, expected a time"),
    "truth": ([True, False], None, "is no column of times"),
    "infinite": ([1.0, np.inf], None, "is inf in row 2, expected a finite number"),
    "no alias": (DAILY, "often", "freq is 'often', expected a frequency of pandas: h, D, B"),
    "no step forward": (DAILY, "-1D", "freq is '-1D', expected a frequency of pandas"),
    "a number for dates": (DAILY, 3, "freq is 3, expected a frequency of pandas"),
    "dates for numbers": (
        np.arange(9), "D",
        "freq is 'D', expected a number above 0 because the times are numbers",
    ),
    "another frequency": (
        DAILY, "h",
        "freq is 'h', expected none because the times have another frequency: 2024-01-01",
    ),
    "another beginning": (DAILY, "W-MON", "expected none because the times have another frequency"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_certain_is_refused(kind):
    times, freq, message = REFUSED[kind]
    with pytest.raises(ScanlError, match=message) as error:
        forecast(times, freq=freq)
    assert "\n" not in str(error.value)


def collection(gaps=None, **parts):
    pieces = [
        pd.DataFrame({"id": name, "ds": dates, "y": np.arange(len(dates)) * 1.0}) for name, dates in parts.items()
    ]
    frame = pd.concat(pieces, ignore_index=True)
    source = Table(["frame"], "forecast", "y", time="ds", series="id", gaps=gaps)
    return source.collect(source.without_gaps(frame, Path("frame"))[0], Path("frame"))


def test_series_have_their_own_dates():
    """Weeks begin on other days; a series of one row is like another one whose dates it fits; a step differs."""
    frame = pd.DataFrame({"unique_id": ["a"] * 9 + ["b"] * 9 + ["c"], "y": np.arange(19.0)})
    weeks = [pd.date_range(f"2024-01-0{day}", periods=12, freq="7D") for day in (1, 3)]
    frame["ds"] = [*weeks[0][:9], *weeks[1][:9], weeks[1][3]]
    model = Frames(3, layer="lru", dim=4, steps=1).fit(frame)
    assert model.predict()["ds"].tolist() == [*weeks[0][9:], *weeks[1][9:], *weeks[1][4:7]]
    assert model._table.collection.series[0].spans is None
    mixed = collection(a=DAILY, b=pd.date_range("2024-01-01", periods=40, freq="h"))
    assert mixed.season == 1
    assert mixed.series[0].spans is not None


def test_absent_dates_are_filled_by_the_calendar():
    for alias in ("ME", "BQE", "B", "7D"):
        dates = pd.date_range("2022-01-31", periods=40, freq=alias)
        (one,) = collection(a=dates.delete([7, 20, 21])).series
        assert one.spans is None
        expected = dates.as_unit("us").asi8 / 1e6
        np.testing.assert_array_equal(one.times, expected)
        assert np.flatnonzero(np.isnan(one.target[:, 0])).tolist() == [7, 20, 21]


@pytest.mark.parametrize(("step", "rows", "season"), [
    ("10ms", 600, 1), ("s", 2000, 1), ("h", 47, 1), ("h", 48, 24), ("D", 13, 1), ("D", 14, 7), ("B", 9, 1),
    ("B", 10, 5), ("MS", 23, 1), ("MS", 24, 12), ("W-TUE", 103, 1), ("W-TUE", 104, 52), ("50min", 600, 1),
    ("100D", 90, 1),
])  # fmt: skip
def test_a_season_is_at_most_half_of_the_table(step, rows, season):
    dates = pd.date_range("2024-01-01", periods=rows, freq=step)
    assert collection(a=dates).season == season


def test_business_days_are_compared_with_the_same_day_of_the_week():
    """Numbers that repeat from week to week have a naive error of zero, and the naive forecast is exact."""
    dates = pd.date_range("2024-01-01", periods=100, freq="B")
    y = dates.day_of_week * 10.0
    source = Table(["frame"], "forecast", "y", time="ds", horizon=5)
    frame = pd.DataFrame({"ds": dates, "y": y})
    source.collection = source.collect(frame, Path("frame"))
    assert source.asking.season == 5
    assert season_errors(y.to_numpy()[:, None], source.asking.season)[0] == 0
    median = source.asking.naive([(0, 0, 79)])[0, :, 0, 5]
    assert median.tolist() == y[80:85].tolist()


def test_a_long_season_needs_no_memory():
    """A forecast of two steps from a history of a million costs two steps."""
    y = np.arange(1_000_000.0)[:, None]
    found = naive(y, 400_000, 2, np.zeros(1), (0.5,))
    assert found[:, 0, 0].tolist() == [600_000.0, 600_001.0]
    frame = pd.DataFrame({"unique_id": "a", "ds": DAILY, "y": 1.0})
    for season in (30, 10**9):
        with pytest.raises(ConfigError, match=f"season is {season}, expected less than 30, steps of"):
            Frames(3, season=season).fit(frame)
    long = Frames(3, season=29, layer="lru", dim=4, steps=1, sequence_length=8).fit(frame)
    assert long._table.asking.season == 29
    assert long.model is not None
    assert long.model.lags.lags == 8  # a window of training has no more values


def test_durations_of_another_table_are_in_steps_of_training():
    """Irregular times: the step of the first table is 1 s, and the other one's are 4 s."""
    source = Table(["frame"], "forecast", "y", time="ds")
    first = pd.DataFrame({"ds": [0.0, 1.0, 2.0, 3.0, 7.5, 8.5], "y": 1.0})
    other = pd.DataFrame({"ds": [0.0, 4.0, 8.0, 13.0], "y": 1.0})
    training = source.collect(first, Path("frame"))
    later = source.collect(other, Path("frame"), training)
    assert training.series[0].spans.tolist() == [1, 1, 1, 1, 4.5, 1]
    assert later.series[0].spans.tolist() == [1, 4, 4, 5]


def test_a_frequency_needs_times():
    with pytest.raises(ConfigError, match="freq is 'D', expected none without a column of times: --time COLUMN"):
        Table(["frame"], "forecast", "y", freq="D")


def test_frames_of_another_form():
    good = pd.DataFrame({"unique_id": "a", "ds": DAILY, "y": 1.0})
    twice = pd.concat([good, good[["y"]]], axis=1)
    for wrong, message in (
        (good[:0], "frames: df has no rows, expected a row for each step of a series"),
        ([1.0, 2.0], "frames: df is of type list, expected a DataFrame of pandas"),
        (twice, "frames: df has two columns called 'y'; rename one"),
    ):
        with pytest.raises(DataError, match=message):
            Frames(3).fit(wrong)
    with pytest.raises(ConfigError, match="unknown option of Frames 'layers'; did you mean 'layer'"):
        Frames(3, layers="lru")
    ids = pd.concat([good.assign(unique_id=7), good.assign(unique_id="7")])
    with pytest.raises(DataError, match="frames: df: column 'unique_id' has '7' as a number and as text; write one"):
        Frames(3).fit(ids)
