"""The steps that follow the rows of series: their times, what is known of them, and what is read before them."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.series.columns import column, grouped, numbers
from scanl.data.series.rows import SeriesRows
from scanl.data.series.series import check_order, continued
from scanl.data.series.table import Table
from scanl.data.series.times import Times, times
from scanl.errors import ConfigError, DataError

HOUR = 3600.0  # seconds
NEWER = "\0newer"  # a column that numbers newer rows from 1; no file has this name

LastRow = tuple[int, int]  # of a forecast: number of a series, and the last row that is read


class Outlook:
    """A table, the H steps after its rows, and the windows that a model reads to forecast them.

    A window has at most the last `sequence_length` rows before the forecast, as the windows by which a run is measured.

    table: the source of training, which has the roles of the columns and H.   frame, path: rows of these columns, and
    the file that messages name.   future: a table with the covariates of the H steps after the last rows, and its
    path.   freq: frequency of these steps, as in `Table`; None: as in the rows. Texts that training does not have are
    a warning.
    """

    def __init__(
        self, table: Table, frame: Any, path: Path, future: tuple[Any, Path] | None = None, freq: Any = None
    ) -> None:
        training, self.table = table.collection, table
        like = replace(training, idle={}) if NEWER in frame.columns else training  # newer rows are asked for
        frame, idle = table.without_idle(frame, path, like)
        frame, _ = table.without_gaps(frame, path, training)
        freq = table.freq if freq is None else freq
        frame = continued(frame, path, table.roles, table.horizon, freq=freq, known=training.known)
        self.frame = frame if future is None else with_known(table, frame, *future)
        self.collection = table.collect(self.frame, path, training)
        self.collection.idle = idle
        for note in self.collection.notes:
            warnings.warn(note, stacklevel=2)
        table.check_answers(self.collection)
        self.places = [rows for _, rows in grouped(self.frame, path, table.series_columns)]
        self._rows = SeriesRows(self.collection.series, table.horizon)

    @property
    def last(self) -> list[LastRow]:
        """The origin after all rows of each series."""
        return [(i, len(rows) - self.table.horizon - 1) for i, rows in enumerate(self.places)]

    @property
    def newer(self) -> list[LastRow]:
        """The origin after each row that `joined` has marked, in the order of these rows."""
        marks = self.frame[NEWER].to_numpy(np.float64)
        at = {
            marks[rows[row]]: (i, row)
            for i, rows in enumerate(self.places)
            for row in np.flatnonzero(~np.isnan(marks[rows])).tolist()
        }
        return [at[mark] for mark in sorted(at)]

    def batches(self, origins: Sequence[LastRow]) -> Iterator[tuple[list[int], Batch]]:
        """Yield the windows that end at some origins, equal lengths together, and the origins' numbers."""
        read = [(i, min(self.table.length, row + 1), row) for i, row in origins]
        for which, rows in self._rows.ending(read):
            yield which, Batch(self._rows.columns(rows, self.table.horizon), None)

    def steps(self, origin: LastRow) -> NDArray[np.int64]:
        """Return the rows of `frame` that are the H steps after an origin."""
        i, row = origin
        return self.places[i][row + 1 : row + 1 + self.table.horizon]


def joined(table: Table, newer: Any, path: Path, past: Any = None) -> Any:
    """Return newer rows, marked, behind the rows that the table of training has before them.

    past: the rows before them; None: the table of training.

    A newer row replaces the one that its series has at its time; rows are in the order of their times. In front of the
    first newer row at most `sequence_length` rows follow. They are left out if they ended longer ago. Newer times are
    in the time zone of the table. Without a column of times newer rows are those after the table.
    Raises DataError when a column is lacking, when times of a series go back or are equal, or when the times of the two
    tables cannot be compared.
    """
    import pandas as pd

    for role, names in table.roles.titles:
        for name in names:
            column(newer, path, name, role)
    for name in (*table.targets, *table.covariates, *table.future):
        if name not in table.collection.categories:
            numbers(newer, path, name, "a number in training")
    past, time = table.read(table.path) if past is None else past, table.time
    rows_of = dict(grouped(past, table.path, table.series_columns))
    groups = grouped(newer, path, table.series_columns)
    begin = -table.length if time is None else 0
    old = np.concatenate([np.zeros(0, np.int64), *(rows_of[name][begin:] for name, _ in groups if name in rows_of)])
    past, reference = past.iloc[old].reset_index(drop=True), past if len(past) else table.read(table.path)
    newer = newer.assign(**{NEWER: np.arange(1.0, len(newer) + 1)})
    if time is None:
        return pd.concat([past, newer], ignore_index=True) if len(past) else newer.reset_index(drop=True)
    newer, clock = in_zone(newer, path, reference, table.path, time)
    if not len(past):
        return newer.reset_index(drop=True)
    past = past.copy(deep=False)
    past[time], past_clock = times(past, table.path, time)
    reach, now, then = table.collection.step * table.length, seconds(clock), seconds(past_clock)
    at = {}
    for name, rows in groups:
        check_order(path, name, time, clock[rows])
        at[name] = now[rows]
    keep = np.zeros(len(past), bool)
    for name, rows in grouped(past, table.path, table.series_columns):
        first = at[name].min()
        earlier = rows[then[rows] < first][-table.length :]
        keep[earlier] = len(earlier) > 0 and first - then[earlier].max() <= reach
        later = rows[then[rows] >= first]
        keep[later] = ~np.isin(then[later], at[name])
    if not keep.any():
        return newer.reset_index(drop=True)
    both = pd.concat([past[keep], newer], ignore_index=True)
    series = np.zeros(len(both), np.int64)
    for number, (_, rows) in enumerate(grouped(both, path, table.series_columns)):
        series[rows] = number
    return both.iloc[np.lexsort((np.concatenate([then[keep], now]), series))].reset_index(drop=True)


