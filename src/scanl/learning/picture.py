"""The loss curve as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scanl.files import written_whole
from scanl.learning.run import RunFolder


def draw_loss(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bits per byte of the training batches and of the held-out text against the step, on a matplotlib axes."""
    steps = [int(row["step"]) for row in rows]
    axes.plot(steps, [float(row["bits_per_byte"]) for row in rows], lw=1, color="#9ecae1", label="training batches")
    held = [(int(r["step"]), float(r["held_out_bits_per_byte"])) for r in rows if r["held_out_bits_per_byte"] != ""]
    axes.plot([step for step, _ in held], [bits for _, bits in held], "o-", ms=4, color="#08519c", label="held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def save_loss_curve(folder: RunFolder, rows: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Write loss.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    draw_loss(axes, rows)
    axes.set_title(title)
    return save_figure(figure, folder.picture)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path
