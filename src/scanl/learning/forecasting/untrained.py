"""Forecasts of a table by the model that is in the package: nothing is trained (`scanl forecast TABLE`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scanl.data.series.columns import Numbers, grouped, is_text, numbers, read_table, rows_of_lines, unread
from scanl.data.series.frequency import Frequency
from scanl.data.series.outlook import LastRow, Outlook
from scanl.data.series.series import Series, check_order
from scanl.data.series.table import Table
from scanl.data.series.times import Times, as_dates, form_of, times, written
from scanl.data.splits import Piece
from scanl.errors import DataError
from scanl.learning.forecasting.answer_columns import STEP, STREAM, bounds, check_levels, refuse_twice
from scanl.models.forecasting.pretrained import PretrainedForecaster, PretrainedState, pretrained_forecaster

MAX_STEPS = 2048  # steps of a series before its forecast that are read
PIECE_ROWS = 64  # series that are read side by side
ROWS_OF_STREAM = 256  # rows of a stream that are read at once, if they are there
NAMES_OF_TIMES = (
    "ds",
    "date",
    "datetime",
    "time",
    "timestamp",
    "year",
    "month",
    "quarter",
    "week",
    "day",
    "hour",
    "period",
)


@dataclass
class HistoryTable(Table):
    """A table, all rows of which are the history that a forecast reads."""

    def divide(self, series: Sequence[Series]) -> list[list[Piece]]:
        return [[(i, 0, len(member)) for i, member in enumerate(series)], [], []]


def seasons_of(table: Table) -> tuple[int, int]:
    """Return the steps of a table's season, and of the next longer one of the calendar; 1 for none."""
    first = table.season or table.collection.season
    return first, table.collection.longer_season(first)


def guessed(path: Path, target: str | None, time: str | None, series: str | None) -> tuple[str, str | None, str | None]:
    """Return the columns of target, time and series of a table; those that are None are guessed.

    One column of times, one of other numbers, and one of names where times repeat are unambiguous. Raises DataError for
    a table where a target, or a column of names, could be several.
    """
    frame = read_table(path)
    free = [name for name in frame.columns if name not in (target, time, *(series or "").split(","))]
    free = [name for name in free if name not in unread(frame) or name.lower() in NAMES_OF_TIMES]
    if time is None:
        able = [name for name in free if _is_time(frame, path, name)]
        if len(able) > 1:
            raise DataError(f"forecast: time is none, expected one of {', '.join(able)}; give --time COLUMN")
        time = able[0] if able else None
        free = [name for name in free if name != time]
    if target is None:
        able = [name for name in free if not is_text(frame[name])]
        if len(able) != 1:
            of = f"one of {', '.join(able)}" if able else "a column of numbers, which the table does not have"
            raise DataError(f"forecast: target is none, expected {of}; give --target COLUMN")
        target = able[0]
        free = [name for name in free if name != target]
    if series is None and time is not None and frame[time].duplicated().any():
        able = [name for name in free if is_text(frame[name]) and not frame.duplicated([name, time]).any()]
        if len(able) != 1:
            of = f"one of {', '.join(able)}" if able else "columns whose values name a series"
            raise DataError(f"forecast: series is none, expected {of} because times repeat; give --series COLUMN")
        series = able[0]
    assert target is not None
    return target, time, series


def _is_time(frame: Any, path: Path, name: str) -> bool:
    import pandas as pd

    values = frame[name]
    if pd.api.types.is_bool_dtype(values) or values.isna().any():
        return False
    if pd.api.types.is_numeric_dtype(values):
        return form_of(values) is not None or name.lower() in NAMES_OF_TIMES
    try:
        times(frame, path, name)
    except DataError:
        return False
    return True


