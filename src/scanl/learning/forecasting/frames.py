"""Forecasts of frames with the columns `unique_id`, `ds` and `y`, with the methods of neuralforecast.

This module imports pandas: `pip install 'scanl[series]'`. The forecaster is trained in memory,
with the loss, the optimizer and the learning rates of `scanl train`, and leaves no folder.
"""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import pandas as pd
import torch

from scanl.data.questions import ForecastQuestion
from scanl.data.series.columns import as_table, grouped
from scanl.data.series.frequency import of_days
from scanl.data.series.outlook import NEWER, Outlook, in_zone, joined
from scanl.data.series.series import Collection, Series, check_order, continued
from scanl.data.series.table import Table
from scanl.data.series.times import as_dates, form_of, times
from scanl.data.splits import Piece
from scanl.errors import CheckpointError, ConfigError, DataError, nearest
from scanl.files import written_whole
from scanl.learning.descent import optimize, seeded
from scanl.learning.forecasting.answer_columns import check_levels
from scanl.learning.forecasting.choose import MINUTES, choose, fitted
from scanl.learning.forecasting.forecasts import Forecasts
from scanl.learning.forecasting.untrained import MAX_STEPS, UntrainedForecasts, seasons_of
from scanl.learning.questions.forecast import ForecastAnswerer, ForecastOptions
from scanl.learning.run.config import StackConfig, make_stack
from scanl.models import Forecaster, PretrainedForecaster, TunedForecaster, pretrained_forecaster
from scanl.models.saving import shortened
from scanl.whole import check_sizes, whole_number

SERIES = "unique_id"  # the column with the names of the series, if nothing else is said
ANSWER = "scanl"  # the column of the median
STACK = [field.name for field in fields(StackConfig)]
HEAD = list(vars(ForecastOptions()))
PATH = Path("df")  # stands for a frame in messages
SAMPLE_ROWS = 10_000  # of a panel, by which its season is found
ABOUT, ROWS = "frames.json", "rows.parquet"


