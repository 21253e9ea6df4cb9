"""The loss curve as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scanl.files import written_whole
from scanl.learning.run.folder import RunFolder
from scanl.tasks import Task


def draw_loss(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bits per byte of the training batches and of the held-out sample against the step, on a matplotlib axes."""
    steps = [int(row["step"]) for row in rows]
    axes.plot(steps, [float(row["bits_per_byte"]) for row in rows], lw=1, color="#9ecae1", label="text it learns from")
    held = [(int(r["step"]), float(r["held_out_bits_per_byte"])) for r in rows if r["held_out_bits_per_byte"] != ""]
    axes.plot(
        [step for step, _ in held],
        [bits for _, bits in held],
        "o-",
        ms=4,
        color="#08519c",
        label="sample of text it has never seen",
    )
    axes.set(xlabel="training step", ylabel="bits per byte (less is better)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_score(loss: Any, score: Any, rows: Sequence[Mapping[str, Any]], task: Task) -> None:
    """The loss of the training batches on one axes, the score of fresh examples between chance and best on another."""
    loss.plot([int(row["step"]) for row in rows], [float(row["loss"]) for row in rows], lw=1, color="#9ecae1")
    loss.set(xlabel="training step", ylabel="loss on what it learns from", yscale="log")
    measured = [(int(row["step"]), float(row["score"])) for row in rows if row["score"] != ""]
    score.plot([step for step, _ in measured], [found for _, found in measured], "o-", ms=4, color="#08519c")
    score.axhline(task.chance, lw=1, ls="--", color="#636363", label="chance")
    score.axhline(task.best, lw=1, color="#636363", label="best")
    score.set(xlabel="training step", ylabel=f"{task.metric} on examples it has never seen")
    score.legend(frameon=False)
    for axes in (loss, score):
        axes.grid(alpha=0.3, which="both")


def save_loss_curve(folder: RunFolder, rows: Sequence[Mapping[str, Any]], title: str, task: Task | None = None) -> Path:
    """Write loss.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2) if task is None else (10, 4.2), layout="constrained")
    if task is None:
        axes = figure.add_subplot()
        draw_loss(axes, rows)
        axes.set_title(title)
    else:
        left, right = figure.subplots(1, 2)
        draw_score(left, right, rows, task)
        figure.suptitle(f"{task.name}: {title}")
    return save_figure(figure, folder.picture)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path
