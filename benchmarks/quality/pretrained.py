"""Forecast tables by the model in the package, at the origins of `tables`, beside the seasonal naive and fracast.

    python benchmarks/quality/pretrained.py [NAME ...] [--tables FOLDER] [--quick]

FOLDER is as in `tables`. The model reads at most 2,048 steps before the first origin of a series, and no covariates.
fracast 0.1.0 (PyPI) reads as many steps as it takes; without it, its column is empty. The scores are the MASE of the
median, and how often the numbers are in the intervals of 80 and of 90 %. `--quick` forecasts the smallest table.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from quality.tables import TABLES, Known
from scanl.data.base import LEVELS
from scanl.data.series.table import Table
from scanl.data.splits import TEST
from scanl.learning.forecasting.untrained import MAX_STEPS, seasons_of
from scanl.models import pretrained_forecaster

PROBABILITIES = (0.05, 0.1, 0.5, 0.9, 0.95)
MIN_KNOWN = 8  # values that fracast needs
ROWS = 64  # origins that fracast forecasts at once


def source_of(known: Known, folder: Path) -> Table:
    """Return the table of a command without its covariates."""
    named: dict[str, list[str]] = {}
    for word in known.options.split():
        if word.startswith("--"):
            named[word.removeprefix("--")] = []
        else:
            list(named.values())[-1].append(word)
    options: dict[str, Any] = {name: values[0] for name, values in named.items() if name != "past"}
    return Table([folder / known.path], "forecast", **{**options, "horizon": int(options["horizon"])})


def measured(known: Known, folder: Path) -> dict[str, Any]:
    """Return the scores of the model, of the seasonal naive and of fracast at the origins of the test part."""
    source, model = source_of(known, folder), pretrained_forecaster()
    asking, horizon = source.asking, source.horizon
    origins = asking.origins(TEST)
    lasts: dict[int, list[int]] = {}
    for i, _, last in origins:
        lasts.setdefault(i, []).append(last)
    errors, rival, inside, seconds = [], [], [], 0.0
    for i, ends in lasts.items():
        begin = max(0, min(ends) + 1 - MAX_STEPS)
        after = np.array(ends) - begin
        for channel, y in enumerate(asking.windows.series[i].target[begin : max(ends) + 1].T):
            target = asking.windows.series[i].target[:, channel]
            came = np.stack([target[end + 1 : end + 1 + horizon] for end in ends])
            unit, clock = asking.units[i][channel], time.process_time()
            state = model.init_state(1, season=seasons_of(source))
            answers, _ = model.each(y[None].copy(), state, after, horizon=horizon, levels=PROBABILITIES)
            seconds += time.process_time() - clock
            errors.append(np.abs(came - answers[0, ..., 2]) / unit)
            of_rival = _fracast(y, after, horizon)
            rival.append(np.abs(came - (np.full_like(came, np.nan) if of_rival is None else of_rival)) / unit)
            there = ~np.isnan(came)
            within = [(came >= answers[0, ..., k]) & (came <= answers[0, ..., 4 - k]) for k in (1, 0)]
            inside.append(np.stack([one[there] for one in within], 1))
    naive = asking.naive(origins)[..., LEVELS.index(0.5)]
    came = np.stack([asking.windows.series[i].target[last + 1 : last + 1 + horizon] for i, _, last in origins])
    units = np.stack([asking.units[i] for i, *_ in origins])[:, None]
    of_naive = float(np.nanmean(np.abs(came - naive) / units))
    of_model, of_rival = np.concatenate(errors), np.concatenate(rival)
    mase = float(np.nanmean(of_model))
    of_fracast = np.nan if np.isnan(of_rival).all() else float(np.nanmean(of_rival))
    inside_80, inside_90 = np.concatenate(inside).mean(0)
    return {
        "MASE": mase, "naive": of_naive, "ratio": mase / of_naive, "fracast": of_fracast / of_naive,
        "coverage_80": inside_80, "coverage_90": inside_90, "forecasts": len(origins), "processor": seconds,
        "options": known.options,
    }  # fmt: skip


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
    made = parser(__doc__, TABLES, threads=1)
    made.add_argument("--tables", type=Path, default=Path("/tmp/tables/pkg"), metavar="FOLDER")
    options: argparse.Namespace = parse(made)
    torch.set_num_threads(options.threads)
    results = Results("pretrained", options)
    for name in ["iowa"] if options.quick else options.names:
        if not results.has(table=name):
            results.add(table=name, **measured(TABLES[name], options.tables))


if __name__ == "__main__":
    main()
