"""Choose a forecaster for a table: backtests on the rows before the test part decide every option that is not fixed.

1. Simple forecasts are linear maps of the last values (`lag_maps`). The seasonal naive is one of them. They are
   compared at rolling origins, for the numbers and for their logarithms, and the mean of the best ones is the map
   `lags` of the forecaster. It stays as it is.
2. A stack learns what the simple forecast leaves. It is trained on the rows before a backtest and measured in it. The
   step with the lowest mean error counts. If that is the first one, the simple forecast stands alone.
3. The pretrained forecaster (`scanl.models.pretrained_forecaster`) has a share in the mean: about a half, and the more
   rows there are, the more the backtests decide.
4. The quantiles of the simple forecast come from errors in the backtests: in each of them, those of the forecast that
   the other backtests choose. They are in units of the recent errors before an origin (`recent_errors`). If a stack
   has learnt, the errors of its forecasts give further factors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from scanl.data.base import LEVELS
from scanl.data.batch import Batch
from scanl.data.series.forecast import MAX_FORECASTS, SeriesForecast
from scanl.data.series.source import SeriesSource
from scanl.data.splits import TEST, VALIDATION, Piece, sampled
from scanl.errors import ConfigError, counted
from scanl.learning.descent import descend, seeded
from scanl.learning.forecasting.backtests import (
    FOLDS,
    MAX_FITTED_ORIGINS,
    MAX_MEASURED_ORIGINS,
    BacktestWindows,
    PastTargets,
    Trial,
    combined,
    mean,
    mean_error,
    mean_weights,
    trial,
)
from scanl.learning.forecasting.intervals import MIN_ERRORS, Intervals
from scanl.learning.forecasting.lag_maps import LagMap, Numbers, candidates, widened
from scanl.learning.forecasting.work import Plan, of_forecasts, of_pretrained, of_simple, of_step
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.progress import SILENCE, Progress
from scanl.learning.questions import answerer
from scanl.learning.questions.base import means
from scanl.learning.run.config import OPTIONS, StackConfig, TrainConfig, fitting_stack, make_stack
from scanl.learning.run.plan import RunLength, rate
from scanl.models import Forecaster, Normalization, Stack, pretrained_forecaster
from scanl.models.forecasting.recent_errors import further_lags
from scanl.options import options as options_of

MINUTES = 2.0  # of a run, if nothing else is said
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
LEAST_ROWS = 500  # of a table from which a stack can learn
STACK = {"dim": 16, "depth": 1, "layer": "hawk", "batch_size": 16, "lr": 3e-3, "weight_decay": 0.01}
STEPS = 240
MARKS = 6  # measurements of a stack while it learns
MEASURED_FORECASTS = 192  # forecasts in one of them
GAIN, LEAST_GAIN = 0.98, 0.99  # ratios of the errors after and before training: their mean, and that in each backtest
FACTORS = (0.3, 4.0)  # bounds of the calibration
SHARES = np.arange(0.025, 1.0, 0.05)  # of the pretrained forecaster
PRIOR = 2.0  # both parameters of the beta distribution of its share before the backtests
LEAST_SHARE = 0.05  # below this it has none
MAX_SHARE_ORIGINS = 96  # in a backtest, at which it is measured
MIN_READ_STEPS, MAX_READ_STEPS, READ_SEASONS = 512, 2048, 6  # that it reads before a forecast

BY_BACKTESTS = "chosen by backtests"
DEFAULTS: Mapping[str, Any] = {  # of options of `TrainConfig`, where backtests choose
    "minutes": MINUTES,
    "distribution": "quantiles",
    **STACK,
    "steps": "chosen",
    **dict.fromkeys(("sequence_length", "lags", "span", "log", "start", "rounded", "least"), BY_BACKTESTS),
    "calibrated": BY_BACKTESTS,
    "pretrained": BY_BACKTESTS,
}


@dataclass
class ForecasterChoice:
    """What the backtests have chosen.

    options: by their names in `TrainConfig`.   errors: of forecasts in the backtests, by name: MASE.
    weights: (H, q), of the simple forecast.   intervals: of its errors.   length: of the sequences that a stack learns
    from.   calibration: (H, Q), factors of the quantiles; None: 1.   exceptions: what of the usual choice was left out,
    in words.
    """

    options: dict[str, Any]
    errors: dict[str, float]
    weights: Numbers
    intervals: Intervals
    length: int
    calibration: Numbers | None = None
    exceptions: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """What was chosen, and the error that it had in the backtests."""
        options, errors = self.options, self.errors
        maps, values = options["start"], counted(options["lags"], "value")
        about = maps[0] if len(maps) == 1 else f"the mean of {len(maps)} linear maps of the last {values}"
        about += " of the logarithm" * options["log"]
        simple = error = errors.get("simple forecasts", 1.0)
        if options["steps"]:
            about += f", and {options['layer']} of width {options['dim']}, which learns in {options['steps']} steps "
            about += "what that leaves"
            before, after = (value for name, value in errors.items() if name.endswith("last backtests"))
            error *= after / before
        if share := options["pretrained"]:
            about += f"; beside it the model in the package, with a share of {share:g}"
            error *= errors.get(f"with a share of {share:g}", simple) / (simple or 1.0)
        return f"chosen: {about}; in the backtests it has {error:.2f} of the seasonal naive's error"

    def table(self) -> str:
        """Return the errors as lines of CSV."""
        return "\n".join(["forecast,MASE", *(f"{name},{error:.6g}" for name, error in self.errors.items()), ""])


def choose(
    source: SeriesSource, fixed: Mapping[str, Any], minutes: float, progress: Progress = SILENCE
) -> ForecasterChoice:
    """Choose the options of `TrainConfig` for a forecast that are not fixed, by backtests within the minutes.

    source: its question is a forecast; it is not changed.   fixed: options and their values.   minutes: of work that is
    planned from the sizes of the table (`work`).   progress: is told how far the choice is, and what each comparison
    says. Raises ConfigError as a `Forecaster` does.
    """
    if fixed.get("distribution", "quantiles") != "quantiles":
        raise ConfigError(
            f"choose: distribution is {fixed['distribution']}, expected quantiles because the errors in the backtests "
            "make them; give steps to train another one"
        )
    plan = Plan(minutes)
    past = PastTargets.of(source)
    stack = check_fixed(past, fixed)
    progress.note(f"choosing on the rows before the test part of {source.described}")
    learns = bool(fixed.get("steps", sum(past.ends) >= LEAST_ROWS))
    border = _simple_share(past, fixed, len(source.targets), stack, plan) if learns else 1.0
    scored = min(MAX_FORECASTS, sum(end - begin for _, begin, end in source.parts[TEST]))
    plan.spent += of_forecasts(scored, _length(max(_sizes(past, fixed)), past.horizon))
    simple = _simple(past, fixed, plan, progress.part(0.0, border))
    windows, chosen = simple.windows, simple.chosen
    weights = mean_weights([one.weights for one in chosen])
    lags = weights.shape[1]
    options: dict[str, Any] = {
        "log": windows.log,
        "span": windows.span,
        "rounded": past.whole,
        "least": past.least,
        "lags": lags,
        "start": [str(one.map) for one in chosen],
        "distribution": "quantiles",
        "sequence_length": _length(lags, past.horizon),
        "calibrated": True,
        "steps": 0,
        **STACK,
        "pretrained": 0.0,
    }
    options |= {
        name: value for name, value in fixed.items() if name in OPTIONS and name not in ("minutes", "pretrained")
    }
    if len(windows.folds) == 1:
        plan.say("the table is too short for several backtests, so the intervals are hardly calibrated", progress)
    intervals = Intervals.of(windows, simple.unseen, len(source.targets))
    length = options["sequence_length"]
    choice = ForecasterChoice(options, simple.errors, weights, intervals, length, exceptions=plan.exceptions)
    share = fixed["pretrained"] if "pretrained" in fixed else _share(past, choice, simple, scored, plan, progress)
    if learns:
        folds = [widened(mean_weights([one.folds[k] for one in chosen]), lags) for k in range(len(windows.folds))]
        _learn(source, past, choice, folds, fixed, plan, progress.part(border, 1.0))
    options["pretrained"] = share
    if share and "sequence_length" not in fixed:
        options["sequence_length"] = max(length, _read_steps(past))
    return choice


def _share(
    past: PastTargets, choice: ForecasterChoice, simple: "_Simple", scored: int, plan: Plan, progress: Progress
) -> float:
    r"""Return the share of the pretrained forecaster: its mean, given the errors in the backtests.

    .. math:: p(s) \propto (s (1 - s))^{PRIOR - 1} \prod_k e_k(s)^{-n_k}

    e_k(s) is the mean absolute error with share s in backtest k, and n_k the number of its horizons that share no row.
    The product is the likelihood of n_k errors with a Laplace distribution of unknown size. So few rows leave the share
    near 1/2. The error is set in the choice.
    scored: forecasts of the test part that follow.
    """
    windows, horizon, steps = simple.windows, past.horizon, _read_steps(past)
    folds = [
        (weights, rows[sampled(len(rows), MAX_SHARE_ORIGINS)])
        for weights, (_, rows) in zip(simple.unseen, windows.folds, strict=True)
    ]
    cost = of_pretrained(sum(len(rows) for _, rows in folds) + scored, min(steps, max(past.ends)))
    if cost > plan.left:
        plan.leave_out("the model in the package", cost, progress)
        return 0.0
    plan.spent += cost
    errors, counts = [], []
    for weights, rows in folds:
        values, _ = windows.history(rows, steps)
        values = values[:, : max(1, int(np.isfinite(values).any(0).sum()))][:, ::-1]
        ahead, _ = pretrained_forecaster().predict(
            torch.from_numpy(np.exp(values) if windows.log else values.copy())[..., None],
            horizon=horizon, season=(past.season, past.second), levels=[0.5],
        )  # fmt: skip
        came = windows.numbers(windows.came[rows], rows)
        theirs = (came - ahead.mean[..., 0].numpy()) / windows.units[rows, None]
        ours = windows.errors(windows.ahead(weights, rows), rows)
        theirs = np.where(np.isnan(theirs), ours, theirs)  # of a series without a value before
        errors.append([mean_error((1 - share) * ours + share * theirs) for share in (0.0, *SHARES)])
        counts.append(len(set(zip(windows.array[rows], windows.origin[rows] // horizon, strict=True))))
    logs = np.log(np.maximum(errors, np.finfo(np.float64).tiny))
    logs = logs[:, 1:] - logs[:, :1]
    likelihoods = -(counts @ logs)
    posterior = (SHARES * (1 - SHARES)) ** (PRIOR - 1) * np.exp(likelihoods - likelihoods.max())
    share = round(float(posterior @ SHARES / posterior.sum()), 2)
    if share < LEAST_SHARE:
        share = 0.0
    ratio = float(np.exp(np.interp(share, (0.0, *SHARES), (0.0, *logs.mean(0)))))
    choice.errors[f"with a share of {share:g}"] = ratio * simple.error
    progress.note(f"the model in the package: a mean with a share of {share:g} of it has {ratio:.3f} of that error")
    return share


def _read_steps(past: PastTargets) -> int:
    """Return how many steps the pretrained forecaster reads before a forecast: some of the longer season, if any."""
    return max(MIN_READ_STEPS, min(MAX_READ_STEPS, READ_SEASONS * past.second))


def check_fixed(past: PastTargets, fixed: Mapping[str, Any]) -> Stack:
    """Return a stack with the fixed options.

    Raises ConfigError for options of which no forecaster can be made that reads all values of a forecast.
    """
    for name in fixed.get("start", ()):
        LagMap.of(name)
    if (lags := fixed.get("lags")) is not None and lags < 1:
        raise ConfigError(f"choose: lags is {lags}, expected at least 1 because the forecast starts with them")
    Normalization(**{name: fixed[name] for name in options_of(Normalization) if name in fixed})
    steps = fixed.get("sequence_length", _length(max(_sizes(past, fixed)), past.horizon))
    with seeded(0):
        return fitting_stack("choose", {**STACK, **fixed}, steps, "a forecast may read so many values")


def _simple_share(past: PastTargets, fixed: Mapping[str, Any], targets: int, stack: Stack, plan: Plan) -> float:
    """Return the share of the simple forecasts in the work of a choice, roughly; two backtests of a stack follow."""
    sizes, rows = _sizes(past, fixed), sum(past.ends)
    origins, fitted = FOLDS * min(rows, MAX_MEASURED_ORIGINS), min(rows, MAX_FITTED_ORIGINS)
    counts = [len(set(candidates(size, past.season))) + 3 * len(PENALTIES) for size in sizes]
    once = sum(
        of_simple(size, past.horizon, origins, fitted, count, FOLDS) for size, count in zip(sizes, counts, strict=True)
    )
    simple = once * (1 if "log" in fixed or not past.positive else 2)
    length, parameters = _length(max(sizes), past.horizon), sum(one.numel() for one in stack.parameters())
    step = of_step({**STACK, **fixed}["batch_size"], length, past.horizon * targets, parameters)
    learning = min(2 * (fixed.get("steps") or STEPS) * step, 2 / 3 * plan.left)
    return simple / (simple + learning)


def _length(lags: int, horizon: int) -> int:
    """Return how many steps a forecast reads."""
    return max(2 * lags, lags + further_lags(horizon), 64)


def fitted(source: SeriesSource, choice: ForecasterChoice, seed: int, progress: Progress = SILENCE) -> Forecaster:
    """Return the forecaster of a choice, trained on all rows before the test part."""
    model = begun(source, choice, choice.weights, seed)
    steps = choice.options["steps"]
    if steps:
        past = PastTargets.of(source)
        rows = _part(source, past, 1.0, 1.0, choice.options | {"sequence_length": choice.length})
        _Training(rows, model, choice.options, steps, seed, progress).go(steps)
    if choice.calibration is not None:
        assert model.calibration is not None
        model.calibration.copy_(torch.from_numpy(choice.calibration))
    return model.eval()


def begun(source: SeriesSource, choice: ForecasterChoice, weights: Numbers, seed: int) -> Forecaster:
    """Make a forecaster that is the simple forecast of these weights as long as its stack has learnt nothing."""
    options = choice.options
    stack = StackConfig(**{name: options[name] for name in vars(StackConfig()) if name in options})
    head = {name: options[name] for name in ("lags", "span", "log", "rounded", "least", "calibrated", "pretrained")}
    torch.manual_seed(seed)
    model = answerer(source.question).model(make_stack(stack), head)
    with torch.no_grad():
        model.lags.weight.zero_()
        model.lags.weight[:, : weights.shape[1]] = torch.from_numpy(weights)
        model.head.weight.zero_()
        model.head.bias.copy_(torch.from_numpy(choice.intervals.quantiles).transpose(0, 1).reshape(-1))  # (H, C, Q)
        if model.usual_errors is not None:
            model.usual_errors.copy_(torch.from_numpy(choice.intervals.usual))
    model.lags.weight.requires_grad_(False)
    return model.eval()


@dataclass
class _Simple:
    """Simple forecasts whose mean has a low error in backtests.

    unseen: of each backtest, the weights (H, q) of the mean that the others choose.   errors: by name.
    """

    windows: BacktestWindows
    chosen: list[Trial]
    unseen: list[Numbers]
    errors: dict[str, float]

    @classmethod
    def of(cls, windows: BacktestWindows, trials: Sequence[Trial], all_count: bool = False) -> "_Simple":
        """Choose among trials; all_count: take all of them."""
        folds = range(len(windows.folds))
        chosen = list(trials) if all_count else combined(windows, trials)
        choices = [chosen if all_count or len(folds) == 1 else combined(windows, trials, k) for k in folds]
        unseen = [mean_weights([one.folds[k] for one in some]) for k, some in zip(folds, choices, strict=True)]
        return cls(windows, chosen, unseen, {})

    @cached_property
    def error(self) -> float:
        """That of the mean."""
        return self.windows.error(mean(self.chosen))


def _simple(past: PastTargets, fixed: Mapping[str, Any], plan: Plan, progress: Progress) -> _Simple:
    """Return the simple forecasts whose mean has the lowest error."""
    season = past.season
    span = fixed.get("span", 2.0 * max(2, season))
    names = [LagMap.of(name) for name in fixed.get("start", ())]
    logs = [fixed["log"]] if "log" in fixed else [False, True] if past.positive else [False]
    sizes = [max(one.lags(season) for one in names)] if names else _sizes(past, fixed)
    results = []
    for k, log in enumerate(logs):
        windows = BacktestWindows(past, max(*sizes, season), log, span)
        if names:
            some = [trial(windows, one) for one in names]
            chosen = [one for one in some if one is not None]
            if len(chosen) < len(some):
                raise ConfigError(f"start: {fixed['start']} needs more rows than the table has; give a smaller ridge")
            results.append(_Simple.of(windows, chosen, all_count=True))
            continue
        part = progress.part(k / len(logs), (k + 1) / len(logs))
        trials = _trials(windows, sizes, plan, plan.share(len(logs) - len(results)), part)
        naive = trial(windows, LagMap("seasonal" if season > 1 else "naive", ()))
        assert naive is not None
        result = _Simple.of(windows, trials)
        top = min(trials, key=lambda one: one.error)
        progress.note(
            f"{len(trials)} simple forecasts{' of the logarithm' if log else ''}: {top.map} has {top.error:.3f} of the "
            f"seasonal naive's error, a mean of {len(result.chosen)} has {result.error:.3f}"
        )
        if not result.error < naive.error and season <= max(sizes):
            result = _Simple.of(windows, [naive], all_count=True)
        result.errors = {"the seasonal naive": naive.error, str(top.map): top.error}
        results.append(result)
    best = min(results, key=lambda result: result.error)
    if not names and [one.map.family for one in best.chosen] in (["seasonal"], ["naive"]):
        line = "nothing is better than the seasonal naive in the backtests, so it is the simple forecast"
        plan.say(line, progress)
    best.errors["simple forecasts"] = best.error
    return best


def _sizes(past: PastTargets, fixed: Mapping[str, Any]) -> list[int]:
    """Return the numbers of last values that simple forecasts may read."""
    if fixed.get("lags"):
        return [int(fixed["lags"])]
    season = past.season
    largest = max(1, int(past.borders[0] * np.median(past.ends)) - past.horizon)
    largest = max(1, min(largest, int(fixed.get("sequence_length", largest))))
    further = (7 * season + 1,) if 24 <= season < 52 else (5, 9, 17)
    return sorted({min(size, largest) for size in (season + 1, season + 13, 2 * season + 1, 4 * season + 1, *further)})


def _trials(windows: BacktestWindows, sizes: list[int], plan: Plan, seconds: float, progress: Progress) -> list[Trial]:
    """Measure all simple forecasts, and ridges about the best of them, the last value and zero.

    seconds: of the plan, for those from more values than the fewest.
    """
    season = windows.past.season
    trials: dict[LagMap, Trial] = {}
    ridges = 3 * len(PENALTIES) * len(sizes)
    expected = len({one for size in sizes for one in candidates(size, season)}) + ridges
    kind = "simple forecasts of the logarithm" if windows.log else "simple forecasts"

    def measure(one: LagMap) -> None:
        if (measured := trial(windows, one)) is not None:
            trials[one] = measured
        progress.at(min(1.0, len(trials) / expected), f"{kind}: {len(trials)} of about {expected}")

    origins = sum(len(rows) for _, rows in windows.folds)
    for size in sizes:
        count = len(set(candidates(size, season)) - trials.keys()) + ridges // len(sizes)
        fitted = min(len(windows.values), MAX_FITTED_ORIGINS)
        cost = of_simple(size, windows.past.horizon, origins, fitted, count, len(windows.folds))
        if trials and cost > seconds:
            plan.leave_out(f"simple forecasts from {size} last values", cost, progress)
            break
        seconds -= cost
        plan.spent += cost
        for one in candidates(size, season):
            if one not in trials:
                measure(one)
        best = min((one for one in trials.values() if one.map.prior is None), key=lambda one: one.error)
        for prior in dict.fromkeys([best.map, LagMap("naive", ()), LagMap("zero", ())]):
            for penalty in PENALTIES:
                one = LagMap("ridge", (size, penalty), prior)
                if one.lags(season) <= windows.lags:
                    measure(one)
    return list(trials.values())


def _part(
    source: SeriesSource, past: PastTargets, begin: float, end: float, options: Mapping[str, Any]
) -> SeriesSource:
    """Return the source with the rows before the share `begin` to learn from, and those up to `end` to measure."""
    lasts, length = past.lasts, options["sequence_length"]
    learnt: list[Piece] = [(i, 0, round(begin * last)) for i, last in lasts.items()]
    measured: list[Piece] = [(i, round(begin * last), round(end * last)) for i, last in lasts.items()]
    part = source.divided(
        [learnt, measured, []],
        sequence_length=length,
        distribution=options["distribution"],
        origins=max(8, length - options["lags"]),
    )
    cast(SeriesForecast, part.asking).sampled = MEASURED_FORECASTS
    return part


class _Training:
    """The training of a forecaster in memory. `go(step)` goes on until a step. The map of the last values stays."""

    def __init__(
        self,
        source: SeriesSource,
        model: Forecaster,
        options: Mapping[str, Any],
        steps: int,
        seed: int,
        progress: Progress = SILENCE,
    ) -> None:
        self.source, self.model, self.done, self.seed, self.steps = source, model, 0, seed, steps
        self.progress = progress
        self.size, self.method = options["batch_size"], answerer(source.question)
        self.optimizer = OPTIMIZERS["adamw"](model, options["lr"], options["weight_decay"])
        plan = RunLength(steps)
        warmup = TrainConfig().training.warmup
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(plan, warmup, step))

    def go(self, step: int) -> None:
        """Train until a step."""
        first = self.done

        def loss(k: int) -> Tensor:
            self.progress.at((first + k) / self.steps, f"training: {first + k} of {self.steps} steps")
            torch.manual_seed(self.seed * 1_000_003 + first + k)
            return self.method.objective(self.model, self.source.batch(first + k, self.size).tensors())[0]

        try:
            self.model.train()
            descend(list(self.model.parameters()), self.optimizer, self.schedule, step - first, loss, 1.0)
        finally:
            self.model.eval()
        self.done = step


@dataclass
class _Mark:
    """A measurement of a forecaster in a backtest: its scores, the quantiles (n, H, C, Q) and the numbers (n, H, C)."""

    scores: dict[str, float]
    quantiles: Tensor
    came: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Forecaster, source: SeriesSource, batches: Sequence[Batch]) -> "_Mark":
        method = answerer(source.question)
        answers = [method.answers(model, batch) for batch in batches]
        scores = means(method.scores(one.outputs, one.targets) for one in answers)
        return cls(
            scores, torch.cat([one.outputs for one in answers]), torch.cat([one.targets.numbers for one in answers])
        )


def _learn(
    source: SeriesSource,
    past: PastTargets,
    choice: ForecasterChoice,
    folds: Sequence[Numbers],
    fixed: Mapping[str, Any],
    plan: Plan,
    progress: Progress,
) -> None:
    """Let a stack learn before each backtest, and set steps and calibration of the choice."""
    options, marks = choice.options, []
    seed = fixed.get("seed", 0)
    borders = list(zip(past.borders, past.borders[1:], folds, strict=False))
    steps = fixed.get("steps", STEPS)
    for k, (begin, end, weights) in enumerate(borders[::-1][:2]):  # the last backtests have the most rows
        fold = _part(source, past, begin, end, options)
        batches = [batch.tensors() for batch in fold.asking.examples(VALIDATION)]
        model = begun(fold, choice, weights, seed)
        if k == 0 and "steps" not in fixed:
            length, answers = options["sequence_length"], past.horizon * len(source.targets)
            parameters = sum(one.numel() for one in model.stack.parameters())
            cost = of_step(options["batch_size"], length, answers, parameters)
            plan.spent += 2 * (MARKS + 1) * of_forecasts(MEASURED_FORECASTS, length)
            steps = min(STEPS, int(plan.left / (3 * cost)))  # two backtests, and the training on all rows
            if steps < 5 * MARKS:
                plan.leave_out(f"a stack of {options['layer']}", 3 * 5 * MARKS * cost, progress)
                return
            # Kernels are compiled in the first step of a machine, which is in no plan.
            _Training(fold, begun(fold, choice, weights, seed), options, 8, seed).go(1)
            plan.begin()
        training = _Training(fold, model, options, steps, seed, progress.part(k / 2, (k + 1) / 2))
        row = [_Mark.of(model, fold, batches)]
        for mark in range(1, MARKS + 1):
            training.go(steps * mark // MARKS)
            row.append(_Mark.of(model, fold, batches))
            if "steps" not in fixed and plan.slow:
                plan.leave_out(f"a stack of {options['layer']}, which is slower here than planned", None, progress)
                return
        marks.append(row)
    errors = [[mark.scores["CRPS"] / row[0].scores["CRPS"] for mark in row] for row in marks]
    ratio = np.mean(errors, 0)
    best = int(np.argmin(ratio)) if "steps" not in fixed else MARKS
    if "steps" not in fixed and (ratio[best] > GAIN or max(row[best] for row in errors) > LEAST_GAIN):
        best = 0
    options["steps"] = steps * best // MARKS
    simple, learnt = (float(np.mean([row[k].scores["MASE"] for row in marks])) for k in (0, best))
    choice.errors["simple forecasts, last backtests"] = simple
    choice.errors[f"after {options['steps']} steps, last backtests"] = learnt
    progress.note(
        f"{options['layer']} of width {options['dim']} on what that leaves: MASE {simple:.3f} before, "
        f"{learnt:.3f} after {options['steps']} steps"
        + ("" if best else f"; {steps} steps do not help, so the simple forecast stands alone")
    )
    if best and options["calibrated"]:
        choice.calibration = _factors([row[best] for row in marks], options["log"])


def _factors(marks: Sequence[_Mark], log: bool) -> Numbers:
    """Return the factors (H, Q) with which the quantiles have their levels in the backtests.

    If a step ahead has few forecasts, it has the factors of all steps.
    """
    quantiles, came = (torch.cat([getattr(mark, name) for mark in marks]) for name in ("quantiles", "came"))
    if log:
        quantiles, came = quantiles.log(), came.log()
    median = quantiles[..., LEVELS.index(0.5)]
    factors = np.ones((quantiles.shape[1], len(LEVELS)))
    for k, level in enumerate(LEVELS):
        if level == 0.5:
            continue
        ratio = ((came - median) / (quantiles[..., k] - median)).numpy()
        ratio[~np.isfinite(ratio)] = np.nan
        at = level if level > 0.5 else 1 - level
        for h in range(len(factors)):
            values = ratio[:, h]
            values = values if (~np.isnan(values)).sum() >= MIN_ERRORS else ratio
            factors[h, k] = np.nanquantile(values, at) if not np.isnan(values).all() else 1.0
    return factors.clip(*FACTORS)
