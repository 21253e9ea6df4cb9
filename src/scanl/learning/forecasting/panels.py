"""Forecasts of a folder of Parquet files by the model in the package: partition by partition, without training."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scanl.data.series.columns import write_table
from scanl.errors import ConfigError
from scanl.files import check_new_folder, writing, written_whole
from scanl.learning.forecasting.untrained import HistoryTable, UntrainedForecasts, guessed, seasons_of

PARTITION = ".parquet"
RECORD = "forecast.json"  # what was asked, and what the first partition decided


def partitions_of(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder and of the folders in it, without those that begin with a dot or _."""
    return sorted(path for path in folder.rglob(f"*{PARTITION}") if path.name[0] not in "._")


class PanelFolder:
    """A panel that is larger than a machine: a folder of Parquet files, each of which has all rows of its series.

    A partition is read, forecast and written by itself, so memory is that of the largest one. Its forecasts have its
    name in the folder `out`, which has the whole file or none: the same call goes on where another was interrupted.
    The first partition decides the columns that are not given, and the season.

    given: target, time, series, season and freq, as of a table; None for each that is to be found.
    levels: per cents of the intervals; None: 80 and 95.

    Raises ConfigError for a folder without a partition, and for an `out` inside of it, or of other options.
    """

    def __init__(
        self, folder: Path, out: Path, horizon: int, levels: Sequence[float] | None = None, **given: Any
    ) -> None:
        self.folder, self.out, self.horizon, self.levels = folder, out, horizon, levels
        self.partitions = partitions_of(folder)
        if not self.partitions:
            raise ConfigError(f"forecast: {folder} has no run and no file of {PARTITION}, expected one of them")
        if out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"forecast: out is {out}, expected a folder outside of {folder}, all of whose files are read"
            )
        asked = {"horizon": horizon, "levels": None if levels is None else list(levels), **given}
        record = out / RECORD
        if record.exists():
            known = json.loads(record.read_text(encoding="utf-8"))
            if known["asked"] != asked:
                names = [name for name in asked if asked[name] != known["asked"].get(name)]
                raise ConfigError(
                    f"forecast: out is {out}, which has forecasts of another {' and '.join(names)}; name another folder"
                )
        else:
            check_new_folder("forecast", "out", out)
            target, time, series = guessed(self.partitions[0], given["target"], given["time"], given["series"])
            columns = {
                "target": target,
                "time": time,
                "series": series,
                "season": given["season"],
                "freq": given["freq"],
            }
            seasons = seasons_of(self._table(self.partitions[0], columns))
            known = {"asked": asked, "columns": columns, "seasons": seasons}
            with writing(record):
                out.mkdir(parents=True, exist_ok=True)
            with written_whole(record) as temporary:
                temporary.write_text(json.dumps(known), encoding="utf-8")
        self.columns, self._seasons = known["columns"], tuple(known["seasons"])

    def _table(self, partition: Path, columns: dict[str, Any]) -> HistoryTable:
        target, options = columns["target"], {name: value for name, value in columns.items() if name != "target"}
        return HistoryTable(
            [str(partition)], "forecast", target, horizon=self.horizon, distribution="quantiles", **options
        )

    def run(self) -> Iterator[Path]:
        """Write the forecasts of the partitions that have none, and yield the files."""
        for partition in self.partitions:
            file = self.out / partition.relative_to(self.folder)
            if file.exists():
                continue
            forecasts = UntrainedForecasts.of(self._table(partition, self.columns))
            frame = replace(forecasts, seasons=self._seasons).after(self.levels)
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
            write_table(frame, file)
            yield file
