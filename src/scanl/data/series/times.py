"""The times of a table: dates and numbers, read from a column without a guess."""

import re
import warnings
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.series.columns import column
from scanl.errors import DataError

PER_SECOND = {"us": 1_000_000, "ns": 1_000_000_000}
YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)|^\d{8}")  # without one, a parser takes parts of the date from today
YEAR_FIRST = re.compile(r"\s*\d{4}")
QUARTER = r"\d{4}([- ]?)[Qq][1-4]"
QUARTER_FIRST = r"[Qq][1-4]([- /]?)\d{4}"
MONTH = r"\d{4}M\d{2}"
WEEK = r"\d{4}(-?)W\d{2}(?:-?([1-7]))?"  # of ISO 8601
OFFSET = r"(?:Z|[+-]\d\d:?\d\d)$"
WRITE = "write times as 2024-12-31 23:59"
DIGITS = {"%Y%m%d": (18000101, 22000101), "%Y%m": (180001, 220001)}  # whole numbers that are dates, by their format
SINCE_1970 = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # whole numbers from 1990 to 2100 in these units are dates
SPAN_OF_DATES = (631152000, 4102444800)  # 1990 and 2100, in seconds since 1970


@dataclass(frozen=True)
class Times:
    """The times of n rows: dates or numbers.

    marks: (n,) integers or floating-point numbers. Dates are counted from 1970 in UTC.   walls: the same by the clock
    on the wall; without a time zone they are `marks`.   unit: "us" or "ns" for dates, None for numbers.   zone: time
    zone of dates, or None.   own_unit: unit of the dates in the column.
    """

    marks: NDArray[Any]
    walls: NDArray[Any]
    unit: str | None = None
    zone: Any = None
    own_unit: str = "us"

    def __len__(self) -> int:
        return len(self.marks)

    def __getitem__(self, rows: Any) -> "Times":
        return replace(self, marks=self.marks[rows], walls=self.walls[rows])

    @property
    def dates(self) -> bool:
        """Whether the times are dates."""
        return self.unit is not None

    @property
    def per_second(self) -> int:
        """How many marks a second has; 1 for numbers."""
        return 1 if self.unit is None else PER_SECOND[self.unit]

    @property
    def wall(self) -> Any:
        """The dates by the clock on the wall, as an index of pandas."""
        import pandas as pd

        return pd.DatetimeIndex(self.walls.view(f"M8[{self.unit}]"))

    def at(self, marks: NDArray[Any]) -> Any:
        """Return other marks as times of pandas, or as numbers."""
        import pandas as pd

        if self.unit is None:
            return marks
        dates = pd.DatetimeIndex(marks.astype(np.int64).view(f"M8[{self.unit}]"))
        return self._own(dates if self.zone is None else dates.tz_localize("UTC").tz_convert(self.zone))

    def at_walls(self, walls: Any) -> Any:
        """Return other dates of the clock on the wall in the time zone.

        Where the clock goes back, an hour that is there twice is the first one. Where clocks go forward, a time that
        does not exist is the next one that does.
        """
        if self.zone is None:
            return self._own(walls)
        return self._own(walls.tz_localize(self.zone, ambiguous=np.ones(len(walls), bool), nonexistent="shift_forward"))

    def _own(self, dates: Any) -> Any:
        short = dates.as_unit(self.own_unit)
        return short if (short == dates).all() else dates


def times(frame: Any, path: Path, name: str) -> tuple[Any, Times]:
    """Return the times of a column as a Series of pandas, dates or numbers, and as `Times`.

    Whole numbers of eight digits are dates, YYYYMMDD, and of six digits months, YYYYMM. Seconds, milliseconds,
    microseconds and nanoseconds since 1970 are dates if all are whole numbers from 1990 to 2100. Quarters (2024Q1
    or Q1 2024), weeks of ISO 8601 (2024-W05) and periods of pandas are the dates with which they begin. Times
    with offsets that change, as in summer, are compared in UTC, and their days go by the clock on the wall; later
    times have the last offset.
    Raises DataError for what is neither a number nor a time, for a missing time, and for dates that may be read in two
    ways, such as 01/02/2020.
    """
    import pandas as pd

    values = column(frame, path, name, "the time")
    who = f"table: {path}: column {name!r}"
    if values.isna().any():
        raise DataError(f"{who} is missing in row {int(values.isna().argmax()) + 1}")
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(values.cat.categories.dtype)
    if isinstance(values.dtype, pd.PeriodDtype):
        values = values.dt.to_timestamp()
    if pd.api.types.is_integer_dtype(values) or pd.api.types.is_float_dtype(values):
        dates = _of_digits(values)
        if dates is None:
            return values, _of_numbers(values, who)
        values = dates
    elif not pd.api.types.is_datetime64_any_dtype(values):
        values = _of_text(values, who)
    if values.dtype == object:
        in_utc = pd.DatetimeIndex(pd.to_datetime(values, utc=True)).as_unit("us")
        walls = pd.DatetimeIndex([time.replace(tzinfo=None) for time in values]).as_unit("us")
        return values, Times(in_utc.asi8, walls.asi8, "us", values.iloc[-1].tzinfo)
    index = pd.DatetimeIndex(values)
    unit = "ns" if index.unit == "ns" else "us"
    marks = index.as_unit(unit)
    walls = marks if index.tz is None else marks.tz_localize(None)
    return values, Times(marks.asi8, walls.asi8, unit, index.tz, index.unit)


