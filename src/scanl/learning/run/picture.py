"""Draw the loss curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scanl.data.base import Source
from scanl.files import written_whole
from scanl.learning.run.folder import RunFolder

Rows = Sequence[Mapping[str, Any]]


def draw_loss(axes: Any, rows: Rows, source: Source) -> None:
    """Draw the metric on training batches and on unseen examples against the step, on one matplotlib axes."""
    assert source.comparable is not None
    axes.plot(*_curve(rows, source.comparable), lw=1, color="#9ecae1", label=f"{source.noun} it learns from")
    unseen = f"sample of {source.noun} it has never seen"
    axes.plot(*_curve(rows, source.measured), "o-", ms=4, color="#08519c", label=unseen)
    wanted = "more" if source.higher_is_better else "less"
    axes.set(xlabel="training step", ylabel=f"{source.metric} ({wanted} is better)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_score(loss: Any, score: Any, rows: Rows, source: Source) -> None:
    """Draw the training loss on one axes, and the score on unseen examples, with chance and best, on another."""
    loss.plot(*_curve(rows, "loss"), lw=1, color="#9ecae1")
    loss.set(xlabel="training step", ylabel="loss on what it learns from", yscale="log")
    score.plot(*_curve(rows, source.measured), "o-", ms=4, color="#08519c")
    for value, name, style in ((source.chance, "chance", "--"), (source.best, "best", "-")):
        if value is not None:
            score.axhline(value, lw=1, ls=style, color="#636363", label=name)
    score.set(xlabel="training step", ylabel=f"{source.metric} on examples it has never seen")
    score.legend(frameon=False)
    for axes in (loss, score):
        axes.grid(alpha=0.3, which="both")


def _curve(rows: Rows, column: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a column has a value, and the values."""
    found = [(int(row["step"]), float(row[column])) for row in rows if row[column] != ""]
    return [step for step, _ in found], [value for _, value in found]


def save_loss_curve(folder: RunFolder, rows: Rows, title: str, source: Source) -> Path:
    """Write loss.png: one plot if loss and measurements are comparable, else two side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if source.comparable is None else 7, 4.2), layout="constrained")
    if source.comparable is None:
        loss, score = figure.subplots(1, 2)
        draw_score(loss, score, rows, source)
    else:
        draw_loss(figure.add_subplot(), rows, source)
    figure.suptitle(title)
    return save_figure(figure, folder.picture)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path
