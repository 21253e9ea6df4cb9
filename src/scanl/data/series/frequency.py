"""The frequency of times: the distance of each step from the previous one, by the calendar of pandas or by a number."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.series.times import Times
from scanl.errors import ConfigError, DataError

DAY = 86400.0
WEEK = 7 * DAY
YEAR = 365.25 * DAY
MONTH = YEAR / 12
CYCLES = (DAY, WEEK, YEAR)  # of the calendar
MAX_ABSENT_SHARE = 0.1  # of all steps are absent at most from times whose frequency is inferred
SLACK = 1e-3  # of a step, by which a time may be beside it
MIN_DAYS = 3  # with the same times, from which nights are absent
ROUGH = 0.1  # the same for months that begin by no rule

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Frequency:
    """The distance of one step from the next.

    seconds: mean length of a step; for times that are numbers, in their unit.   offset: offset of pandas, on the clock
    on the wall; None for steps that all last `seconds`.   moments: microseconds after midnight of the steps of a day,
    where nights are absent; the offset is that of the days.   wall: whether steps of `seconds` go by the clock on the
    wall, so that a day has 23 or 25 hours where the clock changes.   slack: fraction of a step by which a time may
    differ from a step of the calendar.
    """

    seconds: float
    offset: Any = None
    moments: tuple[int, ...] = ()
    wall: bool = False
    slack: float = SLACK

    @property
    def exact(self) -> bool:
        """Whether the times of further steps are known."""
        return self.slack < ROUGH

    @property
    def week(self) -> str:
        """The days of the week of an offset of days, from Monday, as 1111100."""
        import pandas as pd

        monday = pd.Timestamp("2024-01-01")
        return "".join(str(int(self.offset.is_on_offset(monday + pd.Timedelta(days=day)))) for day in range(7))

    def like(self, seconds: float) -> bool:
        """Whether a step is as long as another frequency's step."""
        return abs(self.seconds - seconds) <= SLACK * seconds

    def counts(self, times: Times) -> Counts | None:
        """Return how many steps each time is after the first one; None if one of them is no step."""
        if self.offset is None:
            marks = times.walls if self.wall else times.marks
            steps = np.diff(marks) / (self.seconds * times.per_second)
            rounded = steps.round()
            if (abs(steps - rounded) > self.slack).any() or (rounded < 1).any():
                return None
            return np.concatenate([[0], rounded.cumsum()]).astype(np.int64)
        wall = times.wall
        if (wall[-1] - wall[0]).total_seconds() > 20 * len(wall) * self.seconds + YEAR:
            return None  # nearly all steps would be absent
        counts = self._grid(wall[0], end=wall[-1]).get_indexer(wall)
        return None if (counts < 0).any() or counts[0] else counts.astype(np.int64)

    def season(self, steps: int) -> int:
        """Return the steps of a season of the calendar in a series of `steps`; 1 if there is no season.

        It is the first of day, week and year that has two steps or more, if there are two of it. Days and weeks that
        are no whole number of steps are passed over; years that are nearly none are too.
        """
        counts = [cycle / self.seconds for cycle in CYCLES] if not self.moments else [len(self.moments)]
        for cycle, count in zip(CYCLES, counts, strict=False):
            beside = abs(count - round(count)) / count
            if count > 2 - SLACK and beside <= (0.02 if cycle == YEAR else SLACK):
                return round(count) if 2 * round(count) <= steps else 1
        return 1

    def longer_season(self, season: int, steps: int) -> int:
        """Return the steps of the next longer cycle of the calendar, if there are two of it in `steps`; 1 for none."""
        for cycle in CYCLES if not self.moments else ():
            count = cycle / self.seconds
            if round(count) > season and abs(count - round(count)) / count <= (0.02 if cycle == YEAR else SLACK):
                return round(count) if 2 * round(count) <= steps else 1
        return 1

    def _grid(self, start: Any, **until: Any) -> Any:
        """Return the steps of the calendar from `start`: up to `end`, or at least so many `periods`."""
        import pandas as pd

        if not self.moments:
            return _dated(start, self.offset, **until)
        if "periods" in until:
            until = {"periods": until["periods"] // len(self.moments) + 2}
        days = _dated(start.normalize(), self.offset, **until).to_numpy()
        grid = pd.DatetimeIndex((days[:, None] + np.array(self.moments, "m8[us]")).reshape(-1)).as_unit(start.unit)
        return grid[(grid >= start) & (grid <= until.get("end", grid[-1]))]

    def between(self, times: Times, counts: Counts, absent: Counts) -> Any:
        """Return the times of absent steps, which are counted as `counts` counts the times that are there."""
        if self.offset is not None:
            return times.at_walls(self._grid(times.wall[0], end=times.wall[-1])[absent])
        marks = times.walls if self.wall else times.marks
        inner = np.interp(absent, counts, marks - marks[0])
        inner = marks[0] + (_whole(inner) if np.issubdtype(marks.dtype, np.integer) else inner)
        return times.at_walls(_dates(inner, times)) if self.wall and times.dates else times.at(inner)

    def after(self, times: Times, steps: int) -> Any:
        """Return the times of the steps that follow the last time. Raises DataError for times beyond 64 bits."""
        import pandas as pd

        beyond = DataError(
            f"table: the {steps} steps after {times.at(times.marks[-1:])[0]} are beyond the times of 64 bits; count "
            "times from a later one"
        )
        if self.offset is not None:
            last = times.wall[-1]
            try:
                dates = self._grid(last, periods=steps + 1)
            except (pd.errors.OutOfBoundsDatetime, OverflowError) as error:
                raise beyond from error
            return times.at_walls(dates[dates > last][:steps])
        marks = times.walls if self.wall else times.marks
        counts, ahead = self.counts(times), np.arange(1, steps + 1)
        if counts is None or not counts[-1]:
            further = self.seconds * times.per_second * ahead
        elif np.issubdtype(marks.dtype, np.integer):
            step, remainder = divmod(marks[-1] - marks[0], counts[-1])  # the product of all would overflow
            further = step * ahead + (remainder * ahead / counts[-1]).round().astype(np.int64)
        else:  # the mean step: a step that is written with few digits adds up
            further = (marks[-1] - marks[0]) * ahead / counts[-1]
        following = marks[-1] + (_whole(further) if times.dates or (further == further.round()).all() else further)
        if not np.isfinite(further).all() or (following <= np.append(marks[-1:], following[:-1])).any():
            raise beyond
        if not np.issubdtype(following.dtype, np.integer):
            following = np.array([float(f"{mark:.15g}") for mark in following])
        return times.at_walls(_dates(following, times)) if self.wall and times.dates else times.at(following)


def _whole(marks: NDArray[Any]) -> NDArray[np.int64]:
    return marks.round().astype(np.int64)


def _dates(walls: NDArray[np.int64], times: Times) -> Any:
    return Times(walls, walls, times.unit).wall


def _dated(start: Any, offset: Any, **until: Any) -> Any:
    return _dates_from(start, offset, start.unit, **until)


@lru_cache(maxsize=16)  # series of a panel have the same times
def _dates_from(start: Any, offset: Any, unit: Any, **until: Any) -> Any:
    import pandas as pd

    return pd.date_range(start, freq=offset, unit=unit, **until)


def parsed(freq: Any, times: Times) -> Frequency:
    """Return the user's frequency: for dates an alias or an offset of pandas, else a number.

    Raises ConfigError for any other value.
    """
    import pandas as pd

    if not times.dates:
        try:
            step = float(freq)
        except (TypeError, ValueError):
            step = 0.0
        if not 0 < step < float("inf"):
            raise ConfigError(f"table: freq is {freq!r}, expected a number above 0 because the times are numbers")
        return Frequency(step)
    wrong = ConfigError(f"table: freq is {freq!r}, expected a frequency of pandas: h, D, B, W-MON, MS, ME, QE, ...")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            offset = pd.tseries.frequencies.to_offset(freq)
    except (TypeError, ValueError, AttributeError, Warning) as error:
        raise wrong from error
    if offset is None or offset.n < 1:
        raise wrong
    if isinstance(offset, pd.offsets.Day):
        return Frequency(offset.n * DAY, wall=True)
    if isinstance(offset, pd.offsets.Tick):
        return Frequency(offset.nanos / 1e9)
    return Frequency(_mean(offset), offset)


@lru_cache(maxsize=64)
def _mean(offset: Any) -> float:
    """Return the mean length of a step in seconds."""
    import pandas as pd

    # 420 steps are whole weeks for each number of days of business, and 35 years of months.
    dates = _dated(pd.Timestamp("2000-01-01").as_unit("us"), offset, periods=421)
    return (dates[-1] - dates[0]).total_seconds() / 420


def frequencies(
    series_times: Sequence[Times],
    freq: Any = None,
    max_absent: float = MAX_ABSENT_SHARE,
    known: Sequence[Frequency] = (),
) -> list[Frequency | None]:
    """Return the frequency of the times of each series; None where it cannot be inferred.

    freq: the frequency of all series; None: infer it.   max_absent: fraction of the steps that may be absent.
    known: frequencies that are tried first. A series that is too short has the frequency of another series on whose
    steps its times are. Raises ConfigError when the times have another frequency than the user says.
    """
    if freq is not None:
        frequency = parsed(freq, series_times[0])
        for times in series_times:
            _refuse_other(freq, frequency, times)
        return [frequency] * len(series_times)
    result: list[Frequency | None] = [None] * len(series_times)
    candidates = list(known)
    for i in sorted(range(len(series_times)), key=lambda i: -len(series_times[i])):
        complete = (candidate for candidate in candidates if _has(candidate, series_times[i], max_absent))
        frequency = result[i] = next(complete, None) or inferred(series_times[i], max_absent)
        if frequency is not None and frequency not in candidates:
            candidates.append(frequency)
    for i, frequency in enumerate(result):
        if frequency is None:
            exact = (candidate for candidate in candidates if candidate.exact)
            result[i] = next((other for other in exact if other.counts(series_times[i]) is not None), None)
    return result


def _refuse_other(freq: Any, frequency: Frequency, times: Times) -> None:
    """Raise ConfigError for times that have another frequency than the user's."""
    counts = frequency.counts(times)
    if counts is not None and (len(counts) < 2 or np.median(np.diff(counts)) == 1):
        return
    other = inferred(times)
    if other is not None and other.exact:
        first, second = times.at(times.marks[:2])
        raise ConfigError(
            f"table: freq is {freq!r}, expected none because the times have another frequency: {first}, {second}, ..."
        )


def inferred(times: Times, max_absent: float = MAX_ABSENT_SHARE) -> Frequency | None:
    """Return the frequency at which at most the fraction `max_absent` of the steps is absent; None if there is none.

    One at which few are absent is preferred.
    """
    if len(times) < (3 if times.dates else 2) or (np.diff(times.marks) <= 0).any():
        return None
    limits = {min(MAX_ABSENT_SHARE, max_absent): None, max_absent: None}
    for limit, frequency in ((limit, frequency) for limit in limits for frequency in _candidates(times)):
        counts = frequency.counts(times)
        if counts is None:
            continue
        total = int(counts[-1]) + 1
        if total - len(times) <= limit * total and np.median(np.diff(counts)) == 1:
            return frequency
    return None


def _has(frequency: Frequency, times: Times, max_absent: float) -> bool:
    """Whether times have every step of another series' frequency; if nights are absent, nearly every one."""
    counts = frequency.counts(times)
    if counts is None:
        return False
    total = int(counts[-1]) + 1
    return total - len(counts) <= (max_absent * total if frequency.moments else 0)


def _candidates(times: Times) -> Iterator[Frequency]:
    """Yield frequencies, the most specific first."""
    step = _middle(times.marks) / times.per_second
    if not times.dates:
        yield Frequency(step)
        return
    yield from _by_calendar(times.wall)
    wall_step = _middle(times.walls) / times.per_second
    days = round(wall_step / DAY)
    if days and abs(wall_step - days * DAY) <= SLACK * wall_step:
        yield Frequency(days * DAY, wall=True)
    yield Frequency(step)
    yield Frequency(wall_step, wall=True)
    yield from _without_nights(times.wall)
    if wall_step > 0.9 * MONTH:
        yield Frequency(round(wall_step / MONTH) * MONTH, wall=True, slack=ROUGH)


def _middle(marks: NDArray[Any]) -> Any:
    steps = np.diff(marks)
    return np.partition(steps, len(steps) // 2)[len(steps) // 2]


def _by_calendar(wall: Any) -> Iterator[Frequency]:
    """Yield the frequency that pandas infers, and offsets that fit if some dates are absent."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3.1 announces another type of the result
        offset = None if (np.diff(wall.asi8) <= 0).any() else pd.infer_freq(wall)
    offset = None if offset is None else pd.tseries.frequencies.to_offset(offset)
    if offset is not None and not isinstance(offset, pd.offsets.Tick | pd.offsets.Day | pd.offsets.Week):
        yield Frequency(_mean(offset), offset)
    months = int(_middle(wall.year.to_numpy() * 12 + wall.month.to_numpy()))
    if months > 0:
        day = 31 if wall.is_month_end.all() else int(wall.day.max())
        yield Frequency(months * MONTH, pd.DateOffset(months=months, day=day))
        yield Frequency(months * MONTH, pd.offsets.BMonthBegin(months))
        yield Frequency(months * MONTH, pd.offsets.BMonthEnd(months))
    if (days := _days_of(wall)) is not None:
        yield Frequency(_mean(days), days)


def _days_of(wall: Any) -> Any:
    """Return the offset of the days of the week that dates have; None if they have every one, or by chance not."""
    import pandas as pd

    days = set(wall.day_of_week)
    if not 1 < len(days) < 7:
        return None
    first, last = wall[0].normalize(), wall[-1].normalize()
    passed = np.bincount(pd.date_range(first, last).day_of_week.to_numpy(), minlength=7)
    skipped = min(int(passed[day]) for day in range(7) if day not in days)
    if days == set(range(5)) and skipped:
        return pd.offsets.BDay()
    mask = "".join(str(int(day in days)) for day in range(7))
    return pd.offsets.CustomBusinessDay(weekmask=mask) if skipped > 1 else None  # once may be by chance


def _without_nights(wall: Any) -> Iterator[Frequency]:
    """Yield the frequency of days that have the same times, and nights without any."""
    import pandas as pd

    after_midnight = (wall - wall.normalize()).as_unit("us").asi8
    moments, dates = np.unique(after_midnight), wall.normalize().nunique()
    gaps = np.diff([*moments, moments[0] + DAY * 1e6])
    if dates < MIN_DAYS or not 1 < len(moments) * dates < 2 * len(wall) or np.ptp(gaps) < SLACK * gaps.max():
        return
    yield of_days(_days_of(wall) or pd.offsets.Day(), moments.tolist())


def of_days(days: Any, moments: Sequence[int]) -> Frequency:
    """Return the frequency of steps at some moments of some days: an offset, or the week from Monday as 1111100."""
    import pandas as pd

    days = pd.offsets.CustomBusinessDay(weekmask=days) if isinstance(days, str) else days
    return Frequency(_mean(days) / len(moments), days, tuple(moments))