def _of_numbers(values: Any, who: str) -> Times:
    import pandas as pd

    is_integer = pd.api.types.is_integer_dtype(values)
    marks = values.to_numpy(dtype=np.int64 if is_integer else np.float64)
    if not np.isfinite(marks).all():
        row = int((~np.isfinite(marks)).argmax())
        raise DataError(f"{who} is {marks[row]:g} in row {row + 1}, expected a finite number")
    return Times(marks, marks)


def _of_digits(values: Any) -> Any:
    """Return the dates of whole numbers such as 20241231 and 202412; None if they are other numbers."""
    import pandas as pd

    numbers = values.to_numpy(dtype=np.float64)
    for form, (least, end) in DIGITS.items():
        if ((numbers == numbers.round()) & (numbers >= least) & (numbers < end)).all():
            dates = pd.to_datetime(values.astype("int64").astype(str), format=form, errors="coerce")
            return None if dates.isna().any() else dates
    unit = _since_1970(values)
    return None if unit is None else pd.to_datetime(values.astype("int64"), unit=unit)


def _since_1970(values: Any) -> str | None:
    """Return the unit in which whole numbers are dates since 1970; None if they are none."""
    numbers = values.to_numpy(dtype=np.float64)
    for unit, per_second in SINCE_1970.items():
        least, end = (bound * per_second for bound in SPAN_OF_DATES)
        if ((numbers == numbers.round()) & (numbers >= least) & (numbers < end)).all():
            return unit
    return None


def form_of(values: Any) -> str | None:
    """Return how a column writes its dates, in words that `written` reads; None if it is as pandas writes them."""
    import pandas as pd
    from pandas.tseries.api import guess_datetime_format

    if isinstance(values.dtype, pd.PeriodDtype):
        return f"period {str(values.dtype)[len('period[') : -1]}"
    if pd.api.types.is_integer_dtype(values) or pd.api.types.is_float_dtype(values):
        numbers = values.to_numpy(dtype=np.float64)
        for form, (least, end) in DIGITS.items():
            if _of_digits(values) is not None and ((numbers >= least) & (numbers < end)).all():
                return f"number {form}"
        unit = _since_1970(values)
        return None if unit is None else f"since {unit}"
    if len(values) and values.map(type).eq(str).all():
        if (match := re.fullmatch(QUARTER, values.iloc[0])) is not None:
            return f"quarter {match[1]}"
        if (match := re.fullmatch(QUARTER_FIRST, values.iloc[0])) is not None:
            return f"first {match[1]}"
        if (match := re.fullmatch(WEEK, values.iloc[0])) is not None:
            return f"text %G{match[1]}W%V{match[1] + '%u' if match[2] else ''}"
        for form, pattern in (("%Y-%m", r"\d{4}-\d{2}"), ("%Y", r"\d{4}"), ("%YM%m", MONTH)):
            if values.str.fullmatch(pattern).all():
                return f"text {form}"
        if re.search("[A-Za-z]{3}", values.iloc[0]) is None:  # without a month's name many can be read in two ways
            return None
        for form in filter(None, ("%B %Y", "%b %Y", guess_datetime_format(values.iloc[0]))):
            dates = pd.to_datetime(values, format=form, errors="coerce")
            if dates.notna().all() and (dates.dt.strftime(form) == values).all():
                return f"text {form}"
    return None


