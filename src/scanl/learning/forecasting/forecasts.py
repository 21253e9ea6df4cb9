"""Forecasts of the steps after a table by a trained run: `forecast`, which `scanl forecast` calls.

This module needs pandas when it is used: `pip install 'scanl[series]'`.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from scanl.data.series.columns import as_table, files_of, grouped, rows_of_lines
from scanl.data.series.outlook import NEWER, LastRow, Outlook, joined, refuse_known, seconds
from scanl.data.series.series import check_order
from scanl.data.series.table import Table
from scanl.data.series.times import as_dates, form_of, times, written
from scanl.errors import ConfigError, DataError
from scanl.learning.evaluation import trained
from scanl.learning.forecasting.answer_columns import FRAME, STEP, STREAM, bounds, check_levels, refuse_twice
from scanl.learning.run.folder import RunFolder
from scanl.models import Forecaster

ROWS_AT_A_TIME = 256  # rows of a stream that are read at once, if they are there


class Forecasts:
    """A trained forecaster, and the table of its training, whose columns, calendar and frequency it forecasts with.

    model: a `Forecaster`.   table: its source.   form: how times are written, as `form_of` returns it; None: as in the
    table.
    """

    def __init__(self, model: Forecaster, table: Table, form: str | None = None) -> None:
        one = table.collection.series[0]
        columns = [("past", one.past.shape[1]), ("static", len(one.static)), ("future", one.future.shape[1])]
        for name, count in [("targets", len(table.targets)), *columns, ("timed", one.spans is not None)]:
            if count != getattr(model, name):
                raise DataError(
                    f"table: {table.path} has {name} {count}, expected {getattr(model, name)} as in training; put back "
                    "the table of training, and name newer rows in --data"
                )
        self.model, self.table, self.form = model, table, form
        if form is None and table.time is not None:
            self.form = form_of(table.read(table.path)[table.time])

    @classmethod
    def open(cls, run: str | Path, data: Any = None) -> "Forecasts":
        """Return the forecaster of a run folder.

        data: the table of training, if it is at another path now; other data are passed over.
        Raises ConfigError for a run that does not forecast a table, or whose table is not there.
        """
        folder = RunFolder.open(run)
        table = folder.source
        if table.ask is None or not table.is_forecast:
            question, advice = ("", "") if table.ask is None else (f" to {table.ask}", "; scanl predict answers it")
            raise ConfigError(
                f"forecast: {run} was trained on {folder.config().entry.name}{question}, expected a run with "
                f"--question forecast{advice}"
            )
        table = cast(Table, table)
        if not all(file.exists() for name in table.data for file in files_of(Path(name))):
            table = _moved(folder, table, data)
        return cls(trained(folder), table)

    def rows(self, data: Any = None) -> tuple[Any, Path]:
        """Return the rows that forecasts follow, and their path.

        data: newer rows, behind the rows of the training table: a path, several, or a frame; None: the training table.
        """
        if data is None:
            return self.table.read(self.table.path), self.table.path
        newer, path = self.read(data)
        return joined(self.table, newer, path, self.dated(self.table.read(self.table.path))), path

    def read(self, data: Any) -> tuple[Any, Path]:
        """Return a table as a frame, and its path."""
        if isinstance(data, str | Path):
            return self.dated(self.table.read(Path(data), least=1)), Path(data)
        return self.dated(as_table(data, "forecast: data")), FRAME

    def dated(self, frame: Any) -> Any:
        """Return rows, whose times are dates where they are written as in the table."""
        time = self.table.time
        if time is None or time not in frame.columns:
            return frame
        return frame.assign(**{time: as_dates(frame[time], self.form)})

    def after(
        self,
        data: Any = None,
        future: Any = None,
        *,
        horizon: int | None = None,
        levels: Sequence[float] | None = None,
        freq: Any = None,
    ) -> Any:
        """Return the forecast after the last row of each series as a frame. The arguments are as in `forecast`."""
        horizon, levels = self.check(horizon, levels)
        refuse_known(self.table, future)
        rows, path = self.rows(data)
        outlook = Outlook(self.table, rows, path, None if future is None else self.read(future), freq)
        newer = outlook.frame.get(NEWER)
        origins = outlook.last
        if newer is not None:  # a series without newer rows is not forecast again
            origins = [o for o in origins if newer.iloc[outlook.places[o[0]]].notna().any()]
        return self.frame(outlook, origins, horizon, levels)

    def follow(
        self, batches: Iterable[Sequence[str]], horizon: int | None = None, levels: Sequence[float] | None = None
    ) -> Iterator[Any]:
        """Yield frames with the forecasts after each row of a stream, in its order, in constant memory.

        They are what `after` returns for the stream up to that row, with a column `cutoff`: the time of the last row of
        its series, or the row's number where rows have no times. A row replaces the one of the table with its time.

        batches: lines of CSV, one or more at once; the first line has the names of the columns.
        """
        import pandas as pd

        horizon, levels = self.check(horizon, levels, "cutoff")
        table, header, count, read = self.table, "", 0, dict[str, float]()
        if table.future:
            raise ConfigError(
                f"forecast: follow is given, expected a run without --future because a stream has no "
                f"{', '.join(table.future)} of later steps"
            )
        rows = self.dated(table.read(table.path))
        past = {name: rows.iloc[at[-table.length :]] for name, at in grouped(rows, table.path, table.series_columns)}
        # Of a stream with durations, the step that has come would tell more than is known ahead.
        size = 1 if table.collection.timed else ROWS_AT_A_TIME
        for batch in batches:
            header, lines = (header, batch) if header else (batch[0].removeprefix("\ufeff"), batch[1:])
            for begin in range(0, len(lines), size):
                newer = self.dated(rows_of_lines([header, *lines[begin : begin + size]], table.names))
                in_order = self._in_order(newer, past, read)
                for some in [newer] if in_order else [newer.iloc[[row]] for row in range(len(newer))]:
                    names = [name for name, _ in grouped(some, STREAM, table.series_columns)]
                    before = pd.concat([past[n] for n in names if n in past] or [rows[:0]])
                    both = joined(table, some, STREAM, before)
                    outlook = Outlook(table, both, STREAM)
                    origins = outlook.newer if in_order else outlook.last
                    answers = self.frame(outlook, origins, horizon, levels, cutoff=True)
                    if table.time is None:
                        answers["cutoff"] = np.repeat(np.arange(count, count + len(some)) + 1, horizon)
                    yield answers
                    count += len(some)
                    both = both.drop(columns=NEWER)
                    groups = grouped(both, STREAM, table.series_columns)
                    past |= {name: both.iloc[at[-table.length :]] for name, at in groups}

    def _in_order(self, newer: Any, past: dict[str, Any], read: dict[str, float]) -> bool:
        """Return whether newer rows of a stream come after all earlier ones. Others correct rows of the table.

        read: time of the last row of each series in the stream. Raises DataError for rows that do not come after it.
        """
        table = self.table
        if table.time is None:
            return True
        clock, after = times(newer, STREAM, table.time)[1], True
        marks = seconds(clock)
        for name, at in grouped(newer, STREAM, table.series_columns):
            check_order(STREAM, name, table.time, clock[at])
            if marks[at[0]] <= read.get(name, -np.inf):
                of, when = f" of series {name!r}" if name else "", clock.at(clock.marks[at[:1]])[0]
                raise DataError(
                    f"table: stream: the times {table.time!r}{of} go back to {when}; correct earlier rows by --data "
                    "without --follow"
                )
            read[name] = float(marks[at[-1]])
            if name in past:
                after &= marks[at[0]] > seconds(times(past[name], table.path, table.time)[1])[-1]
        return bool(after)

    def check(self, horizon: int | None, levels: Sequence[float] | None, *more: str) -> tuple[int, tuple[float, ...]]:
        """Return the number of steps and the levels of the intervals in per cent.

        Raises ConfigError for wrong ones, and when two columns would have one name. more: further columns.
        """
        table, longest = self.table, self.table.horizon
        if horizon is not None and not 1 <= horizon <= longest:
            raise ConfigError(
                f"forecast: horizon is {horizon}, expected 1 to {longest} because of the run's --horizon {longest}"
            )
        levels = check_levels("forecast", self.model.distribution, levels)
        keys = table.roles.keys + ([] if table.time else [STEP])
        refuse_twice("forecast", [*keys, *more, *(name for y in table.targets for name in (y, *bounds(y, levels)))])
        return horizon or longest, levels

    @torch.no_grad()
    def frame(
        self, outlook: Outlook, origins: Sequence[LastRow], horizon: int, levels: Sequence[float], cutoff: bool = False
    ) -> Any:
        """Return the forecasts after some origins as a frame.

        cutoff: whether there is a column `cutoff` with the time, or the number, of the last row that was read.
        """
        import pandas as pd

        table, tails = self.table, [(1 - level / 100) / 2 for level in levels]
        probabilities = [0.5, *(p for tail in tails for p in (tail, 1 - tail))]
        numbers = np.empty((len(origins), table.horizon, len(table.targets), len(probabilities)))
        for which, batch in outlook.batches(origins):
            inputs = batch.tensors(next(self.model.parameters()).device).inputs
            quantiles = self.model.predict(inputs, levels=probabilities)[0].quantiles
            numbers[which] = quantiles.cpu().numpy()
        numbers = numbers[:, :horizon].reshape(len(origins) * horizon, len(table.targets), len(probabilities))
        steps = np.concatenate([outlook.steps(origin)[:horizon] for origin in origins])
        result = outlook.frame.iloc[steps][table.roles.keys].reset_index(drop=True)
        if table.time is not None:
            result[table.time] = written(result[table.time], self.form)
        if cutoff:
            last = [outlook.places[i][row] for i, row in origins for _ in range(horizon)]
            when = None if table.time is None else outlook.frame[table.time].iloc[last].reset_index(drop=True)
            result["cutoff"] = last if when is None else written(when, self.form)
        if table.time is None:
            result[STEP] = np.tile(np.arange(1, horizon + 1), len(origins))
        for channel, target in enumerate(table.targets):
            for name, values in zip((target, *bounds(target, levels)), numbers[:, channel].T, strict=True):
                result[name] = values
        return result if isinstance(result, pd.DataFrame) else pd.DataFrame(result)


def _moved(folder: RunFolder, table: Table, data: Any) -> Table:
    """Return the table of training, which `data` has at another path. Raises DataError for another table."""
    config = folder.config()
    lost = f"forecast: the table of the run, {table.path}, does not exist"
    if not isinstance(data, str | Path):
        raise DataError(f"{lost}; put it back, or name it at its new path: --data PATH")
    config.source.data = [str(Path(data).resolve())]
    other = config.open_source()
    if other.digest() != folder.stored()[1].get("corpus"):
        raise DataError(f"{lost}, and {data} is another table; put it back, because newer rows follow its rows")
    return cast(Table, other)


def forecast(
    run: str | Path,
    data: Any = None,
    future: Any = None,
    *,
    horizon: int | None = None,
    levels: Sequence[float] | None = None,
    freq: Any = None,
) -> Any:
    """Return what follows each series of a run's table: a frame of pandas with a row for each step.

    The frame has the table's columns of names and times; for each target the median under its own name, and the bounds
    of intervals as `y-lo-80` and `y-hi-80`. A forecast reads the last `sequence_length` rows before it.

    run: folder of a run with the question "forecast".   data: newer rows, a path or a frame; they follow the table of
    training, nothing is trained, and only their series are forecast.   future: a path or a frame with the covariates
    that are known ahead, at the steps that are forecast.   horizon: steps; None: as in the run.   levels: per cents
    of the intervals; None: 80 and 95.   freq: frequency of the steps, as in `Table`; None: as in the table.
    Raises ConfigError and DataError as `scanl forecast` prints them.
    """
    return Forecasts.open(run, data).after(data, future, horizon=horizon, levels=levels, freq=freq)
