"""Draw the loss curve, forecasts, and how good the classes and their probabilities are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from scanl.data.base import Source
from scanl.data.batch import Batch
from scanl.data.series.forecast import SeriesForecast
from scanl.data.series.rows import Origin
from scanl.data.series.source import SeriesSource
from scanl.data.splits import TEST
from scanl.files import written_whole
from scanl.learning.forecasting.answer_columns import INTERVALS
from scanl.learning.questions import answerer
from scanl.learning.report import ScoreReport
from scanl.learning.run.folder import RunFolder
from scanl.models import Forecaster

Rows = Sequence[Mapping[str, Any]]
MAX_NAMED_CLASSES = 20  # most classes that are named in a picture
BINS = 10  # of probabilities
PAST, FORECAST = "#636363", "#08519c"
DATES = np.array(["0002-01-01", "9998-12-31"], "datetime64[s]")  # that matplotlib draws, with a margin


def draw_loss(axes: Any, rows: Rows, report: ScoreReport) -> None:
    """Draw the metric on training batches and on unseen examples against the step, on one matplotlib axes."""
    assert report.bits is not None
    axes.plot(*_curve(rows, report.bits), lw=1, color="#9ecae1", label="data it learns from")
    unseen = "sample of data it has never seen"
    axes.plot(*_curve(rows, report.measured), "o-", ms=4, color="#08519c", label=unseen)
    direction = "more" if report.higher_is_better else "less"
    axes.set(xlabel="training step", ylabel=f"{report.metric} ({direction} is better)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_score(loss: Any, score: Any, rows: Rows, report: ScoreReport) -> None:
    """Draw the training loss on one axes, and the score on unseen examples, with chance and best, on another."""
    loss.plot(*_curve(rows, "loss"), lw=1, color="#9ecae1")
    loss.set(xlabel="training step", ylabel="loss on what it learns from", yscale="log")
    score.plot(*_curve(rows, report.measured), "o-", ms=4, color="#08519c")
    for value, name, style in ((report.chance, "chance", "--"), (report.best, "best", "-")):
        if value is not None:
            score.axhline(value, lw=1, ls=style, color="#636363", label=name)
    score.set(xlabel="training step", ylabel=f"{report.metric} on examples it has never seen")
    if score.get_legend_handles_labels()[0]:  # neither is known of some sources
        score.legend(frameon=False)
    for axes in (loss, score):
        axes.grid(alpha=0.3, which="both")


def _curve(rows: Rows, column: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a column has a value, and the values."""
    points = [(int(row["step"]), float(row[column])) for row in rows if row[column] != ""]
    return [step for step, _ in points], [value for _, value in points]


def save_loss_curve(folder: RunFolder, rows: Rows, title: str, report: ScoreReport) -> Path:
    """Write loss.png: one plot if loss and measurements are comparable, else two side by side."""
    from matplotlib.figure import Figure

    width, margin = (10, 1.15) if report.bits is None else (7, 0.8)  # inches
    height = 4.2
    figure = Figure(figsize=(width, height))
    # Margins of our own: a layout of matplotlib draws all of it twice, which takes longer than some steps of training.
    figure.subplots_adjust(margin / width, 0.55 / height, 1 - 0.15 / width, 1 - 0.45 / height, wspace=0.25)
    if report.bits is None:
        loss, score = figure.subplots(1, 2)
        draw_score(loss, score, rows, report)
    else:
        draw_loss(figure.add_subplot(), rows, report)
    figure.suptitle(title)
    return save_figure(figure, folder.picture)


@torch.no_grad()
def save_forecast(path: Path, source: SeriesSource, model: Forecaster) -> Path:
    """Draw the first and the last forecast of the exam, with intervals, and the true numbers."""
    from matplotlib.figure import Figure

    asking = cast(SeriesForecast, source.asking)
    shown = [asking.origins(TEST)[0], asking.origins(TEST)[-1]]
    figure = Figure(figsize=(11, 0.4 + 3.2 * model.targets), layout="constrained")
    panels = figure.subplots(model.targets, 2, squeeze=False)
    for origins, batch in asking.forecasts(TEST):
        for column, origin, which in zip(panels.T, shown, ("first", "last"), strict=True):
            if origin in origins:
                k = origins.index(origin)
                draw_forecast(column, source, model, origin, batch.rows(slice(k, k + 1)).tensors())
                name = source.collection.series[origin[0]].name
                column[0].set_title(f"{name}: {which} forecast of the test part".removeprefix(": "))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=5, loc="outside lower center")
    return save_figure(figure, path)


