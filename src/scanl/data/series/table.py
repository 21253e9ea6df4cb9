"""A user's own table as a source: forecast series, generate, classify or label them, or predict numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from scanl.data.base import check_shares, own_options, register
from scanl.data.series.columns import FILE, MAX_TEXTS, files_of, is_text, read_tables, split_names, unread
from scanl.data.series.cycles import season_of
from scanl.data.series.forecast import SeriesForecast, SeriesGeneration
from scanl.data.series.frequency import MAX_ABSENT_SHARE
from scanl.data.series.idle import Reasons, without_idle
from scanl.data.series.label import SeriesLabel
from scanl.data.series.series import Collection, Roles, Series, filled, series_of
from scanl.data.series.source import SeriesSource
from scanl.data.series.whole import SeriesClass, SeriesNumber
from scanl.data.series.windows import SeriesQuestion
from scanl.data.splits import TRAINING, VALIDATION, Piece, by_series, by_time
from scanl.errors import ConfigError, nearest
from scanl.options import Fraction

ASKS: Mapping[str, type[SeriesQuestion]] = {
    cls.ask: cls for cls in (SeriesForecast, SeriesGeneration, SeriesClass, SeriesLabel, SeriesNumber)
}


@register("table")
@dataclass
class Table(SeriesSource):
    """Series in a table: forecast or generate them, classify them, label their steps, or predict a number for each.

    The training part alone sets the scales by which numbers are standardised, and the classes. Missing numbers stay
    missing: the model gets a flag for each number, and a missing answer does not count in the loss. In a split by time,
    every series begins with training, and then come validation and test. A forecast of a later part may read the parts
    before it. In a split by series, the digests of the series' names decide, and classes are shared out evenly. To
    classify, all series get the length of the longest: a shorter one begins with missing steps.

    Args:
        data: a file, .csv, .tsv, .csv.gz, .parquet, .feather, .xlsx or .npz; or several files with the same columns, by
            name or by a pattern such as "sales/*.csv". Several are one table, row after row, with a column `file`.
        ask: "forecast", "generate", "classify", "label" or "regress"; the option `--question`. To generate, a forecast
            of one step is learnt.
        target: column of the answers; to forecast, several with commas between them.
        time, series: columns of the times and of the series' names; of names in several columns, with commas between
            them: "region,state". Without them rows are steps of one series.
        static, past, future: columns of covariates: constant over a series; known up to the present; known ahead. A
            column of text becomes a column of 0 and 1 for each text.
            Without `past`, and if the question is not "forecast", all columns without a role are read as `past`, except
            columns without a name, columns that number the rows, and columns of more than 64 texts.
        horizon: steps to forecast; 1 to generate.   season: steps of a season; None: what the calendar says, or else
            what the numbers show.
        freq: how far a step is from the next: an alias of pandas, such as "D", "B" or "ME", or a number if the times
            are numbers. None: what pandas infers.
        distribution: of the answers, by name.
        split: "time" or "series". None: by time to forecast, and to label a single series; by series otherwise.
        validation, test: fractions of the steps, or of the series, in these parts; 0 of the series for no such part,
            where a model is chosen.
        sequence_length: most steps that a forecast or a label reads.
        origins: learn only the forecasts after this many last steps of a training window; None: after each step. These
        forecasts have read about as many steps as the measured ones.
        gaps: for steps that are absent from regular times: "fill" makes them rows of missing numbers; "durations" makes
            the durations of steps an input, as for irregular times. None: "fill" if they are at most a tenth of all
            steps. For a class or a number of a series it is always durations.
        holidays: country whose holidays are a covariate that is known ahead, as the package `holidays` calls it: "US",
            or "US-CA" with a part of the country.
        seed: seed of the order.

    A forecast has three scores. CRPS is twice the mean pinball loss over `LEVELS`, and MASE is the absolute error of
    the median. Both are in units of the seasonal naive's mean error in training. The third is the coverage of the
    interval from 5 % to 95 %.
    """

    data: Sequence[str | Path]
    ask: str | None = None
    target: str | None = None
    time: str | None = None
    series: str | None = None
    static: Sequence[str] = ()
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    horizon: int = 12
    season: int | None = None
    freq: Any = None
    distribution: str = "gaussian"
    split: str | None = None
    validation: Fraction = 0.1
    test: Fraction = 0.2
    sequence_length: int = 256
    origins: int | None = None
    gaps: str | None = None
    holidays: str | None = None
    seed: int = 0
    is_own: ClassVar[bool] = True

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return ("question", *(field.name for field in fields(cls) if field.name != "ask"))

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "Table":
        named = {field.name: options[field.name] for field in fields(cls) if field.name != "ask"}
        return cls(ask=options["question"], **named, **own_options(cls, options))

    def elsewhere(self, path: Path) -> "Table":
        """Return a source whose test part is all of another table, behind the series of this one.

        The training part, the classes and the scales stay as they are here.
        """
        frame, training = self.read(path), self.collection
        frame, _ = self.without_idle(frame, path, training)
        frame, _ = self.without_gaps(frame, path, training)
        later = self.collect(frame, path, training)
        self.check_answers(later)
        first = len(training.series)
        everything = [(first + i, 0, len(member)) for i, member in enumerate(later.series)]
        both = replace(training, path=path, series=[*training.series, *later.series], summary=later.summary)
        return self.divided([self.parts[TRAINING], [], everything], data=[path], collection=both)

    def __post_init__(self) -> None:
        if self.ask is None or self.ask not in ASKS:
            raise nearest("question", self.ask, list(ASKS))
        asked = ASKS[self.ask]
        if self.target is None:
            raise ConfigError(f"table: target is none, expected the column to {self.ask}: --target COLUMN")
        if not self.data:
            raise ConfigError(
                "table: data is none, expected one file or several with the same columns: --data TABLE.csv"
            )
        if urls := [str(word) for word in self.data if "://" in str(word)]:
            raise ConfigError(f"table: data is {urls[0]}, expected a file; download it first")
        if self.split not in (None, "time", "series"):
            raise ConfigError(f"table: split is {self.split!r}, expected 'time' or 'series'")
        if asked.per_series and self.split == "time":
            raise ConfigError(
                f"table: split is 'time', expected 'series' because the question {self.ask!r} has one answer for a "
                "series"
            )
        if asked.per_series and self.series is None:
            raise ConfigError(
                f"table: series is none, expected the column of the series to {self.ask}: --series COLUMN"
            )
        if self.future and not asked.ahead:
            raise ConfigError("table: future is given, expected none because nothing is forecast; name it in --past")
        if self.gaps not in (None, "fill", "durations"):
            raise ConfigError(f"table: gaps is {self.gaps!r}, expected 'fill' or 'durations'")
        super().__post_init__()
        check_shares("table", self.validation, self.test)
        if self.holidays is not None and (self.time is None or not asked.ahead):
            raise ConfigError(
                f"table: holidays is {self.holidays!r}, expected none without a forecast and a column of times"
            )
        if self.freq is not None and self.time is None:
            raise ConfigError(f"table: freq is {self.freq!r}, expected none without a column of times: --time COLUMN")
        self.ask_for(asked)

    @property
    def path(self) -> Path:
        return Path(self.data[0])

    @property
    def targets(self) -> list[str]:
        assert self.target is not None
        return split_names(self.target) if self.asked.ahead else [self.target]

    @cached_property
    def collection(self) -> Collection:
        """The series, read and checked on first use."""
        frame, idle = self.without_idle(self.read(self.path), self.path)
        frame, absent = self.without_gaps(frame, self.path)
        collection = self.collect(frame, self.path)
        collection.idle = idle
        collection.summary += f", {absent} absent steps are missing numbers" if absent else ""
        if self.left_out:
            collection.summary += f", not read: {', '.join(map(repr, self.left_out))} (--past reads them)"
        self.check_answers(collection)
        self.find_season(collection)
        return collection

    def find_season(self, collection: Collection) -> None:
        """Set the season of series that have none by the calendar, if the numbers before the test part have one."""
        if self.asked.ahead and self.season is None and collection.season == 1:
            parts = self.divide(collection.series)
            ends = {i: end for split in (TRAINING, VALIDATION) for i, _, end in parts[split]}
            collection.season = season_of([y for i, end in ends.items() for y in collection.series[i].target[:end].T])

    @property
    def notes(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.collection.notes

    def check_answers(self, collection: Collection) -> None:
        """Raise DataError unless the answers of series fit the question and the distribution."""
        self.asked.check_answers(collection, str(self.target), self.distribution)

    def read(self, path: Path, least: int = 2) -> Any:
        """Read a table with these columns, and at least `least` rows."""
        paths = [file for name in self.data for file in files_of(Path(name))] if path == self.path else files_of(path)
        return read_tables(paths, self.names, least)

    @property
    def names(self) -> list[str]:
        """The columns whose values are names, of series or classes."""
        return [*self.series_columns, *(self.targets if self.asked.classes else [])]

    @property
    def series_columns(self) -> list[str]:
        """The columns whose values name a series."""
        return [] if self.series is None else split_names(self.series)

    @cached_property
    def covariates(self) -> list[str]:
        """Columns that are covariates of the past."""
        return list(self.past) or [name for name in self._free if name not in self.left_out]

    @cached_property
    def left_out(self) -> list[str]:
        """Columns without a role that are not read: they have no name, number the rows, or have too many texts."""
        frame = self.read(self.path)
        texts = [name for name in self._free if is_text(frame[name]) and frame[name].nunique() > MAX_TEXTS]
        return [name for name in frame.columns if name in self._free and name in (*unread(frame), *texts)]

    @property
    def _free(self) -> list[str]:
        """Columns without a role that may be covariates."""
        if self.past or self.asked.ahead:
            return []
        roles = {*self.targets, self.time, *self.series_columns, *self.static, "step", FILE}
        return [name for name in self.read(self.path).columns if name not in roles]

    @cached_property
    def roles(self) -> Roles:
        """The columns that are read, by what they are."""
        return Roles(
            self.targets, self.time, self.series_columns, self.static, self.covariates, self.future, self.asked.classes
        )

    def collect(self, frame: Any, path: Path, like: Collection | None = None, *, answered: bool = True) -> Collection:
        """Take the series out of a table without gaps by the roles of its columns. Raises DataError as `series_of`."""
        return series_of(frame, path, self.roles, freq=self.freq, holidays=self.holidays, like=like, answered=answered)

    def without_idle(self, frame: Any, path: Path, like: Collection | None = None) -> tuple[Any, Reasons]:
        """Return a table without the series from which no forecast is learnt, and why each is left out.

        like: the series of training; None: this is the table of training.
        """
        if not self.asked.ahead:
            return frame, {}
        return without_idle(frame, path, self.roles, self.horizon, None if like is None else like.idle)

    def without_gaps(self, frame: Any, path: Path, like: Collection | None = None) -> tuple[Any, int]:
        """Return a table in which absent steps are rows, as `gaps` says, and how many there are.

        like: the series of training. If their steps have no durations, absent steps are always rows.
        """
        if self.gaps == "durations" or self.asked.per_series or (like is not None and like.timed):
            return frame, 0
        max_added = MAX_ABSENT_SHARE if self.gaps is None and like is None else 1.0
        known = like.known if like else ()
        return filled(frame, path, self.roles, max_added=max_added, freq=self.freq, known=known)

    @cached_property
    def parts(self) -> list[list[Piece]]:
        return self.divide(self.collection.series)

    def divide(self, series: Sequence[Series]) -> list[list[Piece]]:
        """Return the pieces of the parts."""
        if self.split == "series" or (self.split is None and self.asked.by_series(series)):
            return by_series(series, self.validation, self.test, self.path, self.asked.groups(series))
        return by_time(series, self.validation, self.test)


class LongTable(Table):
    """A table, of which a forecast may read more steps than the training part has: nothing is learnt from batches."""

    @property
    def windowed(self) -> Sequence[Piece]:
        return [(i, 0, len(member) + self.asked.ahead) for i, member in enumerate(self.collection.series)]
