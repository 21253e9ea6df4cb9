"""Train the pretrained forecaster on simulated series: one command, in pieces, on one core.

    python -m scanl.learning.forecasting.pretraining FOLDER [--minutes 40] [--steps 5000] [--seed 0]

FOLDER keeps the weights, the optimizer and the number of steps; the same command goes on where the last piece ended.
A step draws series of one length, reads them, and measures forecasts from some of their steps, by the pinball loss of
all quantiles in units of the seasonal naive's errors so far, as many steps ahead. The file of the model has half
precision. Of four layers, hawk, lru, gated_deltanet and slstm, trained for 450 steps, hawk was the fastest; their
losses were alike.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scanl.models import Stack
from scanl.models.forecasting import simple_forecasts
from scanl.models.forecasting.pretrained import MIDDLE, QUANTILES, PretrainedForecaster, ahead_features, units
from scanl.models.forecasting.simple_forecasts import Counts, Numbers, Seasons, SimpleSteps, nothing_read
from scanl.tasks.simulated_series import simulate

LENGTHS = (20, 40, 80, 140, 260, 500, 1000)
SHARES = (0.1, 0.15, 0.2, 0.17, 0.15, 0.13, 0.1)
TOKENS = 12288  # steps of series in a step of training
FORECASTS = 6144  # forecasts in it
HORIZON = 64
AHEAD_COUNT = 8  # numbers of steps ahead from an origin
LR, DECAY, AVERAGE = 2e-3, 0.01, 0.998
SEASONAL = len(simple_forecasts.SMOOTHINGS) + simple_forecasts.OTHERS.index("seasonal")
LEAST_UNIT = 0.05  # in mean absolute differences, in which an error counts
LARGE_LOSS = 5.0  # loss from which on its logarithm counts


class SeriesExamples(NamedTuple):
    """Forecasts after N steps of B series, A steps ahead each, and the numbers that came.

    told: what is known after every step.   seasons: of the series.   parts: as `ahead_features` returns them.
    target: (B, N, A), relative to the last values, in units of the mean absolute differences; 0 where none is known.
    valid: (B, N, A), whether one is.   unit: (B, N), these units.
    """

    told: SimpleSteps
    seasons: Seasons
    parts: tuple[Tensor, Tensor, Tensor]
    target: Tensor
    valid: Tensor
    unit: Tensor

    @property
    def naive(self) -> Tensor:
        """Errors of the seasonal naive before each forecast (B, N, A), the unit of its loss."""
        # Of the past alone: in a unit that knew the future, a series would count less where it surprises, and the
        # quantiles would be too narrow.
        return self.parts[1][..., SEASONAL, :].mean(-1).exp().clamp(min=LEAST_UNIT)


def examples(y: Numbers, seasons: Seasons, origins: Counts, ahead: Counts, horizon: int) -> SeriesExamples:
    """Return examples of series y (B, T + H), the last H steps of which are not read, NaN where missing.

    seasons: of arrays.   origins: (N,), steps, in order.   ahead: (N, A), steps ahead, at most H.
    """
    read = y[:, : y.shape[1] - horizon]
    with np.errstate(over="ignore", invalid="ignore"):
        told, simple, _ = simple_forecasts.read(read, nothing_read(seasons), origins, horizon)
    simple = np.take_along_axis(simple, (ahead - 1)[None, :, None], 3)
    tensors = SimpleSteps(*map(torch.from_numpy, told))
    of_series = Seasons(*map(torch.from_numpy, seasons))
    parts = ahead_features(tensors.after(origins), of_series, torch.from_numpy(simple), ahead)
    came = y[:, origins[:, None] + ahead]
    first = np.nan_to_num(np.nanmedian(np.where(told.is_known, read - told.value, np.nan), 1))
    unit = units(tensors)[:, torch.from_numpy(origins)]
    target = torch.from_numpy(came - first[:, None, None] - told.value[:, origins, None]) / unit[..., None]
    valid = ~target.isnan() & torch.from_numpy(told.scale[:, origins, None] > 0)
    return SeriesExamples(tensors, of_series, parts, target.nan_to_num(), valid, unit)


def quantile_losses(quantiles: Tensor, target: Tensor, unit: Tensor) -> Tensor:
    """Return the losses (·) of quantiles (·, Q): the mean pinball loss in a unit (·), and more for the median."""
    off = (target - quantiles.movedim(-1, 0)) / unit
    levels = off.new_tensor(QUANTILES).reshape(-1, *[1] * target.ndim)
    losses = 2 * torch.maximum(levels * off, (levels - 1) * off)
    losses = losses.mean(0) + 0.25 * losses[MIDDLE]
    large = LARGE_LOSS * (1 + (losses.clamp(min=LARGE_LOSS) / LARGE_LOSS).log())
    return torch.where(losses > LARGE_LOSS, large, losses)


def batch_loss(model: PretrainedForecaster, random: np.random.Generator) -> Tensor:
    """Return the loss on fresh series."""
    steps = int(random.choice(LENGTHS, p=SHARES) * random.uniform(0.7, 1.3))
    count = max(8, TOKENS // steps)
    horizon = min(HORIZON, steps)
    drawn = simulate(random, count, steps + horizon)
    origins = np.sort(
        random.choice(np.arange(2, steps), min(steps - 2, max(2, FORECASTS // count // AHEAD_COUNT)), False)
    )
    ahead = (
        np.exp(random.uniform(0, np.log(horizon + 1), (len(origins), AHEAD_COUNT))).astype(np.int64).clip(1, horizon)
    )
    near = random.integers(1, min(horizon, 32) + 1, ahead.shape)
    ahead = np.where(random.random(ahead.shape) < 0.5, near, ahead)
    some = examples(drawn.y, Seasons(drawn.first, drawn.second), origins, ahead, horizon)
    hidden, _ = model.hidden(some.told, some.seasons)
    hidden = hidden[:, origins, None].expand(-1, -1, AHEAD_COUNT, -1)
    quantiles = model.ahead(hidden, *some.parts).quantiles
    target, valid, naive = (part.to(quantiles.dtype) for part in (some.target, some.valid, some.naive))
    return (quantile_losses(quantiles, target, naive) * valid).sum() / valid.sum().clamp(min=1)


def new_model(seed: int, dim: int = 64, depth: int = 2, layer: str = "hawk", width: int = 128) -> PretrainedForecaster:
    torch.manual_seed(seed)
    return PretrainedForecaster(Stack(dim, depth, layer), width)


def pretrain(folder: Path, minutes: float, steps: int, seed: int, stop: int | None = None, **options: Any) -> None:
    """Go on with the training in a folder until the minutes end, or the steps, or `stop` of them."""
    folder.mkdir(parents=True, exist_ok=True)
    model = new_model(seed, **options)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.98), weight_decay=DECAY)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    file, done = folder / "training.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average, done = saved["average"], saved["done"]
    begin, mean = time.monotonic(), None

    def keep() -> None:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "average": average, "done": done}, file
        )
        other = new_model(seed, **options)
        other.load_state_dict(average)
        other.half().save(folder)

    kept = begin
    while done < (stop or steps) and time.monotonic() - begin < 60 * minutes:
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (done + 1) / 100) * 0.5 * (1 + math.cos(math.pi * done / steps))
        loss = batch_loss(model, np.random.default_rng((seed, done)))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        done += 1
        share = min(AVERAGE, done / (done + 10))
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1 - share) if value.is_floating_point() else average[name].copy_(value)
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if done % 50 == 0:
            print(f"step {done}: {mean:.4f} after {time.monotonic() - begin:.0f} s", flush=True)
        if time.monotonic() - kept > 120:
            keep()
            kept = time.monotonic()
    keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", default="hawk")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pretrain(args.folder, args.minutes, args.steps, args.seed, layer=args.layer, dim=args.dim, depth=args.depth)


if __name__ == "__main__":
    main()