def draw_forecast(panels: Any, source: SeriesSource, model: Forecaster, origin: Origin, batch: Batch) -> None:
    """Draw the forecast of one example on an axes of matplotlib for each target. origin: of the forecast."""
    i, _, last = origin
    probabilities = [0.5, *(0.5 + side * level / 200 for level in INTERVALS for side in (-1, 1))]
    quantiles = model.predict(batch.inputs, levels=probabilities)[0].quantiles[0]
    read, came, collection = batch.inputs.target[0], batch.targets.numbers[0], source.collection
    read = read[-4 * len(came) - 20 :]
    clock = collection.series[i].times[last + 1 - len(read) : last + 1 + len(came)]
    dates = clock.astype("datetime64[s]")
    dated = collection.dated and DATES[0] <= dates[0] and dates[-1] <= DATES[1]
    clock = dates if dated else clock
    then, now = clock[: len(read)], clock[len(read) :]
    for channel, axes in enumerate(panels):
        median, *bounds = quantiles[:, channel].T
        axes.plot(then, read[:, channel], color=PAST, lw=1.2, label="the table")
        for level, low, high, shade in zip(INTERVALS, bounds[::2], bounds[1::2], (0.3, 0.15), strict=True):
            axes.fill_between(now, low, high, color=FORECAST, alpha=shade, lw=0, label=f"{level:g} % interval")
        axes.plot(now, median, color=FORECAST, lw=1.6, label="median")
        axes.plot(now, came[:, channel], color="#a63603", lw=1.2, label="what came")
        axes.set_ylabel(source.targets[channel])
        axes.margins(x=0.01)
        axes.grid(alpha=0.3)
        if dated:
            show_dates(axes)
        else:
            axes.set_xlabel("time")


def show_dates(axes: Any) -> None:
    """Mark dates on the horizontal axis."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=3, maxticks=7)  # with its 5 no interval fits some spans
    axes.xaxis.set(major_locator=locator, major_formatter=ConciseDateFormatter(locator))


@torch.no_grad()
def save_classes(path: Path, source: Source, model: Any) -> Path:
    """Draw a sample of the exam by true and predicted class, and its accuracy by probability."""
    from matplotlib.figure import Figure

    batches = [batch.tensors() for batch in source.exam(sample=True).examples]
    answers = [answerer(source.question).answers(model, batch) for batch in batches]
    logits, targets = (torch.cat(tensors).cpu() for tensors in zip(*(one[:2] for one in answers), strict=True))
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    confusion, calibration = figure.subplots(1, 2)
    names = source.class_names or [str(k) for k in range(logits.shape[-1])]
    draw_confusion(confusion, logits.argmax(-1), targets, names)
    draw_calibration(calibration, logits.double().softmax(-1), targets)
    return save_figure(figure, path)


def draw_confusion(axes: Any, predicted: Tensor, targets: Tensor, names: Sequence[str]) -> None:
    """Draw on one matplotlib axes which class (n,) was predicted for each true one (n,)."""
    count = len(names)
    table = torch.bincount(targets * count + predicted, minlength=count * count).view(count, count)
    axes.imshow((table / table.sum(1, keepdim=True).clamp(min=1)).numpy(), cmap="Blues", vmin=0, vmax=1)
    if count <= MAX_NAMED_CLASSES:
        axes.set_xticks(range(count), names, rotation=45, ha="right")
        axes.set_yticks(range(count), names)
        for row, column in table.nonzero().tolist():
            dark = table[row, column] > table[row].sum() / 2
            axes.text(column, row, int(table[row, column]), ha="center", va="center", color="w" if dark else "k")
    axes.set(xlabel="predicted class", ylabel="true class")


def draw_calibration(axes: Any, probabilities: Tensor, targets: Tensor) -> None:
    """Draw the accuracy of predictions against their probability. probabilities: (n, classes).   targets: (n,)."""
    sure, predicted = probabilities.max(-1)
    right, bins = (predicted == targets).double(), (sure * BINS).long().clamp(max=BINS - 1)
    counts = torch.bincount(bins, minlength=BINS)
    filled = counts > 0
    means = [(torch.bincount(bins, values, BINS)[filled] / counts[filled]).numpy() for values in (sure, right)]
    axes.plot([0, 1], [0, 1], "--", lw=1, color="#636363", label="calibrated")
    axes.plot(*means, color="#08519c", lw=1.2)
    axes.scatter(*means, (10 + 190 * counts[filled] / counts.max()).numpy(), color="#08519c", label="area: predictions")
    axes.set(xlabel="probability of the predicted class", ylabel="accuracy", xlim=(0, 1.03), ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=130)
    return path