@dataclass
class FrameTable(Table):
    """A frame as a source, all of which is training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.frame: Any = None

    def read(self, path: Path, least: int = 2) -> Any:
        return self.frame

    def divide(self, series: Sequence[Series]) -> list[list[Piece]]:
        ends = [len(member) - self.horizon for member in series]  # the last rows are ahead
        return [[(i, 0, end) for i, end in enumerate(ends)], [], []]

    def take(self, frame: Any, like: Collection | None = None) -> None:
        """Hold a frame, and read its series with the calendar of the H steps after them."""
        self.frame = frame
        frame, idle = self.without_idle(frame, PATH, like)
        filled, _ = self.without_gaps(frame, PATH, like)
        training = self.collect(filled, PATH, like)
        training.idle = idle
        ahead = continued(filled, PATH, self.roles, self.horizon, freq=self.freq, known=training.known)
        self.collection = self.collect(ahead, PATH, training)
        self.collection.idle = idle
        if like is None:
            self.find_season(self.collection)
        self.check_answers(self.collection)


class Frames:
    """Forecast frames with the columns `unique_id`, `ds` and `y`, one row a step of a series, in any order.

    Args:
        horizon: steps to forecast.
        series: columns of the names of the series, with commas between them, as in `Table`.
        past, static, future: further columns, as in `Table`.   season, holidays, distribution, sequence_length: too.
        freq: how far a step is from the next: an offset of pandas or its alias, such as "D", "B" or "ME"; a number if
            the times are numbers. None: what pandas infers for each series. As in `Table`, steps that are absent are
            missing numbers if they are few.
        steps, batch_size, lr, random_state: of training. Without steps, backtests choose them and every other option
            that is None or is left out (`scanl.learning.forecasting.choose`). A recursive model, and another
            distribution than quantiles, take 300.
        minutes: of the backtests and the training of what they choose. The work is planned, so the forecast does not
            depend on the machine (`scanl.learning.forecasting.work`). A warning says what is left out.
        options: of the model: arguments of `Stack` such as layer, dim and depth; recursive, lags and span.

    A forecast is a frame with `unique_id`, `ds`, the median as `scanl`, and the bounds of intervals as `scanl-lo-80`
    and `scanl-hi-80`. It reads the last `sequence_length` steps before it.
    Fitted: `model`, a `Forecaster`.
    """

    def __init__(
        self,
        horizon: int,
        *,
        series: str = SERIES,
        past: Sequence[str] = (),
        static: Sequence[str] = (),
        future: Sequence[str] = (),
        season: int | None = None,
        freq: Any = None,
        holidays: str | None = None,
        distribution: str | None = None,
        sequence_length: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        random_state: int = 0,
        minutes: float = MINUTES,
        **options: Any,
    ) -> None:
        stack = {"dim": 32, "depth": 1, **{name: options[name] for name in options.keys() & set(STACK)}}
        head = {name: options[name] for name in options.keys() & set(HEAD)}
        for name in options:
            if name not in (*STACK, *HEAD):
                raise nearest("option of Frames", name, [*STACK, *HEAD])
        self.horizon, self.series = horizon, series
        self.past, self.static, self.future = tuple(past), tuple(static), tuple(future)
        self.season, self.freq, self.holidays = season, freq, holidays
        self.distribution, self.sequence_length = distribution, sequence_length
        self.steps, self.batch_size, self.lr, self.random_state = steps, batch_size, lr, random_state
        self.minutes = minutes
        self.chosen: dict[str, Any] = {}  # by backtests: what the table is read with
        self.options, self.stack, self.head = options, StackConfig(**stack), head
        self.model: Forecaster | PretrainedForecaster | None = None

    @staticmethod
    def pretrained(
        horizon: int,
        *,
        series: str = SERIES,
        season: int | None = None,
        freq: Any = None,
        run: str | os.PathLike[str] | None = None,
    ) -> "PretrainedFrames":
        """Return frames that the model in the package forecasts: `fit` trains nothing.

        run: folder of `scanl train --init pretrained`, whose tuned weights are taken.   The rest is as above.
        """
        return PretrainedFrames(horizon, series=series, season=season, freq=freq, run=run)

    def fit(self, df: pd.DataFrame) -> Self:
        """Train on every row of a frame.

        Raises DataError as `Table` does, when it is not known when the steps after a series are, and when no series is
        longer than the horizon.
        """
        with _messages():
            self.chosen = {}
            seed = whole_number("frames", "random_state", self.random_state)
            source = self._source()
            rows = self._rows(df)
            sizes = {"steps": self.steps, "batch_size": self.batch_size, "horizon": self.horizon}
            check_sizes("frames", **{name: value for name, value in sizes.items() if value is not None})
            source.take(rows)
            for note in source.notes:
                warnings.warn(note.replace("table: ", "frames: ", 1), stacklevel=2)
            longest = max(len(member) for member in source.collection.series) - self.horizon
            if source.length < 1:
                raise DataError("frames: df has no series of two steps, expected one to train on")
            if self.horizon >= longest:
                raise DataError(
                    f"frames: horizon is {self.horizon}, expected at most {longest - 1} because the longest series has "
                    f"{longest} steps"
                )
            self._form = form_of(rows["ds"])
            if self._chooses:
                _ = source.question  # raises for a season that no series has
                choice = choose(source, self._fixed, self.minutes)
                for exception in choice.exceptions:
                    warnings.warn(f"frames: {exception}", stacklevel=2)
                self.chosen = {name: choice.options[name] for name in ("distribution", "sequence_length")}
                self._table = self._source()
                self._table.frame, self._table.collection = rows, source.collection
                with seeded(seed):
                    self.model = fitted(self._table, choice, seed)
                return self
            self._table = source

            def once(step: int) -> torch.Tensor:
                return method.objective(model, source.batch(step, self.batch_size or 16).tensors())[0]

            with seeded(seed):
                method = ForecastAnswerer(cast(ForecastQuestion, source.question))
                model = method.model(make_stack(self.stack), self.head)
                optimize(model, self.steps or 300, self.lr or 3e-3, seed, once)
            self.model = model
        return self

    def predict(
        self, df: pd.DataFrame | None = None, X: pd.DataFrame | None = None, levels: Sequence[float] | None = (80, 95)
    ) -> pd.DataFrame:
        """Forecast the steps after each series.

        df: the rows that the forecast reads, of any series; None: the rows of `fit` and `update`.   X: the covariates
        in `future` at the steps that are forecast: `unique_id`, `ds` and their columns.   levels: per cents of the
        intervals; None: as many as the distribution has.
        """
        table = self._fitted("predict")
        with _messages():
            levels = self._levels(levels)
            rows = table.frame if df is None else in_zone(self._rows(df, self._form), PATH, table.frame, PATH, "ds")[0]
            outlook = self._outlook(table, rows if df is None else rows.assign(**{NEWER: 1.0}), X)
            return self._named(self._forecasts.frame(outlook, outlook.last, self.horizon, levels))

    def update(self, df: pd.DataFrame) -> Self:
        """Take rows that have come since, without training. They follow the rows of their series, or begin new series.

        A row replaces the earlier one with its time. The forecast is then the same as after all rows at once. Raises
        DataError for rows that do not fit those before, which stay as they were.
        """
        table = self._fitted("update")
        with _messages():
            frame = table.frame.assign(ds=times(table.frame, PATH, "ds")[0])
            newer = self._rows(df, self._form)
            newer = newer.assign(**{name: _like(newer[name], frame[name]) for name in table.series_columns})
            more = joined(table, newer, PATH, frame).drop(columns=NEWER)
            Outlook(table, more, PATH)  # raises for rows that cannot be forecast
            old, new = (dict(grouped(rows, PATH, table.series_columns)) for rows in (frame, more))
            pieces = [more.iloc[new[name]] if name in new else frame.iloc[old[name]] for name in {**old, **new}]
            table.frame = pd.concat(pieces, ignore_index=True)
        return self

    def cross_validation(
        self,
        df: pd.DataFrame,
        n_windows: int = 1,
        step: int | None = None,
        levels: Sequence[float] | None = (80, 95),
    ) -> pd.DataFrame:
        """Forecast the end of each series from several origins. For each, the options of this object are fitted anew.

        The last window ends with the series, and each begins `step` rows before the next.   step: None: the horizon.
        Returns `unique_id`, `ds`, the time `cutoff` of the last row that was read, `y`, and the forecast.
        """
        with _messages():
            step = self.horizon if step is None else step
            check_sizes("frames", n_windows=n_windows, step=step)
            levels, rows = self._levels(levels), self._rows(df)
            if form_of(rows["ds"]) is None:
                rows = rows.assign(ds=times(rows, PATH, "ds")[0])
            names = self._source().series_columns
            behind = rows.groupby(names, sort=False).cumcount(ascending=False)
            shortest = int(rows.groupby(names, sort=False).size().min())
            possible = (shortest - 1 - self.horizon) // step + 1
            if n_windows > max(0, possible):
                raise DataError(
                    f"frames: n_windows is {n_windows}, expected at most {max(0, possible)} because the shortest "
                    f"series has {shortest} steps"
                )
            pieces = []
            for window in reversed(range(n_windows)):
                past = rows[behind >= self.horizon + window * step]
                later = rows[(behind < self.horizon + window * step) & (behind >= window * step)]
                model = type(self)(**self._arguments).fit(past)
                known = later[[*names, "ds", *self.future]] if self.future else None
                answers = model.predict(X=known, levels=levels)
                cutoff = past.groupby(names, sort=False)["ds"].last().rename("cutoff").reset_index()
                answers = answers.merge(cutoff, on=names, how="left")
                pieces.append(answers.merge(later[[*names, "ds", "y"]], on=[*names, "ds"], how="left"))
            result = pd.concat(pieces, ignore_index=True)
            forecasts = [name for name in result.columns if name.startswith(ANSWER)]
            return cast(pd.DataFrame, result[[*names, "ds", "cutoff", "y", *forecasts]])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder with the model, the options and the last rows of each series. `load` reads it."""
        table, folder = self._fitted("save"), Path(path)
        assert self.model is not None
        if not (self.freq is None or isinstance(self.freq, str | int | float)):
            raise ConfigError(f"frames: freq is {self.freq!r}, expected an alias or a number, which a file can hold")
        self.model.save(folder)
        training = table.collection
        facts = {name: getattr(training, name) for name in ("cycles", "step", "season", "timed", "categories", "idle")}
        about = {
            "options": {name: list(v) if isinstance(v, tuple) else v for name, v in self._arguments.items()},
            "collection": facts,
            "nights": [[one.week, one.moments] for one in training.known if one.moments],
            "form": self._form,
            "chosen": self.chosen,
        }
        rows = table.frame.groupby(table.series_columns, sort=False).tail(table.length + 1)
        with written_whole(folder / ABOUT) as temporary:
            temporary.write_text(json.dumps(about), "utf-8")
        with written_whole(folder / ROWS) as temporary:
            rows.assign(ds=times(rows, PATH, "ds")[0]).to_parquet(temporary, index=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Frames":
        """Return what `save` has written. Raises CheckpointError for another folder."""
        folder = Path(path)
        if not (folder / ABOUT).is_file() or not (folder / ROWS).is_file():
            raise CheckpointError(f"frames: {path} has no {ABOUT} and {ROWS}, expected a folder of Frames.save")
        try:
            return cls._loaded(folder)
        except CheckpointError:
            raise
        except Exception as error:  # the files may hold anything, and so raise anything
            reason = shortened(f"{type(error).__name__}: {error}")
            raise CheckpointError(f"frames: {path} is damaged, or was changed: {reason}") from error

    @classmethod
    def _loaded(cls, folder: Path) -> "Frames":
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        self = cls(**about["options"])
        whole_number("frames", "horizon", self.horizon, 1)
        if self.sequence_length is not None:
            whole_number("frames", "sequence_length", self.sequence_length, 1)
        if not isinstance(about["form"], str | None):
            raise CheckpointError(f"frames: {folder / ABOUT} has form {about['form']!r}, expected text or null")
        self.chosen = about["chosen"]
        self.model = self._load(folder)
        rows, facts = pd.read_parquet(folder / ROWS), about["collection"]
        facts["known"] = [of_days(week, moments) for week, moments in about["nights"]]
        nothing = np.zeros(0)
        usual = Series("", nothing, nothing, nothing, nothing, nothing if facts.pop("timed") else None, nothing)
        table = self._source()
        table.take(rows, Collection(PATH, [usual], [], facts.pop("season"), "", **facts))
        self._table, self._form = table, about["form"]
        return self

    @property
    def _arguments(self) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        names = (
            "horizon", "series", "past", "static", "future", "season", "freq", "holidays", "distribution",
            "sequence_length", "steps", "batch_size", "lr", "random_state", "minutes",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, **self.options}

    table: ClassVar[type[FrameTable]] = FrameTable

    def _source(self) -> FrameTable:
        return self.table(
            [PATH], "forecast", "y", time="ds", series=self.series, static=self.static, past=self.past,
            future=self.future, horizon=self.horizon, season=self.season, freq=self.freq, holidays=self.holidays,
            distribution=self._option("distribution"), sequence_length=self._option("sequence_length"),
            seed=self.random_state,
        )  # fmt: skip

    @property
    def _chooses(self) -> bool:
        """Whether backtests choose what is left open."""
        quantiles = self.distribution in (None, "quantiles")
        return self.steps is None and quantiles and not self.options.get("recursive")

    @property
    def _fixed(self) -> dict[str, Any]:
        """What the caller has said of the options that backtests choose."""
        names = ("distribution", "sequence_length", "batch_size", "lr")
        values = {name: getattr(self, name) for name in names}
        return {**{name: value for name, value in values.items() if value is not None}, **self.options}

    def _option(self, name: str) -> Any:
        """Return the distribution or the length of the sequences."""
        usual = {"distribution": "quantiles" if self._chooses else "gaussian", "sequence_length": 128}
        value = getattr(self, name)
        return self.chosen.get(name, usual[name]) if value is None else value

    def _load(self, folder: Path) -> Forecaster | PretrainedForecaster:
        return Forecaster.load(folder)

    @property
    def _forecasts(self) -> Forecasts | UntrainedForecasts:
        return Forecasts(cast(Forecaster, self.model), self._table, self._form)

    def _fitted(self, method: str) -> FrameTable:
        if self.model is None:
            raise ConfigError(f"frames: {method} is called before fit, expected fit first")
        return self._table

    def _levels(self, levels: Sequence[float] | None) -> tuple[float, ...]:
        if levels is not None and not isinstance(levels, list | tuple):
            raise ConfigError(f"frames: levels is {levels!r}, expected a list of per cents, such as [80, 95]")
        usual = levels is not None and tuple(levels) == (80, 95)
        return check_levels("frames", self._option("distribution"), None if usual else levels)

    def _outlook(self, table: FrameTable, rows: Any, known: Any) -> Outlook:
        names = ", ".join(self.future)
        if self.future and known is None:
            raise ConfigError(f"frames: X is none, expected a frame with {names} at the {self.horizon} steps ahead")
        if known is not None and not self.future:
            raise ConfigError("frames: X is given, expected none because future is ()")
        if known is None:
            return Outlook(table, rows, PATH)
        known = as_table(known, "frames: X")
        known = known.assign(ds=as_dates(known["ds"], self._form)) if "ds" in known.columns else known
        return Outlook(table, rows, PATH, (known, Path("X")))

    def _rows(self, df: Any, form: str | None = None) -> Any:
        """Return a frame in the order of series and times. Raises DataError for what is no such frame.

        form: in which times are read first, as `form_of` returns it.
        """
        frame = as_table(df, "frames: df")
        names = self._source().series_columns
        for name in [*names, "ds", "y"]:
            if name not in frame.columns:
                raise DataError(f"frames: df has no column {name!r}, expected {', '.join(names)}, ds and y")
        frame = frame.assign(ds=as_dates(frame["ds"], form)).reset_index(drop=True)
        codes, clock = np.zeros(len(frame), np.int64), times(frame, PATH, "ds")[1]
        for code, (_, rows) in enumerate(grouped(frame, PATH, names)):
            codes[rows] = code
        order = np.lexsort((clock.marks, codes))
        frame, clock = frame.iloc[order].reset_index(drop=True), clock[order]
        for name, rows in grouped(frame, PATH, names):
            check_order(PATH, name, "ds", clock[rows])
        return frame

    def _named(self, answers: Any) -> Any:
        return answers.rename(columns=lambda name: ANSWER + name[1:] if name == "y" or name.startswith("y-") else name)


class ReadTable(FrameTable):
    """A frame of which a forecast reads more rows than a series has now."""

    @property
    def length(self) -> int:
        return MAX_STEPS


class PretrainedFrames(Frames):
    """Forecast frames by the model in the package (`Frames.pretrained`). It reads no covariates."""

    table = ReadTable

    def __init__(
        self,
        horizon: int,
        *,
        series: str = SERIES,
        season: int | None = None,
        freq: Any = None,
        run: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(horizon, series=series, season=season, freq=freq)
        self.run = None if run is None else os.fspath(run)

    def fit(self, df: pd.DataFrame) -> Self:
        """Hold the rows of a frame, and find the season. Nothing is trained. Raises DataError as `Frames.fit` does."""
        with _messages():
            check_sizes("frames", horizon=self.horizon)
            source, rows = self._source(), self._rows(df)
            source.take(rows)
            for note in source.notes:
                warnings.warn(note.replace("table: ", "frames: ", 1), stacklevel=2)
            self._form, self._table = form_of(rows["ds"]), source
            self.model = pretrained_forecaster() if self.run is None else TunedForecaster.load(self.run).forecaster
        return self

    def predict_panel(
        self, panel: Any, levels: Sequence[float] | None = (80, 95), partitions: int | None = None
    ) -> Any:
        """Forecast a frame of Dask, Ray or Spark, and return one of the same kind: `pip install 'scanl[panels]'`.

        The series are divided by their names, and each partition is forecast by itself, by `fit` and `predict`: so
        rows are those of one process, to rounding, in another order. Without `season` the calendar decides it, or the
        first 10,000 rows. No `fit` is needed.

        panel: any frame that fugue reads.   levels: as in `predict`.   partitions: how many; None: as many as now.
        """
        from fugue import api  # pyright: ignore[reportMissingImports]

        options = self._arguments
        names = self._source().series_columns
        sample = PretrainedFrames(**options).fit(api.as_pandas(api.head(panel, SAMPLE_ROWS)))
        options["season"] = seasons_of(sample._table)[0]

        def forecast(rows: pd.DataFrame) -> pd.DataFrame:
            return PretrainedFrames(**options).fit(rows).predict(levels=levels)

        count = api.get_num_partitions(panel) if partitions is None else partitions
        spread = api.repartition(panel, {"by": names, "algo": "hash", "num": count})
        return api.transform(spread, forecast, schema=api.get_schema(sample.predict(levels=levels)))

    def _load(self, folder: Path) -> PretrainedForecaster:
        return PretrainedForecaster.load(folder).double()

    @property
    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("horizon", "series", "season", "freq", "run")}

    @property
    def _forecasts(self) -> UntrainedForecasts:
        model = cast(PretrainedForecaster, self.model)
        return UntrainedForecasts(model, self._table, seasons_of(self._table), self._form)


def levels_of(probabilities: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return the levels of the intervals whose bounds are these quantiles, and the columns that have the quantiles."""
    levels = [round(100 * abs(1 - 2 * p), 9) for p in probabilities]
    names = [f"{ANSWER}-{'lo' if p < 0.5 else 'hi'}-{k:g}" for p, k in zip(probabilities, levels, strict=True)]
    return [k for k in levels if k], [name if k else ANSWER for name, k in zip(names, levels, strict=True)]


def _like(ids: Any, known: Any) -> Any:
    """Return names of series as the known ones have them: numbers or text. Raises DataError for a new one of others."""
    number, known_number = (pd.api.types.is_numeric_dtype(names) for names in (ids, known))
    if number and known_number:
        return ids.astype(known.dtype) if (ids == ids.astype(known.dtype)).all() else ids
    if number == known_number:
        return ids
    by_text = {str(name): name for name in known.unique()}
    new = ids[~ids.astype(str).isin(by_text)]
    if len(new):
        kinds = ["numbers" if kind else "text" for kind in (number, known_number)]
        raise DataError(
            f"frames: df has the {ids.name} {new.tolist()[0]!r} among {kinds[0]}, expected {kinds[1]} as in fit"
        )
    return ids.astype(str).map(by_text)


@contextmanager
def _messages() -> Iterator[None]:
    """Begin the messages of `Table` as the others do."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not str(error).startswith("table: "):
            raise
        raise type(error)(f"frames: {str(error).removeprefix('table: ')}") from error
