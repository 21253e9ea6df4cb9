"""A picture of forecasts: the end of each series, what follows, and the intervals, with dates and names."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scanl.data.series.columns import grouped, numbers
from scanl.data.series.table import Table
from scanl.data.series.times import times
from scanl.errors import DataError
from scanl.learning.run.picture import FORECAST, PAST, save_figure, show_dates

MAX_PANELS = 12  # panels
YEARS = (2, 9998)  # that matplotlib draws, with a margin


def save_forecasts(path: Path, rows: Any, forecast: Any, table: Table) -> Path:
    """Write a picture with a panel for each series and target, the first `MAX_PANELS` of them.

    rows: of the table, before the forecast.   forecast: what `scanl.learning.forecast` returns.
    """
    from matplotlib.figure import Figure

    groups = grouped(forecast, path, table.series_columns)
    panels = [(name, places, target) for name, places in groups for target in table.targets]
    past = dict(grouped(rows, table.path, table.series_columns))
    columns = min(len(panels[:MAX_PANELS]), 1 if len(panels) < 3 else 2 if len(panels) < 7 else 3)
    height = math.ceil(len(panels[:MAX_PANELS]) / columns)
    figure = Figure(figsize=(9 if columns == 1 else 5.2 * columns, 0.9 + 2.9 * height), layout="constrained")
    all_axes = figure.subplots(height, columns, squeeze=False).flatten()
    for axes, (name, places, target) in zip(all_axes, panels, strict=False):
        ahead = forecast.iloc[places]
        history = rows.iloc[past[name][-(4 * len(ahead) + 20) :]]
        _draw(axes, history, ahead, target, table)
        axes.set_title(", ".join(filter(None, [name, target if len(table.targets) > 1 or not name else ""])))
        if table.time is not None and times(forecast, path, table.time)[1].dates:
            show_dates(axes)
        else:
            axes.set_xlabel(table.time or "steps from now")
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.legend(*all_axes[0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")
    if len(panels) > MAX_PANELS:
        figure.suptitle(f"the first {MAX_PANELS} of {len(panels)} forecasts")
    return save_figure(figure, path)


def _draw(axes: Any, history: Any, ahead: Any, target: str, table: Table) -> None:
    """Draw a forecast on one matplotlib axes, joined to the last number before it."""
    values = numbers(history, table.path, target, "the target")
    if table.time is None:
        then, now = np.arange(1 - len(history), 1), np.arange(1, len(ahead) + 1)
    else:
        then, now = (_clock(frame, table) for frame in (history, ahead))
    axes.plot(then, values, color=PAST, lw=1.2, label="the table")
    last = np.flatnonzero(~np.isnan(values))[-1:]
    start, value = then[last], values[last]
    for level, shade in zip(levels := _levels(ahead, target), np.linspace(0.3, 0.15, len(levels)), strict=True):
        low, high = (np.concatenate([value, ahead[f"{target}-{side}-{level}"]]) for side in ("lo", "hi"))
        axes.fill_between(
            np.concatenate([start, now]), low, high, color=FORECAST, alpha=shade, lw=0, label=f"{level} % interval"
        )
    axes.plot(
        np.concatenate([start, now]), np.concatenate([value, ahead[target]]), color=FORECAST, lw=1.6, label="median"
    )
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)


def _levels(forecast: Any, target: str) -> Sequence[str]:
    """Return the levels of the intervals, the narrowest first."""
    names = (re.fullmatch(rf"{re.escape(target)}-lo-([\d.e+-]+)", name) for name in forecast.columns)
    return sorted((match[1] for match in names if match), key=float)


def _clock(frame: Any, table: Table) -> Any:
    """Return the times of rows as matplotlib draws them: dates by the clock on the wall, or numbers."""
    assert table.time is not None
    clock = times(frame, table.path, table.time)[1]
    if clock.dates and not YEARS[0] <= clock.wall.year.min() <= clock.wall.year.max() <= YEARS[1]:
        raise DataError(
            f"table: {table.path} has dates outside of the years {YEARS[0]} to {YEARS[1]}, expected others because "
            "matplotlib draws no such dates; leave out the picture"
        )
    return clock.wall.to_numpy() if clock.dates else clock.marks