@dataclass
class UntrainedForecasts:
    """Forecasts of the steps after a table by the pretrained model.

    table: its columns, calendar and frequency.   seasons: as `seasons_of` returns them.   form: how times are written,
    as `form_of` returns it.
    """

    model: PretrainedForecaster
    table: Table
    seasons: tuple[int, int]
    form: str | None = None

    @classmethod
    def of(cls, table: HistoryTable) -> "UntrainedForecasts":
        form = None if table.time is None else form_of(table.read(table.path)[table.time])
        return cls(pretrained_forecaster(), table, seasons_of(table), form)

    def after(self, levels: Sequence[float] | None = None, freq: Any = None) -> Any:
        """Return the forecast after the last row of each series as a frame, as `scanl forecast` writes it.

        levels: per cents of the intervals; None: 80 and 95.   freq: frequency of the steps; None: as in the table.
        """
        levels = self.check(levels)
        table = self.table
        outlook = Outlook(table, table.read(table.path), table.path, freq=freq)
        return self.frame(outlook, outlook.last, table.horizon, levels)

    def dated(self, frame: Any) -> Any:
        """Return rows, whose times are dates where they are written as in the table."""
        time = self.table.time
        return frame if time is None else frame.assign(**{time: as_dates(frame[time], self.form)})

    def check(self, levels: Sequence[float] | None, *more: str) -> tuple[float, ...]:
        """Return the levels of the intervals in per cent. Raises ConfigError for wrong ones, and for a column twice."""
        table, levels = self.table, check_levels("forecast", "quantiles", levels)
        keys = table.roles.keys + ([] if table.time else [STEP])
        refuse_twice("forecast", [*keys, *more, *(name for y in table.targets for name in (y, *bounds(y, levels)))])
        return levels

    def frame(self, outlook: Outlook, origins: Sequence[LastRow], horizon: int, levels: Sequence[float]) -> Any:
        """Return the forecasts after some origins as a frame."""
        import pandas as pd

        table = self.table
        answers = self.numbers(outlook, origins, probabilities_of(levels))
        steps = np.concatenate([outlook.steps(origin) for origin in origins])
        result = pd.DataFrame(outlook.frame.iloc[steps][table.roles.keys].reset_index(drop=True))
        if table.time is not None:
            result[table.time] = written(result[table.time], self.form)
        else:
            result[STEP] = np.tile(np.arange(1, horizon + 1), len(origins))
        for channel, target in enumerate(table.targets):
            values = answers[:, :, channel].reshape(len(origins) * horizon, -1)
            for name, one in zip((target, *bounds(target, levels)), values.T, strict=True):
                result[name] = one
        return result

    def numbers(self, outlook: Outlook, origins: Sequence[LastRow], probabilities: Sequence[float]) -> Numbers:
        """Return quantiles (n, H, C, Q) after some origins. Series of about one length are read side by side."""
        import torch

        table = self.table
        result = np.empty((len(origins), table.horizon, len(table.targets), len(probabilities)))
        lengths = np.array([min(row + 1, MAX_STEPS) for _, row in origins])
        order = np.argsort(lengths, kind="stable")
        for begin in range(0, len(order), PIECE_ROWS):
            some = order[begin : begin + PIECE_ROWS]
            windows = np.full((len(some), int(lengths[some].max()), len(table.targets)), np.nan)
            for window, number in zip(windows, some.tolist(), strict=True):
                i, row = origins[number]
                window[-lengths[number] :] = outlook.collection.series[i].target[row + 1 - lengths[number] : row + 1]
            forecast, _ = self.model.predict(
                torch.from_numpy(windows), horizon=table.horizon, season=self.seasons, levels=probabilities
            )
            result[some] = forecast.quantiles.numpy()
        return result

    def follow(self, batches: Iterable[Sequence[str]], levels: Sequence[float] | None = None) -> Iterator[Any]:
        """Yield frames with the forecasts after each row of a stream, in its order, in constant memory.

        A row is one step from the kept state of its series. Steps that are absent from regular times are missing
        numbers. Rows that are at or before the last one of their series are refused.

        batches: lines of CSV, one or more at once; the first line has the names of the columns.
        """
        levels, table = self.check(levels, "cutoff"), self.table
        streams, header, count = _Streams(self, levels), "", 0
        for batch in batches:
            header, lines = (header, batch) if header else (batch[0].removeprefix("\ufeff"), batch[1:])
            for begin in range(0, len(lines), ROWS_OF_STREAM):
                rows = rows_of_lines([header, *lines[begin : begin + ROWS_OF_STREAM]], table.names)
                yield streams.read(rows, count)
                count += len(rows)


def probabilities_of(levels: Sequence[float]) -> list[float]:
    """Return the probabilities of the median and of the bounds of intervals."""
    tails = [(1 - level / 100) / 2 for level in levels]
    return [0.5, *(p for tail in tails for p in (tail, 1 - tail))]


@dataclass
class _KeptSeries:
    """What is kept of a series: the state of the model, and its last time."""

    state: PretrainedState
    clock: Times | None
    frequency: Frequency | None


