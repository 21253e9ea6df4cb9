"""Published series to forecast: ETT, electricity, weather, traffic, air, power, sunspots, carbon dioxide."""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files
from scanl.data.published.sources import kind
from scanl.data.readers import csv
from scanl.data.series.forecast import SeriesForecast
from scanl.data.series.series import Collection, Series
from scanl.data.series.source import SeriesSource
from scanl.data.splits import Piece, by_time


@kind
@dataclass
class PublishedSeries(SeriesSource):
    """A published table: its columns are forecast from their own past.

    The scores are a `Table` forecast's. The model standardizes each column by its training part. A record may
    give the facts below. Without `borders` the parts are shares of the rows, in order.

    Args:
        horizon, season, distribution, sequence_length, origins, seed: the options of `scanl train`; see `Table`.
        folder: where the file lies; none: in the folder of the data set.
    """

    skipped: ClassVar[tuple[str, ...]] = ()  # columns that are not forecast
    chosen: ClassVar[tuple[str, ...]] = ()  # those to forecast; none: all the others
    usual_season: ClassVar[int] = 1
    shares: ClassVar[tuple[float, float]] = (0.1, 0.2)  # of validation and test
    # First row after training, validation and test, and the number of all rows.
    borders: ClassVar[tuple[int, int, int, int] | None] = None
    every: ClassVar[int] = 1  # rows that one mean replaces
    readers: ClassVar[Mapping[str, Callable[..., tuple[list[str], NDArray[np.float64]]]]] = {"csv": csv.columns}
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("whole",)]
    forecast = SeriesForecast  # what is asked, and what is measured

    horizon: int = 12
    season: int | None = None
    distribution: str = "gaussian"
    sequence_length: int = 256
    origins: int | None = None
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask_for(self.forecast)
        self.validation, self.test = self.shares

    @property
    def files(self) -> Files:
        assert self.needs is not None
        return self.needs

    @property
    def path(self) -> Path:
        return self.files.folder(self.folder) / self.files.needs[0]

    @property
    def targets(self) -> list[str]:
        return self.table[0]

    @property
    def names(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.targets

    @cached_property
    def table(self) -> tuple[list[str], NDArray[np.float64]]:
        """The columns that are forecast, and their numbers: (n, C)."""
        layout = self.files.laid_out(self.folder)
        ((name,),) = layout.parts.values()
        columns, values = self.readers[layout.reader](
            self.files, name, self.folder, self.chosen, self.skipped, **layout.options
        )
        if self.every > 1:
            windows = values[: len(values) // self.every * self.every].reshape(-1, self.every, len(columns))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a mean of missing numbers is missing
                values = np.nanmean(windows, 1)
        return columns, values

    @cached_property
    def collection(self) -> Collection:
        columns, values = self.table
        none = values[:, :0]
        series = Series("", values, none, np.zeros(0), none, None, np.arange(len(values), dtype=np.float64))
        summary = f"{len(values):,} rows of {len(columns)} series"
        return Collection(self.path, [series], [], self.usual_season, summary)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.name} {super().digest()}".encode()).hexdigest()

    @cached_property
    def parts(self) -> list[list[Piece]]:
        if self.borders is None:
            return by_time(self.collection.series, self.validation, self.test)
        *borders, rows = self.borders
        first, second, last = (border * len(self.table[1]) // rows for border in borders)
        return [[(0, 0, first)], [(0, first, second)], [(0, second, last)]]


class LongForecast(SeriesForecast):
    """Forecasts as the literature measures them: at every origin of the test part, on standardized values."""

    metric = "MSE"
    scores = ("MSE", "MAE", *SeriesForecast.scores)
    unit = "; MSE and MAE of standardised values"
    limit = 2**63


@kind
@dataclass
class LongHorizon(PublishedSeries):
    """A table by the protocol of long-horizon forecasts: errors of standardised values.

    The first scores are the mean squared and the mean absolute error, over all steps and columns. They measure the
    median, or the points if the distribution is "points", on values standardised by the training part. Windows that are
    measured begin before the border of a part, so that the first one predicts the first row of the part.

    Args: see `PublishedSeries`.
    """

    forecast = LongForecast
