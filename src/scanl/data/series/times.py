"""The times of a table: dates and numbers, read from a column without a guess."""

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
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
QUARTER = r"\d{4}([- ]?)([Qq])[1-4]"
QUARTER_FIRST = r"([Qq])[1-4]([- /]?)\d{4}"
MONTH = r"\d{4}M\d{2}"
WEEK = r"\d{4}([- ]?)W\d{2}(?:(-?)([1-7]))?"  # of ISO 8601, or with a space
ISO = r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d(:\d\d)?([.]\d+)?(Z|[+-]\d\d(:?)\d\d)?"
TEXTS = (  # forms of dates that pandas does not guess
    *("%Y", "%YM%m", "%Y-%m", "%Y/%m", "%m/%Y"),
    *("%Y %b", "%Y %B", "%b %Y", "%B %Y", "%Y-%b", "%b-%Y"),
)
COMPARED_ROWS = 200  # times of a column that are compared with how a form writes them
ZERO_PATTERN = r"(?<![\d:.])0(?=\d)"  # the zero before a day, a month or an hour that many programs leave out
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
    or Q1 2024), weeks of ISO 8601 (2024-W05 or 2024 W05) and periods of pandas are the dates with which they begin.
    Times with offsets that change, as in summer, are compared in UTC, and their days go by the clock on the wall;
    later times have the last offset.
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
        values = _of_repeated_text(values, who)
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

    if isinstance(values.dtype, pd.PeriodDtype):
        return f"period {str(values.dtype)[len('period[') : -1]}"
    if pd.api.types.is_integer_dtype(values) or pd.api.types.is_float_dtype(values):
        numbers = values.to_numpy(dtype=np.float64)
        for form, (least, end) in DIGITS.items():
            if _of_digits(values) is not None and ((numbers >= least) & (numbers < end)).all():
                return f"number {form}"
        unit = _since_1970(values)
        return None if unit is None else f"since {unit}"
    if not len(values) or not values.map(type).eq(str).all():
        return None
    dates = _of_repeated_text(values, "")
    rows = np.unique(np.linspace(0, len(values) - 1, COMPARED_ROWS).round().astype(np.int64))
    values, dates = values.iloc[rows], dates.iloc[rows]
    for form in _forms(values.iloc[0]):
        texts = written(dates, form)
        if texts is not dates and (texts.to_numpy() == values.to_numpy()).all():
            return None if form == "text %Y-%m-%d" else form
    return None


def _forms(text: str) -> Iterator[str]:
    """Yield forms in which a date may be written, as `form_of` returns them."""
    from pandas.tseries.api import guess_datetime_format

    if (match := re.fullmatch(QUARTER, text)) is not None:
        yield f"text %Y{match[1]}{match[2]}%q"
    if (match := re.fullmatch(QUARTER_FIRST, text)) is not None:
        yield f"text {match[1]}%q{match[2]}%Y"
    if (match := re.fullmatch(WEEK, text)) is not None:
        yield f"text %G{match[1]}W%V{match[2] + '%u' if match[3] else ''}"
    if (match := re.fullmatch(ISO, text)) is not None:
        mark, seconds, fraction, zone, colon = match.groups()
        digits = 0 if fraction is None else 3 if len(fraction) <= 4 else 6
        parts = "minutes" if seconds is None else {0: "seconds", 3: "milliseconds", 6: "microseconds"}[digits]
        yield f"iso {mark}{parts} {zone if zone in (None, 'Z') else f'+{colon}'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a day that is no month
        guessed = [guess_datetime_format(text, dayfirst=day_first) for day_first in (False, True)]
    for form in (*TEXTS, *filter(None, guessed)):
        yield f"text {form}"
        yield f"bare {form}"


def written(dates: Any, form: str | None) -> Any:
    """Return a Series of dates in the form of a column, as `form_of` says it."""
    if form is None:
        return dates
    style, _, how = form.partition(" ")
    if style == "iso":
        return dates.map(lambda date: _iso(date, how))
    if not hasattr(dates, "dt"):
        return dates
    if style == "period":
        return dates.dt.to_period(how)
    if style == "since":
        return dates.dt.as_unit("ns").astype("int64") // (10**9 // SINCE_1970[how])
    texts = (dates.dt.to_period("Q") if "%q" in how else dates).dt.strftime(how)
    if style == "bare":
        return texts.str.replace(ZERO_PATTERN, "", regex=True)
    return texts.astype("int64") if style == "number" else texts


def as_dates(values: Any, form: str | None) -> Any:
    """Return times as dates if all are text of this form, in which a day may be no month; else return them as given."""
    import pandas as pd

    style, _, how = (form or "").partition(" ")
    if style not in ("text", "bare") or "%d" not in how or not values.map(type).eq(str).all():
        return values
    dates = pd.Series(pd.to_datetime(values, format=how, errors="coerce"))
    return values if dates.isna().any() else dates


def _iso(date: datetime, how: str) -> str:
    """Return a date as ISO 8601 has it. how: the mark before the hours, the smallest part, and that of a zone."""
    parts, _, zone = how[1:].partition(" ")
    text = date.isoformat(how[0], parts)
    if zone == "Z":
        return text.removesuffix("+00:00") + "Z"
    return text[:-3] + text[-2:] if zone == "+" else text


def _of_repeated_text(values: Any, who: str) -> Any:
    """Return what `_of_text` returns, read once for each text: several series have the same times."""
    import pandas as pd

    if 2 * values.nunique() <= len(values):
        codes, texts = pd.factorize(values)
        with suppress(DataError):  # which names a row, and so needs them all
            return _of_text(pd.Series(texts), who).take(codes).set_axis(values.index)
    return _of_text(values, who)


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
        days = values.str.replace("[- ]", "", regex=True) + np.where(values.str.contains(r"W\d{2}$"), "1", "")
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