def written(dates: Any, form: str | None) -> Any:
    """Return a Series of dates in the form of a column, as `form_of` says it."""
    if form is None or not hasattr(dates, "dt"):
        return dates
    style, _, how = form.partition(" ")
    if style == "period":
        return dates.dt.to_period(how)
    if style == "since":
        return dates.dt.as_unit("ns").astype("int64") // (10**9 // SINCE_1970[how])
    if style == "quarter":
        return dates.dt.year.astype(str) + how + "Q" + dates.dt.quarter.astype(str)
    if style == "first":
        return "Q" + dates.dt.quarter.astype(str) + how + dates.dt.year.astype(str)
    texts = dates.dt.strftime(how)
    return texts.astype("int64") if style == "number" else texts


def _of_text(values: Any, who: str) -> Any:
    """Return the dates of a column of text, or of objects of Python. Raises DataError when it is not certain."""
    import pandas as pd

    text = values.map(type).eq(str).all()
    if text and values.str.fullmatch(QUARTER).all():
        return pd.Series(pd.PeriodIndex(values.str.replace("[- ]", "", regex=True), freq="Q").to_timestamp())
    if text and values.str.fullmatch(QUARTER_FIRST).all():
        turned = values.str[-4:] + "Q" + values.str[1]
        return pd.Series(pd.PeriodIndex(turned, freq="Q").to_timestamp())
    if text and values.str.fullmatch(MONTH).all():
        values = values.str.replace("M", "-")
    if text and values.str.fullmatch(WEEK).all():
        days = values.str.replace("-", "") + np.where(values.str.fullmatch(r"\d{4}-?W\d{2}"), "1", "")
        dates = pd.to_datetime(days, format="%GW%V%u", errors="coerce")
        if dates.isna().any():
            row = int(dates.isna().argmax())
            raise DataError(f"{who} is {values.iloc[row]!r} in row {row + 1}, expected a week of the calendar")
        return dates
    if (several := _with_offsets(values, text)) is not None:
        return several
    if not text and not values.map(lambda value: isinstance(value, date)).all():
        raise _no_times(values, who)
    certain = not text or values.str.match(YEAR_FIRST).all()
    dates = [_parsed(values, False)] if certain else [_parsed(values, False), _parsed(values, True)]
    dates = [way for way in dates if way is not None]
    if not dates:
        raise _no_times(values, who)
    if text and not values.str.contains(YEAR).all():
        row = int((~values.str.contains(YEAR)).argmax())
        raise DataError(f"{who} is {values.iloc[row]!r} in row {row + 1}, expected a year of four digits; {WRITE}")
    if len(dates) == 2 and not dates[0].equals(dates[1]):
        row = int((dates[0] != dates[1]).argmax())
        one, other = (f"{way.iloc[row].day} {way.iloc[row].month_name()}" for way in dates)
        raise DataError(f"{who} is {values.iloc[row]!r} in row {row + 1}, which is {one} or {other}; {WRITE}")
    return dates[0]


def _with_offsets(values: Any, text: bool) -> Any:
    """Return times as objects of Python if they have several offsets from UTC, else None."""
    if text:
        if not values.str.contains(OFFSET).all() or values.str.extract(f"({OFFSET})")[0].nunique() < 2:
            return None
        try:
            values = values.map(datetime.fromisoformat)
        except ValueError:
            return None
    elif not values.map(lambda value: isinstance(value, datetime) and value.tzinfo is not None).all():
        return None
    return values.astype(object) if values.map(lambda value: value.utcoffset()).nunique() > 1 else None


def _parsed(values: Any, day_first: bool) -> Any:
    """Return the dates that pandas reads with the month or the day first, or None."""
    import pandas as pd

    for form in ("ISO8601", None) if not day_first else (None,):
        try:
            with warnings.catch_warnings():  # of formats that are not alike, or have the day first
                warnings.simplefilter("ignore")
                return pd.Series(pd.to_datetime(values, format=form, dayfirst=day_first))
        except (ValueError, TypeError, OverflowError):
            continue
    return None


def _no_times(values: Any, who: str) -> DataError:
    """Return the error for a column that pandas does not read."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dates = pd.to_datetime(values.astype(str), format="mixed", utc=True, errors="coerce")
    if dates.isna().all():
        return DataError(f"{who} is no column of times; write them as 2024-12-31 23:59")
    if dates.isna().any():
        row = int(dates.isna().argmax())
        return DataError(f"{who} is {values.iloc[row]!r} in row {row + 1}, expected a time; {WRITE}")
    offsets = sorted(set(values.astype(str).str.extract(r"([+-]\d\d:?\d\d)$")[0].dropna()))
    if len(offsets) > 1:
        zones = f"{who} has times of several time zones: {', '.join(offsets)}"
        return DataError(f"{zones}; write all in UTC, or local days without an offset")
    return DataError(f"{who} has times of several time zones or formats; write all alike")
