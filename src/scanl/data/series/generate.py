"""Beginnings of series in a table, from which a model generates the next steps, and files of the generated steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.series.columns import column, grouped
from scanl.data.series.rows import SeriesRows
from scanl.data.series.series import Series, continued
from scanl.data.series.table import Table
from scanl.data.series.times import form_of, written
from scanl.files import written_whole

ENDINGS = (".csv", ".npy")


@dataclass
class Opening:
    """The beginning of a series, and the known columns of the N steps that a model generates after it.

    batch: one row of the T steps that a model reads; what is known ahead of N - 1 + H steps more.   after: the rows of
    the N steps, with names and times.
    """

    batch: Batch
    after: Any


def openings(table: Table, path: Path | None, prompt: int | None, steps: int, freq: str | None = None) -> list[Opening]:
    """Return the opening of each series of a table. Raises DataError for a table that does not fit.

    path: another table with the same columns as the table of training; None: the table of training.   prompt: how many
    rows of each series are its beginning; None: all rows; 0: no row, and then the first step that is read has missing
    numbers. Of the beginning at most the last `sequence_length` rows are read.   steps: N.   freq: frequency of the
    steps after the last row, as in `Table`; None: that of the table.
    """
    path = path or table.path
    frame, training = table.read(path), table.collection
    form = None if table.time is None else form_of(column(frame, path, table.time, "the time"))
    frame, _ = table.without_idle(frame, path, training)
    frame, _ = table.without_gaps(frame, path, training)
    freq = table.freq if freq is None else freq
    longer = continued(frame, path, table.roles, steps, after=prompt, freq=freq, known=training.known)
    collection = table.collect(longer, path, training)
    result = []
    for member, (_, places) in zip(collection.series, grouped(longer, path, table.series_columns), strict=True):
        rows = len(member) - steps
        now = rows if prompt is None else min(prompt, rows)
        begin = max(0, now - table.length)
        series, count = (member, now - begin) if now else (_with_nothing_before(member), 1)
        ahead = steps - 1 + table.horizon
        flat, rows = SeriesRows([series], ahead), (begin + np.arange(count))[None]
        batch = Batch(flat.columns(rows, ahead), None)
        after = longer.iloc[places[now : now + steps]][table.roles.keys].reset_index(drop=True)
        if table.time is not None:
            after[table.time] = written(after[table.time], form)
        result.append(Opening(batch, after))
    return result


def _with_nothing_before(series: Series) -> Series:
    """Return a series with a row before it in which all numbers are missing."""
    nothing = {name: np.insert(getattr(series, name), 0, np.nan, axis=0) for name in ("target", "past", "future")}
    return replace(series, **nothing, spans=None if series.spans is None else np.insert(series.spans, 0, 1.0))


def write_series(path: Path, openings: list[Opening], numbers: NDArray[np.float64], names: list[str]) -> None:
    """Write numbers (series, N, C) of the targets `names`: .csv, one row a step, or .npy, as they are."""
    import pandas as pd

    with written_whole(path) as temporary:
        if path.suffix.lower() == ".npy":
            with temporary.open("wb") as file:
                np.save(file, numbers)
            return
        frames = [
            opening.after.assign(**dict(zip(names, values.T, strict=True)))
            for opening, values in zip(openings, numbers, strict=True)
        ]
        pd.concat(frames, ignore_index=True).to_csv(temporary, index=False)
