"""Choose a forecaster for a table: backtests on the rows before the test part decide every option that is not fixed.

1. Simple forecasts are linear maps of the last values (`scanl.learning.lag_maps`). The seasonal naive is one of them.
   They are compared at rolling origins, for the numbers and for their logarithms, and the best mean of some is the map
   `lags` of the forecaster. It stays as it is.
2. A stack learns what is left. It is trained on the rows before each backtest and measured after it. The step with the
   lowest mean error counts, and if that is the first one, the forecast is the simple one.
3. The errors in the backtests give the quantiles of the simple forecast and the factors of the calibration.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scanl.data.base import LEVELS
from scanl.data.series_source import SeriesSource
from scanl.data.splits import VALIDATION
from scanl.errors import ConfigError
from scanl.learning.backtests import Past, Trial, Windows, combined, trial
from scanl.learning.lag_maps import LagMap, Numbers, candidates, widened
from scanl.learning.questions import answerer
from scanl.learning.run.config import OPTIONS, StackConfig, TrainConfig, make_stack
from scanl.models import Forecaster

MINUTES = 2.0  # of a run, if nothing else is said
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
ENOUGH = 200  # errors at a step ahead from which its own quantiles are taken
NEURAL = {"dim": 16, "depth": 1, "layer": "hawk"}

Report = Callable[[str], None]


@dataclass
class Choice:
    """What the backtests have chosen.

    options: by their names in `TrainConfig`.   error: MASE in the backtests, of the forecaster and of others by name.
    quantiles: (C, H, Q), of the errors of the simple forecast in units of the running scale.   weights: (H, q).
    """

    options: dict[str, Any]
    errors: dict[str, float]
    weights: Numbers
    quantiles: Numbers
    calibration: Numbers | None = None
    seconds: float = 0.0

    def table(self) -> str:
        """Return the errors as lines of CSV."""
        return "\n".join(["forecast,MASE", *(f"{name},{error:.6g}" for name, error in self.errors.items()), ""])


def choose(source: SeriesSource, fixed: Mapping[str, Any], minutes: float, report: Report = lambda _: None) -> Choice:
    """Choose the options of `TrainConfig` for a forecast that are not fixed, by backtests within the minutes.

    source: its question is a forecast; it is not changed.   fixed: options and their values.   report: is called with a
    line on each comparison. Raises ConfigError as a `Forecaster` does.
    """
    began = time.monotonic()
    past = Past.of(source)
    season = past.season
    span = fixed.get("span", 2.0 * max(2, season))
    names = [LagMap.of(name) for name in fixed.get("start", ())]
    logs = [fixed["log"]] if "log" in fixed else [False, True] if past.positive and _may_log(fixed) else [False]
    sizes = [max(one.lags(season) for one in names)] if names else _sizes(past, fixed)
    best: tuple[float, Windows, list[Trial]] | None = None
    errors: dict[str, float] = {}
    for log in logs:
        windows = Windows(past, max(sizes), log, span)
        if names:
            some = [trial(windows, one) for one in names]
            if any(one is None for one in some):
                raise ConfigError(f"start: {fixed['start']} needs more rows than the table has; give a smaller ridge")
            chosen = [one for one in some if one is not None]
            mean = [np.mean(parts, 0) for parts in zip(*(one.forecasts for one in chosen), strict=True)]
            error = windows.error(mean)
        else:
            trials = _trials(windows, sizes)
            naive = next(one for one in trials if one.map.kind == ("seasonal" if season > 1 else "naive"))
            errors["seasonal naive"] = naive.error
            chosen, error = combined(windows, trials)
            top = min(trials, key=lambda one: one.error)
            report(
                f"{len(trials)} simple forecasts{' of the logarithm' if log else ''}: MASE {top.error:.3f} for "
                f"{top.map}, {error:.3f} for a mean of {len(chosen)}; the seasonal naive has {naive.error:.3f}"
            )
            if not error < naive.error:
                chosen, error = [naive], naive.error
        if best is None or error < best[0]:
            best = error, windows, chosen
    assert best is not None
    error, windows, chosen = best
    if not names and len(chosen) == 1 and chosen[0].map.kind in ("seasonal", "naive"):
        report("no forecast is better than the seasonal naive in the backtests, so the forecaster is the naive")
    errors["simple forecasts"] = error
    lags = max(one.weights.shape[1] for one in chosen)
    weights = np.mean([widened(one.weights, lags) for one in chosen], 0)
    forecasts = [np.mean(parts, 0) for parts in zip(*(one.forecasts for one in chosen), strict=True)]
    channels = len(source.targets)
    options: dict[str, Any] = {
        "log": windows.log,
        "span": span,
        "lags": lags,
        "start": [str(one.map) for one in chosen],
        "distribution": "quantiles",
        "sequence_length": max(2 * lags, 64),
        "calibrated": False,
        "steps": 0,
        **NEURAL,
    }
    options |= {name: value for name, value in fixed.items() if name in OPTIONS}
    return Choice(options, errors, weights, _quantiles(windows, forecasts, channels), seconds=time.monotonic() - began)


def fitted(source: SeriesSource, choice: Choice, seed: int) -> Forecaster:
    """Return the forecaster of a choice."""
    return begun(source, choice, seed)


def begun(source: SeriesSource, choice: Choice, seed: int) -> Forecaster:
    """Make the forecaster of a choice, which is the simple forecast as long as its stack has learnt nothing."""
    options = choice.options
    stack = StackConfig(**{name: options[name] for name in vars(StackConfig()) if name in options})
    head = {name: options[name] for name in ("lags", "span", "log", "calibrated")}
    torch.manual_seed(seed)
    model = answerer(source.question).model(make_stack(stack), head)
    with torch.no_grad():
        model.lags.weight.zero_()
        model.lags.weight[:, : choice.weights.shape[1]] = torch.from_numpy(choice.weights)
        model.head.weight.zero_()
        bias = torch.from_numpy(choice.quantiles).transpose(0, 1)  # (H, C, Q)
        model.head.bias.copy_(bias.reshape(-1))
    model.lags.weight.requires_grad_(False)
    return model.eval()


def _may_log(fixed: Mapping[str, Any]) -> bool:
    return fixed.get("distribution", "quantiles") in ("points", "quantiles")


def _sizes(past: Past, fixed: Mapping[str, Any]) -> list[int]:
    """Return the numbers of last values that simple forecasts may read."""
    if fixed.get("lags"):
        return [int(fixed["lags"])]
    season = past.season
    most = max(1, int(past.borders[0] * np.median(past.ends)) - past.horizon)
    most = min(most, int(fixed.get("sequence_length", most)))
    wide = (7 * season + 1,) if season >= 24 and season < 52 else (5, 9, 17)
    return sorted({min(size, most) for size in (season + 1, season + 13, 2 * season + 1, 4 * season + 1, *wide)})


def _trials(windows: Windows, sizes: list[int]) -> list[Trial]:
    """Measure all simple forecasts, and ridges about the best of them, the last value and zero."""
    season = windows.past.season
    trials: dict[LagMap, Trial] = {}
    for size in sizes:
        for one in candidates(size, season):
            if one not in trials and (measured := trial(windows, one)) is not None:
                trials[one] = measured
        best = min((one for one in trials.values() if one.map.kind != "ridge"), key=lambda one: one.error)
        for prior in dict.fromkeys([best.map, LagMap("naive", ()), LagMap("zero", ())]):
            for penalty in PENALTIES:
                one = LagMap("ridge", (size, penalty), prior)
                if one.lags(season) <= windows.lags and (measured := trial(windows, one)) is not None:
                    trials[one] = measured
    return list(trials.values())


def _quantiles(windows: Windows, forecasts: list[Numbers], channels: int) -> Numbers:
    """Return the quantiles (C, H, Q) of the errors in the backtests, in units of the running scale.

    If a step ahead has few errors, its quantiles have the shape that the errors of all steps have, and its own mean
    absolute error as their unit. The median is 0.
    """
    left = np.concatenate([windows.came[rows] - f for f, (_, rows) in zip(forecasts, windows.folds, strict=True)])
    channel = np.concatenate([windows.array[rows] for _, rows in windows.folds]) % channels
    levels, tables = np.array(LEVELS), []
    for k in range(channels):
        of_channel = left[channel == k]
        unit = np.nanmean(np.abs(of_channel), 0)
        unit = np.where(np.isnan(unit), np.nanmean(np.abs(of_channel)), unit)
        unit = np.maximum(unit, 1e-9)
        shape = np.nanquantile(of_channel / unit, levels)
        own = np.nanquantile(of_channel, levels, axis=0).T
        many = (~np.isnan(of_channel)).sum(0) >= ENOUGH
        table = np.where(many[:, None], own, unit[:, None] * shape)
        table = np.where(levels < 0.5, np.minimum(table, 0), np.maximum(table, 0))
        table[:, LEVELS.index(0.5)] = 0
        tables.append(np.nan_to_num(table))
    return np.stack(tables)