def in_zone(frame: Any, path: Path, past: Any, past_path: Path, time: str) -> tuple[Any, Times]:
    """Return rows, whose times are in the time zone of earlier ones, and these times.

    Offsets from UTC that are an hour apart are those of summer and winter, and stay.
    Raises DataError when the times cannot be compared.
    """
    frame, past_clock = frame.copy(deep=False), times(past, past_path, time)[1]
    frame[time], clock = times(frame, path, time)
    refuse_other_times(past_clock, past_path, clock, path, time)
    offset, past_offset = _fixed(clock.zone), _fixed(past_clock.zone)
    summer = bool(offset and past_offset) and abs((offset or 0) - (past_offset or 0)) == HOUR
    if past_clock.zone is not None and str(clock.zone) != str(past_clock.zone) and not summer:
        import pandas as pd

        frame[time] = pd.Series(pd.to_datetime(frame[time], utc=True)).dt.tz_convert(past_clock.zone)
        clock = times(frame, path, time)[1]
    return frame, clock


def _fixed(zone: Any) -> float | None:
    """Return the offset of a time zone from UTC in seconds; None for a zone with summer and winter, and for no zone."""
    offset = None if zone is None else zone.utcoffset(None)
    return None if offset is None else offset.total_seconds()


def with_known(table: Table, frame: Any, known: Any, path: Path) -> Any:
    """Return a table whose last H rows in each series have the covariates of another table with the same times.

    Without a column of times they are the first H rows of the series there. Raises DataError for a row that is lacking.
    """
    steps = table.horizon
    for name in table.future:
        column(known, path, name, "a future covariate")
    groups = dict(grouped(known, path, table.series_columns))
    now = then = np.zeros(0)
    clock = past_clock = None
    if table.time is not None:
        clock, past_clock = times(known, path, table.time)[1], times(frame, table.path, table.time)[1]
        refuse_other_times(past_clock, table.path, clock, path, table.time)
        now, then = seconds(past_clock), seconds(clock)
    targets, sources = [], []
    for name, rows in grouped(frame, table.path, table.series_columns):
        there, ahead = groups.get(name, np.zeros(0, np.int64)), rows[-steps:]
        if clock is None or past_clock is None:
            lacking = "" if len(there) >= steps else f"step {len(there) + 1}"
            there = there[:steps]
        else:
            at = dict(zip(then[there].tolist(), there.tolist(), strict=True))
            if len(at) < len(there):
                check_order(path, name, str(table.time), clock[there[np.argsort(then[there], kind="stable")]])
            absent = [row for row in ahead.tolist() if now[row] not in at]
            lacking = str(past_clock.at(past_clock.marks[absent[:1]])[0]) if absent else ""
            there = np.array([at.get(when, -1) for when in now[ahead].tolist()], np.int64)
        if lacking:
            of = f" of series {name!r}" if name else ""
            raise DataError(
                f"table: {path} has no row at {lacking}{of}, expected one at each of the {steps} steps that follow "
                f"because the model reads {', '.join(table.future)} ahead; add these rows"
            )
        targets.append(ahead)
        sources.append(there)
    frame, to, of_known = frame.copy(deep=False), np.concatenate(targets), np.concatenate(sources)
    for name in table.future:
        values = frame[name].to_numpy(object, copy=True)
        values[to] = known[name].to_numpy(object)[of_known]
        frame[name] = values
    return frame.infer_objects()


def seconds(clock: Times) -> NDArray[np.float64]:
    """Return the times as numbers, dates as seconds from 1970 in UTC to the microsecond."""
    return (clock.marks // (clock.per_second // 1_000_000) / 1e6) if clock.dates else clock.marks.astype(np.float64)


def refuse_other_times(past: Times, past_path: Path, clock: Times, path: Path, time: str) -> None:
    """Raise DataError unless the times of two tables can be compared."""
    described, expected = (
        "numbers" if not times.dates else "dates without a time zone" if times.zone is None else "dates of a time zone"
        for times in (clock, past)
    )
    if described != expected:
        raise DataError(
            f"table: {path}: the times {time!r} are {described}, expected {expected} because of {past_path}"
        )


def refuse_known(table: Table, future: Any) -> None:
    """Raise ConfigError when covariates of the steps ahead are lacking, or when the model reads none."""
    names = ", ".join(table.future)
    if table.future and future is None:
        raise ConfigError(
            f"forecast: future_data is none, expected a table with {names} at the {table.horizon} steps after the end "
            f"because the run was trained with --future {names}; give --future-data PATH"
        )
    if future is not None and not table.future:
        raise ConfigError("forecast: future_data is given, but the run reads no covariates ahead; leave it out")
