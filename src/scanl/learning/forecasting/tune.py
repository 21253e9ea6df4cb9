r"""Tune the pretrained forecaster on a table: `scanl train --init pretrained`.

The last linear map of the forecaster learns from the rows before the test part, with the loss of its pretraining. Every
other weight stays, so all that it reads is computed once. The mean of the weights before and after is taken. Backtests
decide how long the map learns: it is tuned on the rows before each of them, and measured in it after some numbers of
steps. It is tuned only if that helps in every backtest, by more than chance.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from scanl.data.questions import ForecastQuestion
from scanl.data.series.source import SeriesSource
from scanl.data.splits import sampled
from scanl.errors import ConfigError, counted
from scanl.learning.forecasting.backtests import PastTargets
from scanl.learning.forecasting.choose import GAIN, LEAST_GAIN, MAX_READ_STEPS, MIN_READ_STEPS, READ_SEASONS
from scanl.learning.forecasting.pretraining import AHEAD_COUNT, examples, quantile_losses
from scanl.learning.progress import SILENCE, Progress
from scanl.learning.questions.forecast import ForecastAnswerer
from scanl.learning.run.config import TrainConfig
from scanl.models import PretrainedForecaster, TunedForecaster, pretrained_forecaster
from scanl.models.forecasting.pretrained import MIDDLE
from scanl.models.forecasting.simple_forecasts import Seasons

MINUTES = 1.0  # of a run; the work is bounded by the constants below
TOKENS = 49152  # steps that are read
FORECASTS = 12288  # from which it learns
PIECE_TOKENS = 12288  # steps of windows that are read side by side
WINDOW = 1.5  # steps of a window of a long series, over those that a forecast reads
PAST_STEPS = 24  # steps before the first forecast of a series, at most a sixth of it
MARKS = (10, 20, 40, 80, 160)  # steps of training after which the backtests measure
LR, WARMUP = 1e-3, 10
BORDERS = (0.6, 0.8, 1.0)  # shares of the rows between which the origins of a backtest are
MIN_STRETCHES = 16  # of H steps, to learn from, and in a backtest
CERTAINTY = 2.0  # standard errors of the gain in a backtest, which it has at least
USABLE_OPTIONS = {
    "data", "question", "target", "time", "series", "horizon", "season", "freq", "validation", "test", "init", "out",
    "seed",
}  # fmt: skip


class HeadOutputs(NamedTuple):
    """Forecasts of M numbers of a table, as far as no tuned weight counts.

    head: (M, W), output of the head.   errors: (M, K, 2).   forecasts: (M, K).   target, naive: (M,), in units of the
    series.   factor: (M,), these units in those of the table's errors.   origin, came: (M,), how far in the rows before
    the test part the forecast begins, and the number comes.   stretch: (M,), a number for each series and each H of its
    steps, in which the forecast begins.
    """

    head: Tensor
    errors: Tensor
    forecasts: Tensor
    target: Tensor
    naive: Tensor
    factor: Tensor
    origin: Tensor
    came: Tensor
    stretch: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, past: PastTargets, progress: Progress = SILENCE) -> "HeadOutputs":
        """Read the rows before the test part."""
        model, parts = pretrained_forecaster(), []
        pieces = list(_pieces(past))
        origins = max(1, FORECASTS // min(AHEAD_COUNT, past.horizon) // sum(map(len, pieces)))
        for k, piece in enumerate(pieces):
            progress.at(k / len(pieces), f"reading: {k} of {counted(len(pieces), 'piece')}")
            parts.append(_read(model, past, piece, origins))
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def some(self, which: Tensor) -> "HeadOutputs":
        """Return the forecasts at which a mask is True."""
        return HeadOutputs(*(part[which] for part in self))

    def before(self, border: float) -> "HeadOutputs":
        """Return the forecasts whose numbers come before a share of the rows."""
        return self.some(self.came < border)

    def between(self, begin: float, end: float) -> "HeadOutputs":
        """Return the forecasts that begin at or after a share of the rows, and whose numbers come before another."""
        return self.some((self.origin >= begin) & (self.came < end))

    def loss(self, model: PretrainedForecaster) -> Tensor:
        """Return the mean loss of the pretraining."""
        quantiles = model.weighed(self.head, self.errors, self.forecasts).quantiles
        return quantile_losses(quantiles, self.target, self.naive).mean()

    @torch.no_grad()
    def absolute_errors(self, model: PretrainedForecaster) -> Tensor:
        """Return the absolute errors (M,) of the medians, in units of the table's errors."""
        medians = model.weighed(self.head, self.errors, self.forecasts).quantiles[..., MIDDLE]
        return (self.target - medians).abs() * self.factor


def _read_steps(past: PastTargets) -> int:
    """Return how many steps a forecast reads."""
    return max(MIN_READ_STEPS, min(MAX_READ_STEPS, READ_SEASONS * max(past.season, past.second)))


