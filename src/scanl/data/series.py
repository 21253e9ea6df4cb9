"""Series of a user's table: their numbers by role, checked, with covariates of the calendar."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.columns import (
    DAY,
    Numbers,
    column,
    grouped,
    labels,
    moments,
    moments_after,
    numbers,
    refuse_overlap,
    times,
)
from scanl.errors import DataError

MONTH = 30.4375 * DAY
CYCLES = (DAY, 7 * DAY, 365.25 * DAY)  # of the calendar: day, week, year


@dataclass
class Series:
    """One series of n steps. Missing numbers are NaN.

    target: (n, C) numbers, or (n,) classes, -1 where missing.   past: (n, P).   static: (S,).   future: (n, F).
    spans: (n,) durations of the steps, in units of the usual one; None where all last the same.   times: (n,).
    """

    name: str
    target: NDArray[Any]
    past: Numbers
    static: Numbers
    future: Numbers
    spans: Numbers | None
    times: Numbers

    def __len__(self) -> int:
        return len(self.target)


@dataclass
class Collection:
    """All series of a table.

    classes: names of the classes, in the order of their numbers; empty for numbers.   season: steps of a season, as the
    calendar says; 1 where it says nothing.   said: what a user should know.   cycles: number of cycles of the calendar
    that are covariates.
    """

    each: list[Series]
    classes: list[str]
    season: int
    said: str
    cycles: int = 0


def series_of(
    frame: Any,
    path: Path,
    *,
    target: Sequence[str],
    classes: bool,
    time: str | None,
    series: str | None,
    static: Sequence[str],
    past: Sequence[str],
    future: Sequence[str],
    cycles: int | None = None,
) -> Collection:
    """Take the series out of a table, and check them. Raises DataError for a table that cannot be learnt from.

    classes: whether the target is one of a few classes.   cycles: how many cycles of the calendar become covariates;
    None: those of which the table has at least two.   The other arguments are names of columns.
    """
    single = [("the time", [time] if time else []), ("the series", [series] if series else [])]
    covariates = [("a static covariate", static), ("a covariate of the past", past), ("a future covariate", future)]
    refuse_overlap(path, [("the target", target), *single, *covariates])
    names: list[str] = []
    if classes:
        names, answers = labels(frame, path, target[0])
    else:
        answers = _stack([numbers(frame, path, name, "the target") for name in target], len(frame))
    before = _stack([numbers(frame, path, name, "a covariate") for name in past], len(frame))
    known = _stack([numbers(frame, path, name, "a covariate") for name in future], len(frame))
    constant = _constants(frame, path, static)
    when, calendar = (np.arange(len(frame), dtype=np.float64), False) if time is None else times(frame, path, time)
    groups = grouped(frame, path, series)
    for name, rows in groups:
        _check(path, name, time, when[rows], constant[rows], static, answers[rows])
    step, regular = _usual_step([when[rows] for _, rows in groups])
    if time is None:
        regular = True
    longest = max(float(np.ptp(when[rows])) for _, rows in groups)
    able = [cycle for cycle in CYCLES if calendar and cycle >= 2 * step]
    there = sum(longest >= 2 * cycle for cycle in able) if cycles is None else cycles
    turns = [2 * np.pi * when / cycle for cycle in able[:there]]
    known = np.column_stack([known, *(wave(turn) for turn in turns for wave in (np.sin, np.cos))])
    season = next((round(cycle / step) for cycle in able), 1)
    each = []
    for name, rows in groups:
        spans: Numbers | None = None if regular else np.diff(when[rows], prepend=when[rows][0] - step) / step
        each.append(Series(name, answers[rows], before[rows], constant[rows[0]], known[rows], spans, when[rows]))
    return Collection(each, names, season, _said(each, answers, len(turns), regular), len(turns))


def continued(
    frame: Any, path: Path, steps: int, *, time: str | None, series: str | None, constant: Sequence[str]
) -> Any:
    """Return a table with `steps` further rows of each series, whose times go on as before.

    The columns in `constant` keep their value there, and all others are missing. The table is in the order of series.
    """
    import pandas as pd

    when = None if time is None else moments(frame, path, time)[0]
    pieces = []
    for _, rows in grouped(frame, path, series):
        part = frame.iloc[rows]
        more = {name: part[name].iloc[-1] for name in (*constant, series) if name is not None}
        if when is not None:
            part, more = (
                part.assign(**{str(time): when.iloc[rows]}),
                more | {time: moments_after(when.iloc[rows], steps)},
            )
        pieces += [part, pd.DataFrame(more, index=range(steps), columns=frame.columns)]
    return pd.concat(pieces, ignore_index=True)


def filled(
    frame: Any, path: Path, *, time: str, series: str | None, constant: Sequence[str], most: float
) -> tuple[Any, int]:
    """Return a table with a row for each step that is absent from regular times, and the number of these rows.

    In the new rows the columns in `constant` keep their value, and all others are missing. The table stays as it is
    when no step is absent, when times go back, when some steps are not a multiple of the usual one, or when more than
    the fraction `most` of all rows would be new. Raises DataError when `most` is 1 and more than nine tenths of the
    rows would be new.
    """
    import pandas as pd

    seconds, calendar = times(frame, path, time)
    groups = grouped(frame, path, series)
    if any((np.diff(seconds[rows]) <= 0).any() for _, rows in groups):
        return frame, 0
    step, regular = _usual_step([seconds[rows] for _, rows in groups])
    if regular:
        return frame, 0
    slack = 0.1 if calendar and step > 0.9 * MONTH else 1e-3
    steps = [np.diff(seconds[rows]) / step for _, rows in groups]
    counts = [np.round(each).astype(int) for each in steps]
    if any((count < 1).any() or (abs(count - each) > slack).any() for count, each in zip(counts, steps, strict=True)):
        return frame, 0
    absent = int(sum((count - 1).sum() for count in counts))
    if absent > most * (len(frame) + absent):
        return frame, 0
    if absent > 9 * len(frame):
        raise DataError(
            f"table: {path}: {absent:,} steps are absent from the times {time!r}, expected at most nine times the "
            f"{len(frame):,} that are there; give --gaps durations"
        )
    when, pieces = moments(frame, path, time)[0], []
    frame = frame.assign(**{time: when})
    for (_, rows), count in zip(groups, counts, strict=True):
        part = frame.iloc[rows]
        pieces.append(part)
        for gap in np.flatnonzero(count > 1):
            one, last = (when.iloc[rows[place]] for place in (gap, gap + 1))
            new = [one + (last - one) * (k / count[gap]) for k in range(1, count[gap])]
            more = {name: part[name].iloc[gap] for name in (*constant, series) if name is not None}
            index = part.index[gap] + np.arange(1, count[gap]) / count[gap]  # between those of its neighbours
            pieces.append(pd.DataFrame({**more, time: new}, index=index, columns=frame.columns))
    whole = pd.concat([piece.astype(object) for piece in pieces]).sort_index(kind="stable")
    kinds = {name: kind for name, kind in frame.dtypes.items() if name in (time, series, *constant)}
    return whole.astype(kinds).infer_objects().reset_index(drop=True), absent


def _stack(columns: list[Numbers], rows: int) -> Numbers:
    return np.column_stack(columns) if columns else np.zeros((rows, 0))


def _constants(frame: Any, path: Path, names: Sequence[str]) -> Numbers:
    """Return the static covariates: numbers as they are, text as one column of 0 and 1 for each value."""
    import pandas as pd

    found = []
    for name in names:
        given = column(frame, path, name, "a static covariate")
        if pd.api.types.is_numeric_dtype(given):
            found.append(numbers(frame, path, name, "a static covariate"))
        else:
            kinds, rows = labels(frame, path, name)
            found += [(rows == i) * 1.0 for i in range(len(kinds))]
    return _stack(found, len(frame))


def _check(
    path: Path, name: str, time: str | None, when: Numbers, constant: Numbers, static: Sequence[str], answers: Any
) -> None:
    of = f" of series {name!r}" if name else ""
    steps = np.diff(when)
    if (steps == 0).any():
        raise DataError(f"table: {path}: two rows{of} have the same time {time!r}; name the series: --series COLUMN")
    if (steps < 0).any():
        row = int((steps < 0).argmax()) + 2
        raise DataError(f"table: {path}: the times {time!r}{of} go back in its row {row}; sort the table by time")
    if len(constant) and not ((constant == constant[0]) | np.isnan(constant)).all():
        raise DataError(
            f"table: {path}: a static covariate changes{of}, expected one value because it is among {list(static)}"
        )
    missing = (answers < 0).all() if answers.ndim == 1 else np.isnan(answers).all(0).any()
    if missing:
        raise DataError(f"table: {path}: the target{of} has no value at all; leave that series out")


def _usual_step(each: list[Numbers]) -> tuple[float, bool]:
    """Return the median step of the times, and whether all are alike: equal to it, or months, quarters or years."""
    steps = np.concatenate([np.diff(when) for when in each])
    if not len(steps):
        return 1.0, True
    usual = float(np.median(steps))
    spread = float(np.abs(steps - usual).max()) / usual
    months = usual / MONTH
    return usual, spread < 1e-3 or (months > 0.9 and spread < 0.1)


def _said(each: list[Series], answers: Any, cycles: int, regular: bool) -> str:
    missing = float((answers < 0).mean() if answers.ndim == 1 else np.isnan(answers).mean())
    parts = [f"{len(each)} series of {min(map(len, each)):,} to {max(map(len, each)):,} steps"]
    parts += [f"{missing:.1%} of the target is missing"] if missing else []
    parts += ["times are irregular: durations are an input"] if not regular else []
    parts += [f"{cycles} cycles of the calendar"] if cycles else []
    return ", ".join(parts)
