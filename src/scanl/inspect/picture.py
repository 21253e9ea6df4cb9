"""The picture and the CSV file of inspections, of one layer or of several: over depth, over training."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scanl.errors import ConfigError
from scanl.files import written_whole
from scanl.inspect.base import Inspection

MAX_PANELS = 12  # panels
PANELS_A_ROW = 3


def picture(inspections: Inspection | Mapping[str, Inspection], title: str = "") -> Any:
    """Return a matplotlib Figure with the panels of each inspection, at most 12.

    inspections: one, or several of one inspector by name, such as the layers of a model or the steps of a training.
    Raises ConfigError for none.
    """
    from matplotlib.figure import Figure

    if isinstance(inspections, Inspection):
        inspections = {"": inspections}
    panels = [
        (" ".join(filter(None, [name, panel])), draw)
        for name, inspection in inspections.items()
        for panel, draw in inspection.panels().items()
    ]
    if not panels:
        raise ConfigError("picture: inspections is empty, expected at least one")
    shared = all(inspection.shared for inspection in inspections.values())
    shown = panels[:MAX_PANELS]
    across = min(len(shown), PANELS_A_ROW)
    down = math.ceil(len(shown) / across)
    figure = Figure(figsize=(6.4 if across == 1 else 4.2 * across, 0.5 + 3.5 * down), layout="constrained")
    every = figure.subplots(down, across, squeeze=False, sharex=shared, sharey=shared).flatten()
    for axes, (name, draw) in zip(every, shown, strict=False):
        draw(axes)
        axes.set_title(name, fontsize=10, loc="left")
    for axes in every[len(shown) :]:
        axes.set_visible(False)
    for axes in every[: len(shown)]:
        axes.tick_params(labelbottom=True, labelleft=True)
    more = f"the first {MAX_PANELS} of {len(panels)} panels" if len(panels) > MAX_PANELS else ""
    figure.suptitle("; ".join(filter(None, [title, more])))
    return figure


def save_picture(path: Path, inspections: Inspection | Mapping[str, Inspection], title: str = "") -> Path:
    """Write the picture as PNG; needs no display."""
    figure = picture(inspections, title)
    with written_whole(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return path


def save_columns(path: Path, inspections: Inspection | Mapping[str, Inspection]) -> Path:
    """Write the data as CSV: the columns of each inspection, after a column `layer` with its name."""
    if isinstance(inspections, Inspection):
        inspections = {"": inspections}
    with written_whole(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for number, (name, inspection) in enumerate(inspections.items()):
            columns = inspection.columns()
            if number == 0:
                writer.writerow(["layer", *columns])
            writer.writerows([name, *row] for row in zip(*columns.values(), strict=True))
    return path
