"""Forecast what follows the last row of a CSV file, and see first how good such forecasts were.

    python forecast_table.py sales.csv --time month --target sales --horizon 12

Needs `pip install -e '.[series,sklearn]'`. Without a file it reads the weekly carbon dioxide at Mauna Loa, which the
package statsmodels has.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from scanl.learning.forecasting.frames import Frames

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", nargs="?", type=Path, help="CSV with a line of names")
parser.add_argument("--time", default="date", help="column of the times")
parser.add_argument("--target", default="co2", help="column of the numbers")
parser.add_argument("--series", help="column that names the series of a row; without it there is one series")
parser.add_argument("--horizon", type=int, default=26, help="rows to forecast")
parser.add_argument("--minutes", type=float, default=0.5, help="for choosing among forecasts by backtests")
parser.add_argument("--out", type=Path, default=Path("future.csv"))


def read(options: argparse.Namespace) -> pd.DataFrame:
    """Return the rows with the names of columns that `Frames` reads: unique_id, ds, y."""
    if options.file is None:
        from statsmodels.datasets import co2

        table = co2.load_pandas().data.rename_axis("date").reset_index()
    else:
        table = pd.read_csv(options.file)
    names = table[options.series] if options.series else options.target
    return pd.DataFrame({"unique_id": names, "ds": pd.to_datetime(table[options.time]), "y": table[options.target]})


def main() -> None:
    options = parser.parse_args()
    frame = read(options)

    # Two forecasts from the past, each by a model that has read only the rows before it.
    model = Frames(options.horizon, minutes=options.minutes)
    past = model.cross_validation(frame, n_windows=2, step=options.horizon)
    error = (past["y"] - past["scanl"]).abs().mean()
    change = frame.groupby("unique_id")["y"].apply(lambda y: y.diff(options.horizon).abs().mean()).mean()
    print(f"mean error of {options.horizon} steps ahead: {error:.3g}; the numbers themselves move by {change:.3g}")

    model.fit(frame)
    future = model.predict(levels=[80, 95])
    future.to_csv(options.out, index=False)
    print(future.head(3).to_string(index=False))
    inside = np.mean((past["y"] >= past["scanl-lo-80"]) & (past["y"] <= past["scanl-hi-80"]))
    print(f"{options.out} has {len(future)} rows; of the past ones {inside:.0%} lay in the interval of 80 %")


if __name__ == "__main__":
    main()
