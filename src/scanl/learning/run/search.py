"""Search for a learning rate: Lightning's finder, which takes steps at higher and higher rates."""

import math
import warnings
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.tuner.tuning import Tuner

from scanl.data.base import Source
from scanl.errors import ConfigError
from scanl.layers import param_groups
from scanl.learning.algorithms import Algorithm
from scanl.learning.questions import Model
from scanl.learning.run.config import TrainConfig
from scanl.learning.run.module import Learning
from scanl.learning.run.picture import save_figure
from scanl.learning.run.run import Run
from scanl.learning.run.trainer import make_trainer
from scanl.options import at_least, checked

LOWEST, HIGHEST = 1e-6, 1.0
MIN_TRIALS = 20  # trials
WINDOW = 0.05  # share of the losses on each side of one that are in its mean


@dataclass(frozen=True)
class SearchResult:
    """The rates that were tried, the loss before the step at each, and the mean of the losses near it.

    lowest: the rate with the lowest mean.   suggestion: a tenth of it; None if no mean is below the first one.
    Lightning's own suggestion is the rate at which the loss falls fastest for each unit of the rate. Because
    neighbouring rates have equal ratios, that is nearly always the lowest rate, so it is not used.
    """

    rates: list[float]
    losses: list[float]
    means: list[float]
    lowest: float
    suggestion: float | None


class InMemory(CheckpointIO):
    """Keep the finder's checkpoint of the initial weights, which Lightning would write into the current folder."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.kept[str(path)] = deepcopy(checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return self.kept[str(path)]

    def remove_checkpoint(self, path: Any) -> None:
        del self.kept[str(path)]


class Search(Learning):
    """Learning with the rates of the finder. Parameters for which a layer sets its own rate keep that rate.

    A loss or a gradient that is not finite ends the search.
    """

    def __init__(self, model: Model, config: TrainConfig, source: Source, algorithm: Algorithm | None = None) -> None:
        super().__init__(model, config, source, algorithm)
        self.rates: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.stepped:
            self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        named = [group.get("lr") for group in param_groups(self.model)]
        self.own = dict(zip(map(id, optimizers["optimizer"].param_groups), named, strict=True))
        return optimizers

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])  # the finder has given this rate to every group
        for group in optimizer.param_groups:
            group["lr"] = self.own[id(group)] or group["lr"]

    def _give_up(self, what: str, where: str) -> None:
        self.trainer.should_stop = True


@checked("lr")
def search(run: Run, trials: Annotated[int, at_least(MIN_TRIALS)] = 100) -> SearchResult:
    """Take `trials` steps from the initial weights. The rates go from `LOWEST` to `HIGHEST` at equal ratios.

    The search ends early when the loss is not finite, or four times the best. Afterwards the weights are the initial
    ones again, and no file is left. The same seed finds the same rates.
    Raises ConfigError for several processes, because each of them would search, and for too few trials.
    """
    if run.config.run.devices != 1:
        raise ConfigError(f"lr: devices is {run.config.run.devices}, expected 1")
    learning = Search(run.model, run.config, run.source, run.algorithm)
    trainer = make_trainer(run.config, trials, checkpoints=InMemory())
    with warnings.catch_warnings():
        # Lightning 2.6 calls torch's tree functions in a way that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        Tuner(trainer).lr_find(learning, min_lr=LOWEST, max_lr=HIGHEST, num_training=trials, update_attr=False)
    return judged(learning.rates, learning.losses)


def judged(rates: list[float], losses: list[float]) -> SearchResult:
    """Smooth the losses at rates of equal ratios, and find the suggestion."""
    known = np.array([loss for loss in losses if math.isfinite(loss)])
    width = max(1, round(WINDOW * len(known)))
    means = np.array([known[max(0, i - width) : i + width + 1].mean() for i in range(len(known))])
    best = int(means.argmin())
    suggestion = rates[best] / 10 if means[best] < means[0] else None
    return SearchResult(rates[: len(known)], known.tolist(), means.tolist(), rates[best], suggestion)


def save_search(found: SearchResult, path: Path, title: str) -> Path:
    """Write a PNG: the losses against the rates, and the suggestion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(found.rates, found.losses, ".", ms=3, color="#9ecae1", label="loss of a batch")
    axes.plot(found.rates, found.means, color="#08519c", lw=1.4, label="mean")
    if found.suggestion is not None:
        axes.axvline(found.suggestion, color="#a63603", ls="--", lw=1, label=f"suggested: {found.suggestion:.2g}")
    axes.set(xscale="log", xlabel="learning rate of the step", ylabel="loss before it", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    return save_figure(figure, path)