def _pieces(past: PastTargets) -> Iterator[list[tuple[int, int, int]]]:
    """Yield windows that are read side by side, of about one length: the array, its first row and that after the last.

    A short series is one window. Of a long one there are several, spread over it.
    """
    size = int(WINDOW * _read_steps(past))
    windows: list[tuple[int, int, int]] = []
    room = TOKENS // len(past.arrays)  # of one series
    for i, y in enumerate(past.arrays):
        count = 1 if len(y) <= size else max(1, min(-(-2 * len(y) // size), room // size))
        for begin in np.linspace(max(0, len(y) - size), 0, count).astype(int).tolist():
            windows.append((i, begin, min(len(y), begin + size)))
    most = max(1, TOKENS // max(end - begin for _, begin, end in windows))
    windows = [windows[k] for k in sampled(len(windows), most)]
    windows = [
        (i, begin, end) for i, begin, end in windows if end - begin > 1 and np.isfinite(past.arrays[i][begin:end]).any()
    ]
    windows.sort(key=lambda window: window[2] - window[1])
    piece: list[tuple[int, int, int]] = []
    for window in windows:
        length = window[2] - window[1]
        if piece and ((len(piece) + 1) * length > PIECE_TOKENS or 2 * length > 3 * (piece[0][2] - piece[0][1])):
            yield piece
            piece = []
        piece.append(window)
    if piece:
        yield piece


def _read(
    model: PretrainedForecaster, past: PastTargets, piece: list[tuple[int, int, int]], count: int
) -> tuple[Tensor, ...]:
    """Return the fields of `HeadOutputs` of some windows. count: origins in a window."""
    horizon, longest = past.horizon, max(end - begin for _, begin, end in piece)
    shortest = piece[0][2] - piece[0][1]
    y = np.full((len(piece), longest + horizon), np.nan)
    rows = np.empty(len(piece), np.int64)  # that stand at the first step
    for k, (i, begin, end) in enumerate(piece):
        values = past.arrays[i][begin : end + horizon]
        rows[k] = end - longest
        y[k, longest - (end - begin) :][: len(values)] = values
    is_long = shortest >= int(WINDOW * _read_steps(past))
    first = longest - shortest + (shortest // 3 if is_long else min(PAST_STEPS, shortest // 6))
    origins = np.arange(first, longest - 1)
    origins = origins[sampled(len(origins), count)]
    ahead = np.unique(np.linspace(1, horizon, min(AHEAD_COUNT, horizon)).astype(np.int64))
    seasons = Seasons(np.full(len(piece), past.season), np.full(len(piece), max(past.season, past.second)))
    some = examples(y, seasons, origins, np.tile(ahead, (len(origins), 1)), horizon)
    hidden, _ = model.hidden(some.told, some.seasons)
    features, errors, forecasts = some.parts
    hidden = hidden[:, torch.from_numpy(origins), None].expand(-1, -1, len(ahead), -1)
    head = model.head(torch.cat([hidden, features.to(hidden.dtype)], -1))
    arrays = np.array([i for i, _, _ in piece])
    lengths, of_table = np.array(past.ends)[arrays], np.array(past.units)[arrays]
    begun = rows[:, None] + origins
    factor = (some.unit / torch.from_numpy(of_table)[:, None])[..., None].expand(some.target.shape)
    came = (begun[..., None] + ahead) / lengths[:, None, None]
    stretches = (arrays[:, None] << 32) + begun // horizon
    of_origins = [np.repeat(part[..., None], len(ahead), 2) for part in ((begun + 1) / lengths[:, None], stretches)]
    shares = [torch.from_numpy(part) for part in (of_origins[0], came, of_origins[1])]
    valid = some.valid & some.told.is_known[:, torch.from_numpy(origins), None]  # a forecast in a gap is of more steps
    flat = (head, errors, forecasts, some.target, some.naive, factor)
    return *(part[valid].float() for part in flat), *(share[valid] for share in shares)


class _Descent:
    """The training of the last linear map."""

    def __init__(self, reading: HeadOutputs) -> None:
        self.reading, self.done = reading, 0
        self.model, self.mean = (copy.deepcopy(pretrained_forecaster()).float() for _ in range(2))
        self.parameters = list(self.model.output.requires_grad_(True).parameters())
        self.optimizer = torch.optim.Adam(self.parameters, LR, betas=(0.9, 0.98))

    def go(self, step: int) -> PretrainedForecaster:
        """Go on until a step, and return the model with the mean of the weights before the first step and now.

        Source: Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, with their coefficient of 0.5.
        """
        for k in range(self.done, step):
            for group in self.optimizer.param_groups:
                group["lr"] = LR * min(1.0, (k + 1) / WARMUP)
            self.optimizer.zero_grad()
            self.reading.loss(self.model).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
        self.done = step
        before = pretrained_forecaster().output.parameters()
        with torch.no_grad():
            for mean, first, now in zip(self.mean.output.parameters(), before, self.parameters, strict=True):
                mean.copy_((first + now) / 2)
        return self.mean


@dataclass
class Tuning:
    """What the backtests have chosen.

    options: by their names in `TrainConfig`.   reading: from which is learnt.   steps: 0 for the model as it is.
    ratios: error of the tuned model over that of the model as it is, in each backtest, by steps.
    """

    options: dict[str, Any]
    reading: HeadOutputs
    steps: int
    ratios: dict[int, list[float]] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """What was chosen, and the error that it had in the backtests."""
        if not self.ratios:
            return "chosen: the model in the package as it is; the table is too short to tune it"
        if not self.steps:
            least = min(float(np.mean(ratios)) for ratios in self.ratios.values())
            return (
                f"chosen: the model in the package as it is; tuned, it has {least:.3f} of its error in the backtests "
                f"at best, expected {GAIN:g} at most, and in each {LEAST_GAIN:g} and {CERTAINTY:g} standard errors less"
            )
        ratio = float(np.mean(self.ratios[self.steps]))
        return f"chosen: {self.steps} steps; in the backtests the tuned model has {ratio:.3f} of its error before"

    def table(self) -> str:
        """Return the ratios as lines of CSV."""
        count = max((len(ratios) for ratios in self.ratios.values()), default=0)
        lines = [",".join([f"{steps}", *(f"{ratio:.6g}" for ratio in ratios)]) for steps, ratios in self.ratios.items()]
        return "\n".join([",".join(["steps", *(f"backtest {k + 1}" for k in range(count))]), *lines, ""])


def check(config: TrainConfig, fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that do not go with the tuning. fixed: those of the command, by name."""
    config.check()
    usual = TrainConfig().options()
    for name, value in fixed.items():
        if name in USABLE_OPTIONS or value == usual[name]:
            continue
        if name in ("past", "future", "static", "holidays", "gaps"):
            raise ConfigError(
                f"train: {name} is {value}, expected none because the model in the package reads no covariates; leave "
                "out --init, and a model is trained that does"
            )
        raise ConfigError(
            f"train: {name} is {value}, expected none because init is pretrained: backtests decide how the model in "
            f"the package is tuned; leave out --{name.replace('_', '-')}, or --init"
        )


def choose(source: SeriesSource, fixed: Mapping[str, Any], minutes: float, progress: Progress = SILENCE) -> Tuning:
    """Choose the number of steps by backtests.   fixed, minutes: are not read.   progress: as in `choose.choose`."""
    past = PastTargets.of(source)
    progress.note(f"reading the rows before the test part of {source.described}")
    reading = HeadOutputs.of(past, progress.part(0.0, 0.5))
    options = {"distribution": "quantiles", "sequence_length": _read_steps(past)}
    steps, ratios = backtested(reading, BORDERS, progress.part(0.5, 1.0))
    return Tuning(options, reading, steps, ratios)


def backtested(
    reading: HeadOutputs, borders: Sequence[float], progress: Progress = SILENCE
) -> tuple[int, dict[int, list[float]]]:
    """Return the number of steps with the lowest mean error in backtests, and the ratios of the errors.

    borders: shares of the rows between which the origins of each backtest are.
    """
    ratios: dict[int, list[float]] = {}
    certain = set(MARKS)
    for k, (begin, end) in enumerate(pairwise(borders)):
        learnt, measured = reading.before(begin), reading.between(begin, end)
        if min(len(part.stretch.unique()) for part in (learnt, measured)) < MIN_STRETCHES:
            return 0, {}
        training = _Descent(learnt)
        before = measured.absolute_errors(training.mean)
        for j, step in enumerate(MARKS):
            progress.at((k + j / len(MARKS)) / (len(borders) - 1), f"backtests: {k} of {len(borders) - 1}")
            after = measured.absolute_errors(training.go(step))
            ratios.setdefault(step, []).append(float(after.mean() / before.mean()) if before.any() else 1.0)
            if not _is_certain(before - after, measured.stretch):
                certain.discard(step)
    means = {step: float(np.mean(some)) for step, some in ratios.items()}
    able = [step for step, mean in means.items() if mean <= GAIN and max(ratios[step]) <= LEAST_GAIN]
    return min(certain.intersection(able), key=means.__getitem__, default=0), ratios


def _is_certain(gains: Tensor, stretch: Tensor) -> bool:
    """Return whether the mean gain is some standard errors above 0; those of one stretch count as one number."""
    numbers, places = stretch.unique(return_inverse=True)
    sums = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, places, gains.double())
    return bool(sums.mean() * math.sqrt(len(sums)) >= CERTAINTY * sums.std())


def fitted(source: SeriesSource, choice: Tuning, seed: int, progress: Progress = SILENCE) -> TunedForecaster:
    """Return the forecaster of a choice, tuned on all rows before the test part. Nothing is drawn from the seed."""
    progress.at(0.0, "tuning")
    model = ForecastAnswerer(cast(ForecastQuestion, source.question)).tuned()
    model.forecaster.load_state_dict(_Descent(choice.reading).go(choice.steps).state_dict())
    return model.eval()