class _Streams:
    """The states of all series of a stream."""

    def __init__(self, forecasts: UntrainedForecasts, levels: Sequence[float]) -> None:
        self.forecasts, self.table, self.levels = forecasts, forecasts.table, levels
        self.kept: dict[str, _KeptSeries] = {}
        table = self.table
        known = table.collection.known
        self.frequency = known[0] if known else None
        rows = table.read(table.path)
        frame, _ = table.without_gaps(rows, table.path, table.collection)
        clock = None if table.time is None else times(frame, table.path, table.time)[1]
        values = self._values(frame, table.path)
        for name, at in grouped(frame, table.path, table.series_columns):
            self._step(name, values[at], None if clock is None else clock[at], np.zeros(0, np.int64))

    def _values(self, frame: Any, path: Path) -> Numbers:
        return np.column_stack([numbers(frame, path, name, "the target") for name in self.table.targets])

    def _step(self, name: str, y: Numbers, clock: Times | None, after: Any) -> Numbers:
        """Read rows (n, C) of a series, and return the quantiles (N, H, C, Q) after some of them."""
        model, last = self.forecasts.model, self.kept.get(name)
        state = model.init_state(y.shape[1], season=self.forecasts.seasons) if last is None else last.state
        if np.isinf(y).any():
            raise DataError(f"table: {STREAM}: a number is infinite, expected finite ones")
        answers, state = model.each(
            y.T.copy(), state, after, horizon=self.table.horizon, levels=probabilities_of(self.levels)
        )
        self.kept[name] = _KeptSeries(state, None if clock is None else clock[-1:], self.frequency)
        return answers.transpose(1, 2, 0, 3)

    def read(self, rows: Any, count: int) -> Any:
        """Return the forecasts after some rows. count: rows before them."""
        import pandas as pd

        table, horizon = self.table, self.table.horizon
        values = self._values(rows, STREAM)
        clock = None if table.time is None else times(rows, STREAM, table.time)[1]
        pieces: list[tuple[Any, Any]] = []
        for name, at in grouped(rows, STREAM, table.series_columns):
            y, ahead, after, cutoff = values[at], None, np.arange(len(at)), at + count + 1
            if clock is not None:
                assert table.time is not None
                y, grid, after = self._spread(name, y, clock[at])
                ahead = grid[(after[:, None] + 1 + np.arange(horizon)).reshape(-1)]
                cutoff = grid[after]
            answers = self._step(name, y, None if clock is None else clock[at], after).reshape(len(at) * horizon, -1)
            answers = answers.reshape(len(at) * horizon, len(table.targets), -1)
            piece = rows.iloc[np.repeat(at, horizon)][table.roles.keys].reset_index(drop=True)
            if ahead is not None:
                piece[table.time] = written(pd.Series(ahead), self.forecasts.form)
                cutoff = written(pd.Series(cutoff), self.forecasts.form)
            piece["cutoff"] = np.repeat(np.asarray(cutoff), horizon)
            if ahead is None:
                piece[STEP] = np.tile(np.arange(1, horizon + 1), len(at))
            for channel, target in enumerate(table.targets):
                for column, one in zip((target, *bounds(target, self.levels)), answers[:, channel].T, strict=True):
                    piece[column] = one
            pieces.append((np.repeat(at, horizon), piece))
        if len(pieces) == 1:
            return pieces[0][1]
        order = np.argsort(np.concatenate([at for at, _ in pieces]), kind="stable")
        return pd.concat([piece for _, piece in pieces], ignore_index=True).iloc[order]

    def _spread(self, name: str, y: Numbers, clock: Times) -> tuple[Numbers, Any, Any]:
        """Return values with a row for each absent step, all times from there to H steps after, and which rows came."""
        import pandas as pd

        table, last, frequency = self.table, self.kept.get(name), self.frequency
        assert table.time is not None
        if frequency is None or not frequency.exact:
            raise DataError(
                f"table: {table.path}: the times {table.time!r} have no frequency that can be inferred, expected one "
                "because steps follow; say it as pandas does: --freq D"
            )
        before = last.clock if last is not None and last.clock is not None else clock[:1]
        is_new = last is None or last.clock is None
        both = (
            clock
            if is_new
            else replace(
                clock,
                marks=np.concatenate([before.marks, clock.marks]),
                walls=np.concatenate([before.walls, clock.walls]),
            )
        )
        check_order(STREAM, name, table.time, both)
        counts = frequency.counts(both)
        if counts is None:
            raise DataError(
                f"table: {STREAM}: the times {table.time!r} are not on the steps of {table.path}, expected the same"
            )
        after = counts - counts[0] - (0 if is_new else 1)
        after = after if is_new else after[1:]
        spread = np.full((int(after[-1]) + 1, y.shape[1]), np.nan)
        spread[after] = y
        further = pd.Index(frequency.after(both[-1:], table.horizon))
        own = (
            pd.Index(frequency.after(before, int(after[-1]) + 1)) if not is_new else pd.Index(clock.at(clock.marks[:1]))
        )
        if is_new and len(spread) > 1:
            own = own.append(pd.Index(frequency.after(clock[:1], len(spread) - 1)))
        return spread, own.append(further), after
