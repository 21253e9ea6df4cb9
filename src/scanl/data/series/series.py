"""Series of a user's table: their numbers by role, checked, with covariates of the calendar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanl.data.series.columns import Numbers, column, grouped, indicators, is_text, labels, numbers, refuse_overlap
from scanl.data.series.frequency import CYCLES, DAY, MAX_ABSENT_SHARE, SLACK, Counts, Frequency, frequencies
from scanl.data.series.times import Times, times
from scanl.errors import ConfigError, DataError, counted

MAX_KEYS = 6  # columns that are tried as the names of series
MAX_SHOWN_NAMES = 5  # series, or texts, that a note names


@dataclass
class Series:
    """One series of n steps. Missing numbers are NaN.

    target: (n, C) numbers, or (n,) classes, -1 where missing.   past: (n, P).   static: (S,).   future: (n, F).
    spans: (n,) durations of the steps, in units of the usual one; None where all are one step.   times: (n,); dates are
    in seconds by the clock on the wall.
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

    path: the file, for messages.   classes: names of the classes, in the order of their numbers; empty for numbers.
    season: steps of a season, by the calendar, or else by the numbers; 1 where there is none.   summary: one line for
    the user.   cycles: number of cycles of the calendar that are covariates.   step: length of the usual step; of dates
    in seconds.   known: the frequencies of the times.   idle: why series of the table are left out, by name.
    categories: the texts of each column of covariates that has texts.   unseen: texts that training does not have, by
    column.   dated: whether the times are dates.
    """

    path: Path
    series: list[Series]
    classes: list[str]
    season: int
    summary: str
    cycles: int = 0
    step: float = 1.0
    known: Sequence[Frequency] = ()
    idle: Mapping[str, str] = field(default_factory=dict)
    categories: Mapping[str, list[str]] = field(default_factory=dict)
    unseen: Mapping[str, list[str]] = field(default_factory=dict)
    dated: bool = False

    @property
    def notes(self) -> list[str]:
        """A line on the series that are left out, and one for each column with texts that training does not have."""
        reasons = [f"{name!r} {reason}" for name, reason in self.idle.items()]
        left_out = [f"table: series are left out: {_shown(reasons)}"] if reasons else []
        return left_out + [
            f"table: column {name!r} has {_shown(list(map(repr, texts)))}, which training does not have; read as none "
            "of its texts"
            for name, texts in self.unseen.items()
        ]

    @property
    def timed(self) -> bool:
        """Whether the steps have durations."""
        return self.series[0].spans is not None

    def longer_season(self, season: int) -> int:
        """Return the steps of the next longer season of the calendar; 1 for none."""
        if not self.dated or not self.known:
            return 1
        return self.known[0].longer_season(season, max(map(len, self.series)))


def _shown(texts: Sequence[str]) -> str:
    return ", ".join(
        [*texts[:MAX_SHOWN_NAMES], *([f"{len(texts) - MAX_SHOWN_NAMES} more"] if len(texts) > MAX_SHOWN_NAMES else [])]
    )


@dataclass(frozen=True)
class Roles:
    """The columns of a table, by what they are to a question.

    series: columns whose values together name a series; none: one series.   static, past, future: covariates that are
    constant over a series, known up to the present, known ahead.   classes: whether the target is one of a few classes.
    """

    target: Sequence[str]
    time: str | None = None
    series: Sequence[str] = ()
    static: Sequence[str] = ()
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    classes: bool = False

    @property
    def keys(self) -> list[str]:
        """The columns that name a row: the series and the time."""
        return [*self.series, *([] if self.time is None else [self.time])]

    @property
    def titles(self) -> list[tuple[str, Sequence[str]]]:
        """The columns that are read, by what they are in messages."""
        return [
            ("the target", self.target),
            ("the time", [] if self.time is None else [self.time]),
            ("the series", self.series),
            ("a static covariate", self.static),
            ("a covariate of the past", self.past),
            ("a future covariate", self.future),
        ]

    @property
    def constant(self) -> list[str]:
        """The columns that have one value in a series."""
        return [*self.static, *self.series]


class _Steps(NamedTuple):
    """The steps of all series. spans: durations of the steps behind the first, in units of the usual one, by series.

    regular: whether all are one step.   season, step, known: as in `Collection`.
    """

    spans: list[Numbers]
    regular: bool
    season: int
    step: float
    known: Sequence[Frequency]

    @classmethod
    def of(cls, clocks: Sequence[Times], freq: Any, like: Collection | None) -> "_Steps":
        freqs = frequencies(clocks, freq, known=like.known if like else ())
        counts, length = _counted(clocks, freqs)
        step = like.step if like else length or _usual_step(clocks)
        if counts is None:
            spans = [np.diff(clock.marks) / (step * clock.per_second) for clock in clocks]
        else:
            spans = [np.diff(steps) * (length / step) for steps in counts]
        regular = all((abs(span - 1) <= SLACK).all() for span in spans)
        known = list(dict.fromkeys(frequency for frequency in freqs if frequency is not None))
        of_calendar = known[0].season(max(map(len, clocks))) if counts is not None and clocks[0].dates else 1
        return cls(spans, regular, like.season if like else of_calendar, step, known)

    def check(self, path: Path, time: str | None, like: Collection | None) -> None:
        """Raise DataError for irregular steps, or steps of another length, where those of training are regular."""
        if like is None or like.timed or self.regular:
            return
        if any(np.ptp(span) > SLACK for span in self.spans if len(span)):
            raise DataError(f"table: {path} has irregular times {time!r}, expected regular times as in training")
        raise DataError(
            f"table: {path}: a step of the times {time!r} lasts {max(map(max, self.spans)):.4g} times as long as in "
            "the table of training, expected the same; give a table of that frequency"
        )


def series_of(
    frame: Any,
    path: Path,
    roles: Roles,
    *,
    freq: Any = None,
    holidays: str | None = None,
    like: Collection | None = None,
    answered: bool = True,
) -> Collection:
    """Take the series out of a table, and check them. Raises DataError for a table that cannot be learnt from.

    freq: frequency of the times; None: as inferred.   holidays: country whose holidays are a covariate.   like: the
    series of the table of training, which give the classes, the cycles, the season and the usual step; None: a cycle of
    the calendar counts if the table lasts for at least two of it.   answered: whether every series needs a value of the
    target.
    """
    refuse_overlap(path, roles.titles)
    classes: list[str] = []
    if roles.classes:
        classes, answers = labels(frame, path, roles.target[0], like.classes if like else None)
    else:
        answers = _stack([numbers(frame, path, name, "the target") for name in roles.target], len(frame))
    texts = _Texts({} if like is None else like.categories, like is not None)
    past, known = (texts.columns(frame, path, names, "a covariate") for names in (roles.past, roles.future))
    constant = texts.columns(frame, path, roles.static, "a static covariate")
    clock = _rows(len(frame)) if roles.time is None else times(frame, path, roles.time)[1]
    groups = grouped(frame, path, roles.series)
    back = any((np.diff(clock.marks[rows]) <= 0).any() for _, rows in groups)
    named = _columns_of_series(frame, roles, clock) if back else None
    for name, rows in groups:
        _check(path, name, roles, clock[rows], constant[rows], answers[rows] if answered else None, named)
    clocks = [_rows(len(rows)) if roles.time is None else clock[rows] for _, rows in groups]
    steps = _Steps.of(clocks, freq, like)
    steps.check(path, roles.time, like)
    seconds = clock.walls / clock.per_second
    able = [cycle for cycle in CYCLES if clock.dates and cycle >= 2 * steps.step]
    longest = max(float(np.ptp(seconds[rows])) for _, rows in groups)
    there = like.cycles if like else sum(longest >= 2 * cycle for cycle in able)
    turns = [2 * np.pi * seconds / cycle for cycle in able[:there]]
    waves = (wave(turn) for turn in turns for wave in (np.sin, np.cos))
    known = np.column_stack([known, *_holidays(holidays, clock, steps.step), *waves])
    regular = steps.regular and not (like and like.timed)
    all_series = [
        Series(
            name, answers[rows], past[rows], constant[rows[0]], known[rows],
            None if regular else np.concatenate([[1.0], span]), seconds[rows],
        )
        for (name, rows), span in zip(groups, steps.spans, strict=True)
    ]  # fmt: skip
    summary = _summary(all_series, answers, len(turns), steps.regular)
    return Collection(
        path, all_series, classes, steps.season, summary, len(turns), steps.step, steps.known,
        categories=texts.categories, unseen=texts.unseen, dated=clock.dates,
    )  # fmt: skip


def continued(
    frame: Any,
    path: Path,
    roles: Roles,
    steps: int,
    *,
    after: int | None = None,
    freq: Any = None,
    known: Sequence[Frequency] = (),
) -> Any:
    """Return a table in which each series has `steps` steps after its first `after` rows, or after all if it is None.

    Rows that are lacking are added. Their times go on at the frequency of the series. Static covariates keep their
    value there, and all others are missing. The table is in the order of series.
    freq: the frequency of the added rows; None: as inferred, where `known` are tried first. Raises DataError when it
    cannot be inferred.
    """
    import pandas as pd

    groups, time = grouped(frame, path, roles.series), roles.time
    frame, clock, freqs = frame.copy(deep=False), _rows(len(frame)), []
    if time is not None:
        frame[time], clock = times(frame, path, time)
        for label, rows in groups:
            check_order(path, label, time, clock[rows])
        freqs = frequencies([clock[rows] for _, rows in groups], freq, known=known)
    pieces = []
    for i, (label, rows) in enumerate(groups):
        piece = frame.iloc[rows]
        pieces.append(piece)
        further = steps if after is None else min(after, len(rows)) + steps - len(rows)
        if further < 1:
            continue
        more = {name: piece[name].iloc[-1] for name in roles.constant}
        if time is not None:
            frequency = freqs[i]
            if frequency is None or not frequency.exact:
                of = f" of series {label!r}" if label else ""
                raise DataError(
                    f"table: {path}: the times {time!r}{of} have no frequency that can be inferred, expected one "
                    "because rows follow; say it as pandas does: --freq D, or freq='D'"
                )
            more[time] = frequency.after(clock[rows], further)
        pieces.append(pd.DataFrame(more, index=range(further)))
    return pd.concat(pieces, ignore_index=True)


def filled(
    frame: Any,
    path: Path,
    roles: Roles,
    *,
    max_added: float = MAX_ABSENT_SHARE,
    freq: Any = None,
    known: Sequence[Frequency] = (),
) -> tuple[Any, int]:
    """Return a table with a row for each step that is absent from regular times, and the number of these rows.

    In the new rows static covariates keep their value, and all others are missing. The table stays as it is when it has
    no times, when no step is absent, when times go back, when the times have no frequency, or when the fraction of new
    rows would be over `max_added`. Raises DataError when `max_added` is 1 and more than nine tenths of the rows would
    be new.
    """
    import pandas as pd

    if (time := roles.time) is None:
        return frame, 0
    when, clock = times(frame, path, time)
    groups = grouped(frame, path, roles.series)
    clocks = [clock[rows] for _, rows in groups]
    if any((np.diff(times_of_series.marks) <= 0).any() for times_of_series in clocks):
        return frame, 0
    freqs = frequencies(clocks, freq, max_added, known)
    counts, _ = _counted(clocks, freqs)
    absent = 0 if counts is None else sum(int(count[-1]) + 1 - len(count) for count in counts)
    if counts is None or not 0 < absent <= max_added * (len(frame) + absent):
        return frame, 0
    if absent > 9 * len(frame):
        raise DataError(
            f"table: {path}: {absent:,} steps are absent from the times {time!r}, expected at most nine times the "
            f"{len(frame):,} that are there; give --gaps durations"
        )
    frame, pieces = frame.assign(**{time: when}), []
    for (_, rows), times_of_series, frequency, count in zip(groups, clocks, freqs, counts, strict=True):
        assert frequency is not None
        piece = frame.iloc[rows]
        pieces.append(piece)
        lacking = np.setdiff1d(np.arange(count[-1]), count)
        if len(lacking):
            row = np.searchsorted(count, lacking) - 1
            more = {name: piece[name].iloc[row].to_numpy() for name in roles.constant}
            more[time] = frequency.between(times_of_series, count, lacking)
            index = piece.index[row] + (lacking - count[row]) / np.diff(count)[row]  # between two rows of the table
            pieces.append(pd.DataFrame(more, index=index, columns=frame.columns))
    result = pd.concat([piece.astype(object) for piece in pieces]).sort_index(kind="stable")
    kinds = {name: kind for name, kind in frame.dtypes.items() if name in (time, *roles.constant)}
    return result.astype(kinds).infer_objects().reset_index(drop=True), absent


def _rows(count: int) -> Times:
    rows = np.arange(count)
    return Times(rows, rows)


def _counted(clocks: Sequence[Times], freqs: Sequence[Frequency | None]) -> tuple[list[Counts] | None, float]:
    """Return how many steps each time is after the first of its series, and the length of a step.

    The first is None, and the length is 0, when a series has no frequency, when steps are not equally long in all, or
    when most times are several steps after the previous time.
    """
    same = [frequency for frequency in freqs if frequency is not None]
    if len(same) < len(freqs) or not all(frequency.like(same[0].seconds) for frequency in same):
        return None, 0.0
    counts = [frequency.counts(times) for frequency, times in zip(same, clocks, strict=True)]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None, 0.0
    steps = np.concatenate([np.diff(count) for count in known])
    return (None, 0.0) if len(steps) and np.median(steps) != 1 else (known, same[0].seconds)


def _stack(columns: list[Numbers], rows: int) -> Numbers:
    return np.hstack([values.reshape(rows, -1) for values in columns]) if columns else np.zeros((rows, 0))


class _Texts:
    """The columns of text among covariates. categories: the texts of training by column; `fixed` if they are known."""

    def __init__(self, categories: Mapping[str, list[str]], fixed: bool) -> None:
        self.categories, self.fixed, self.unseen = dict(categories), fixed, dict[str, list[str]]()

    def columns(self, frame: Any, path: Path, names: Sequence[str], role: str) -> Numbers:
        """Return covariates: numbers as they are, text as one column of 0 and 1 for each text."""
        result = []
        for name in names:
            entries = column(frame, path, name, role)
            if name in self.categories or (not self.fixed and self._is_text(entries, role)):
                values, self.categories[name], others = indicators(frame, path, name, role, self.categories.get(name))
                result.append(values)
                if others:
                    self.unseen[name] = others
            else:
                result.append(numbers(frame, path, name, role))
        return _stack(result, len(frame))

    def _is_text(self, entries: Any, role: str) -> bool:
        import pandas as pd

        return is_text(entries) or (role == "a static covariate" and not pd.api.types.is_numeric_dtype(entries))


def _holidays(country: str | None, clock: Times, step: float) -> list[Numbers]:
    """Return a column that is 1 on the holidays of a country, or nothing if it is None. step: in seconds."""
    if country is None:
        return []
    try:
        from holidays import country_holidays  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("table: holidays are read with holidays: pip install 'scanl[holidays]'") from error
    if not clock.dates or step > DAY * (1 + SLACK):
        raise ConfigError(f"table: holidays is {country!r}, expected none because a step is longer than a day")
    name, _, subdivision = country.partition("-")
    days = clock.wall.normalize()
    try:
        calendar = country_holidays(name, subdiv=subdivision or None, years=sorted(set(days.year)))
    except NotImplementedError as error:
        raise ConfigError(f"table: holidays is {country!r}, expected a country of the package: {error}") from error
    return [np.array([day in calendar for day in days.date], np.float64)]


def check_order(path: Path, name: str, time: str, when: Times, column: str | None = None) -> None:
    """Raise DataError for a series in which two times are equal or times go back. time: their column.

    column: what would tell the series of the table apart, as --series takes it.
    """
    of = f" of series {name!r}" if name else ""
    steps = np.diff(when.marks)
    hint = "" if name and not column else f"; name the series: --series {column or 'COLUMN'}"
    if (steps == 0).any():
        at = when.at(when.marks[[(steps == 0).argmax()]])[0]
        hint += "; if the clock goes back there, write times in UTC" if when.dates and when.zone is None else ""
        raise DataError(f"table: {path}: two rows{of} have the same time {time!r}{hint}; it is {at}")
    if (steps < 0).any():
        row = int((steps < 0).argmax()) + 2
        hint = hint if column else "; sort the table by time"
        raise DataError(f"table: {path}: the times {time!r}{of} go back in its row {row}{hint}")


def _columns_of_series(frame: Any, roles: Roles, when: Times) -> str | None:
    """Return columns, with commas between them, that tell series apart: those of `roles` and one to three others.

    In each of their groups the times go forward.
    """
    import pandas as pd

    used, marks = {name for _, names in roles.titles for name in names}, pd.Series(when.marks)
    able = [name for name in frame.columns if name not in used and not pd.api.types.is_float_dtype(frame[name])]
    able = [name for name in able if 1 < frame[name].nunique() <= len(frame) / 2]
    for more in chain.from_iterable(combinations(able[:MAX_KEYS], count) for count in (1, 2, 3)):
        names = [*roles.series, *more]
        steps = marks.groupby([frame[name].to_numpy() for name in names]).diff()
        if (steps.dropna() > 0).all():
            return ",".join(names)
    return None


def _check(
    path: Path, name: str, roles: Roles, when: Times, constant: Numbers, answers: Any, column: str | None
) -> None:
    of = f" of series {name!r}" if name else ""
    if roles.time is not None:
        check_order(path, name, roles.time, when, column)
    if len(constant) and not ((constant == constant[0]) | np.isnan(constant)).all():
        raise DataError(
            f"table: {path}: a static covariate changes{of}, expected one value because it is among "
            f"{list(roles.static)}"
        )
    if answers is None:
        return
    missing = (answers < 0).all() if answers.ndim == 1 else np.isnan(answers).all(0).any()
    if missing:
        raise DataError(f"table: {path}: the target{of} has no value at all; leave that series out")


def _usual_step(clocks: Sequence[Times]) -> float:
    """Return the median step of the times; 1 if there is none."""
    steps = np.concatenate([np.diff(times.marks) / times.per_second for times in clocks])
    return float(np.median(steps)) if len(steps) else 1.0


def _summary(all_series: list[Series], answers: Any, cycles: int, regular: bool) -> str:
    missing = float((answers < 0).mean() if answers.ndim == 1 else np.isnan(answers).mean())
    shortest, longest = min(map(len, all_series)), max(map(len, all_series))
    steps = counted(longest, "step") if shortest == longest else f"{shortest:,} to {counted(longest, 'step')}"
    parts = [f"{len(all_series):,} series of {steps}"]
    parts += [f"{missing:.1%} of the target is missing"] if missing else []
    parts += ["times are irregular: durations are an input"] if not regular else []
    parts += [f"{counted(cycles, 'cycle')} of the calendar"] if cycles else []
    return ", ".join(parts)
