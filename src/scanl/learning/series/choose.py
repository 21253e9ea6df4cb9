"""Choose the model that answers for series of a table: random filters, a stack, or both.

1. The readout of random filters is fitted in closed form (`fit_filters`). Labels of steps have no filters.
2. A stack learns alone, and beside the filters. While it learns it gets the filters' answers to series that they have
   not learnt from. It is measured on the validation part as it learns, and ends early if it gets no better.
3. The filters are taken, unless a stack has a clearly smaller loss on the validation part. What is taken is fitted anew
   to the training and the validation part.

The steps of a stack are so many that the numbers it reads do not depend on the speed of the machine.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.data.series.source import SeriesSource
from scanl.data.splits import TEST, TRAINING, VALIDATION
from scanl.learning.descent import optimize, seeded
from scanl.learning.progress import SILENCE, Progress
from scanl.learning.questions import Answerer, Model, answerer
from scanl.learning.questions.base import answered, form, means
from scanl.learning.run.config import OPTIONS, StackConfig, fitting_stack, make_stack
from scanl.learning.series.examples import Examples, outputs, rows_at_once
from scanl.learning.series.filters import FilterFit, fit_filters
from scanl.models import Features

MINUTES = 2.0  # of a choice, if nothing else is said
READ_STEPS = 1_500_000  # steps of series that a stack reads in a minute of them
STACK = {"dim": 32, "depth": 1, "layer": "hawk", "batch_size": 32, "lr": 3e-3}
DEFAULTS: Mapping[str, Any] = {  # of options of `TrainConfig`, where the validation part chooses
    "minutes": MINUTES,
    **STACK,
    "steps": "chosen",
}
STEPS, MARKS = 300, 6  # most steps of a stack, and measurements while it learns
PATIENCE = 2  # measurements without a better one after which it ends
LEAST_SERIES = 200  # in the training part, from which a stack can say more than filters
GAIN = 0.03  # by how much its loss on the validation part is smaller from which a stack is worth it
FILTERS = 0.3  # share of the work
FILTERS_ALONE, ALONE, BESIDE = "random filters", "a stack alone", "filters and a stack"
LEFT_OUT_NAME = "random filters, of series that are left out one by one"


@dataclass
class SeriesChoice:
    """What the validation part has chosen.

    options: by their names in `TrainConfig`.   measured: of each model, by name: its loss and its scores on the
    validation part, or its scores of series that are left out.   taken: name of the model.
    """

    options: dict[str, Any]
    taken: str = FILTERS_ALONE
    measured: dict[str, dict[str, float]] = field(default_factory=dict)

    def table(self) -> str:
        """Return the measurements as lines of CSV."""
        rows = [(name, *pair) for name, found in self.measured.items() for pair in found.items()]
        return "\n".join(["model,score,value", *(f'"{name}",{score},{value:.6g}' for name, score, value in rows), ""])

    @property
    def sentence(self) -> str:
        """What was chosen, and its scores by which it was."""
        options, count = self.options, self.options.get("filters", {}).get("filters", 0)
        stack = f"{options['layer']} of width {options['dim']}, which learns in {options['steps']} steps"
        parts = [f"{count:,} random filters"] * bool(count) + [stack] * bool(options["steps"])
        about, found = "on the validation part it has", self.measured.get(self.taken)
        if found is None:
            about, found = "of series that are left out one by one it has", self.measured.get(LEFT_OUT_NAME)
        scores = ", ".join(f"{name} {value:.3g}" for name, value in (found or {}).items())
        return f"chosen: {' and '.join(parts)}{f'; {about} {scores}' if scores else ''}"


def choose(
    source: SeriesSource, fixed: Mapping[str, Any], minutes: float, progress: Progress = SILENCE
) -> SeriesChoice:
    """Choose the options of `TrainConfig` for an answer to series that are not fixed, on the validation part.

    source: it is not changed.   fixed: options and their values.   minutes: a measure of how long stacks may learn.
    progress: is told how far the choice is, and what it finds.
    """
    given = {name: value for name, value in fixed.items() if name in OPTIONS and name != "minutes"}
    choice, seed = SeriesChoice({**STACK, "steps": 0, **given}), fixed.get("seed", 0)
    with seeded(0):
        fitting_stack("choose", choice.options, source.length, "the series have so many")
    with seeded(seed):
        trial = _Trial(source, choice.options, seed, _Part.of(source, TRAINING), progress.part(0, FILTERS))
        if trial.filters is not None:
            choice.options["filters"] = trial.filters.found.options
            choice.measured[LEFT_OUT_NAME] = scores = trial.left_out_scores()
            said = f"{source.metric} {next(iter(scores.values())):.4g}" if scores else "no class has two series"
            progress.note(f"{choice.options['filters']['filters']:,} {LEFT_OUT_NAME}: {said}")
        if "steps" not in fixed:
            _try_stacks(trial, choice, minutes, progress.part(trial.done, 1.0))
    return choice


def fitted(source: SeriesSource, choice: SeriesChoice, seed: int, progress: Progress = SILENCE) -> Model:
    """Return the model of a choice, fitted to the training and the validation part."""
    parts, options = source.parts, choice.options
    whole = source.divided([parts[TRAINING] + parts[VALIDATION], [], parts[TEST]])
    cast(Any, whole.asking).question = source.question  # with the scales of the training part
    with seeded(seed):
        trial = _Trial(whole, options, seed, _Part.of(whole, TRAINING), progress.part(0, FILTERS))
        model = trial.begun(options["filters"]) if trial.filters is not None else trial.begun()
        if options["steps"]:
            trial.train(model, options["steps"], progress.part(trial.done, 1.0))
        if trial.filters is not None:
            model.filters = trial.filters.found.model
    return model.eval()


def _try_stacks(trial: "_Trial", choice: SeriesChoice, minutes: float, progress: Progress) -> None:
    """Let a stack learn alone, and beside filters, and set what is taken."""
    options, filters, measured = choice.options, trial.filters, _Part.of(trial.source, VALIDATION)
    # A third each for a stack alone, a stack beside filters, and the last fit.
    able = int(READ_STEPS * minutes / 3 / (options["batch_size"] * trial.source.length))
    answers = None
    if filters is not None:
        few = len(trial.source.parts[TRAINING])
        if few < LEAST_SERIES or measured.series is None:
            progress.note(f"no stack is tried, as {few:,} series to learn from are few for one")
            return
        if able < 5 * MARKS:
            progress.note(f"no stack is tried, as series of {trial.source.length:,} steps are long for one")
            return
        answers = outputs(filters.found.model, measured.series.inputs)
        choice.measured[FILTERS_ALONE] = measured.measure(trial.method, trial.begun(), answers)
    trials, steps = [ALONE] if filters is None else [ALONE, BESIDE], min(STEPS, max(able, MARKS))
    ends: dict[str, int] = {}
    for number, name in enumerate(trials):
        part = progress.part(number / len(trials), (number + 1) / len(trials))
        one, beside = (trial, answers) if name == BESIDE else (trial.without_filters(), None)
        ends[name], choice.measured[name] = one.stopped_early(measured, beside, steps, name, part)
    losses = {name: choice.measured[name]["loss"] for name in (FILTERS_ALONE, *ends) if name in choice.measured}
    best = min(ends, key=lambda name: losses[name])
    if filters is None or losses[best] < losses[FILTERS_ALONE] - GAIN:
        choice.taken, options["steps"] = best, ends[best]
        if best == ALONE:
            options["filters"] = {}
    for name in losses:
        scores = ", ".join(f"{score} {value:.4g}" for score, value in choice.measured[name].items())
        progress.note(f"{name}, on the validation part: {scores}{'; taken' if name == choice.taken else ''}")


class _KnownFilters(nn.Module):
    """Filters whose answers (n, O) are known. `rows` says of which series they are wanted."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__()
        self.answers, self.rows = answers, slice(None)

    def init_state(self, batch_size: int, **_: Any) -> None:
        return None

    def forward(self, x: Tensor, state: None = None, **_: Any) -> tuple[Tensor, None]:
        return self.answers[self.rows], None


class _Part(NamedTuple):
    """A part of a source. series: all of them at once, if each has one answer and there are some."""

    source: SeriesSource
    split: int
    series: Batch | None

    @classmethod
    def of(cls, source: SeriesSource, split: int) -> "_Part":
        pieces, asking = source.parts[split], cast(Any, source.asking)
        whole = bool(pieces) and source.asked.per_series
        return cls(source, split, asking.together(pieces).tensors() if whole else None)

    def drawn(self, step: int, size: int, seed: int) -> tuple[Batch, Any]:
        """Return the batch of a step of training, and which series are in it."""
        if self.series is None:
            return self.source.batch(step, size).tensors(), slice(None)
        count = self.series.size
        rows = np.random.default_rng((seed, step)).choice(count, min(size, count), replace=False)
        return self.series.rows(rows), rows

    def batches(self) -> Iterator[tuple[Batch, Any]]:
        """Yield all batches of the part, and which series are in each."""
        if self.series is None:
            yield from ((batch.tensors(), slice(None)) for batch in self.source.asking.examples(self.split))
            return
        at_once = rows_at_once(self.series.inputs)
        for begin in range(0, self.series.size, at_once):
            rows = slice(begin, begin + at_once)
            yield self.series.rows(rows), rows

    @torch.no_grad()
    def measure(self, method: Answerer[Any], model: Model, answers: Tensor | None) -> dict[str, float]:
        """Return the mean loss of a model, and its scores. answers: (n, O), of its filters."""
        model.filters = known = None if answers is None else _KnownFilters(answers)
        losses, scores = [], []
        for batch, rows in self.batches():
            if known is not None:
                known.rows = rows
            loss, count, _ = answered(method.loss, model, batch, None)
            losses.append({"loss": (float(loss * count), int(count))})
            found = method.answers(model, batch)
            scores.append(method.scores(found.outputs, found.targets))
        return {**means(losses), **means(scores)}


class _Filters(NamedTuple):
    """Filters with their readout, and their answers (n, O) to series that they have not learnt from.

    guessed: (n,), whether an answer says something.
    """

    found: FilterFit
    outside: Tensor
    guessed: Tensor


class _Trial:
    """What is tried on a part of a source: filters, and stacks that learn from it."""

    def __init__(
        self, source: SeriesSource, options: Mapping[str, Any], seed: int, part: _Part, progress: Progress
    ) -> None:
        self.source, self.options, self.seed, self.part = source, options, seed, part
        self.method, self.filters = answerer(source.question), None
        readout = self.method.readout()
        if part.series is None or readout is None or options.get("filters", True) in ({}, None):
            return
        count = part.series.size
        progress.at(0, f"random filters of {count:,} series")
        targets = part.series.targets
        targets = targets[:, None] if targets.is_floating_point() else targets  # several numbers, of which this is one
        examples, owner = Examples(part.series.inputs, targets, np.ones(count)).distinct()
        inputs, weights = cast(Features, form(self.method.question.inputs)), torch.from_numpy(examples.weights)
        found = fit_filters(examples, readout, inputs, weights, seed, options.get("filters"))
        location, scale = readout.units(found.factor)
        outside = (location + scale * found.fit.predictions)[owner]
        self.filters = _Filters(found, outside, readout.guessed(readout.targets(targets)))

    @property
    def done(self) -> float:
        """Share of the work that the filters were."""
        return 0.0 if self.filters is None else FILTERS

    def without_filters(self) -> "_Trial":
        """Return a trial of a stack alone."""
        alone = copy.copy(self)
        alone.filters = None
        return alone

    def left_out_scores(self) -> dict[str, float]:
        """Return the scores of the filters for series that are left out; none if nothing can be said about any."""
        assert self.filters is not None
        assert self.part.series is not None
        targets = self.part.series.targets
        guessed = self.filters.guessed
        if not guessed.any():
            return {}
        return means([self.method.scores(self.filters.outside[guessed].squeeze(1), targets[guessed])])

    def begun(self, filters: Mapping[str, Any] | None = None) -> Model:
        """Make a model whose stack has learnt nothing; beside filters, it adds nothing to them."""
        stack = StackConfig(**{name: self.options[name] for name in vars(StackConfig()) if name in self.options})
        torch.manual_seed(self.seed)
        model = self.method.model(make_stack(stack), {} if filters is None else {"filters": dict(filters)})
        if self.filters is not None:
            assert self.part.series is not None
            self.method.rest(model, self.part.series.targets, self.filters.outside)
        return model.eval()

    def train(
        self,
        model: Model,
        steps: int,
        progress: Progress,
        name: str = "a stack",
        after: Callable[[int, float], bool] | None = None,
    ) -> None:
        """Let the stack of a model learn."""
        options = self.options

        def once(step: int) -> Tensor:
            batch, rows = self.part.drawn(step, options["batch_size"], self.seed)
            model.filters = known = None if self.filters is None else _KnownFilters(self.filters.outside)
            if known is not None:
                known.rows = rows
            progress.at(step / steps, f"{name}: step {step:,} of {steps:,}")
            return self.method.objective(model, batch)[0]

        optimize(model, steps, options["lr"], self.seed, once, after=after)

    def stopped_early(
        self, measured: _Part, answers: Tensor | None, steps: int, name: str, progress: Progress
    ) -> tuple[int, dict[str, float]]:
        """Return the step with the lowest loss on a part, and its scores there. answers: (n, O), of filters there."""
        model, marks = self.begun(), {steps * mark // MARKS for mark in range(1, MARKS + 1)}
        best, misses = (0, {"loss": math.inf}), 0

        def after(step: int, _: float) -> bool:
            nonlocal best, misses
            if step + 1 in marks:
                model.eval()
                found = measured.measure(self.method, model, answers)
                model.train()
                best, misses = ((step + 1, found), 0) if found["loss"] < best[1]["loss"] else (best, misses + 1)
            return misses == PATIENCE

        self.train(model, steps, progress, name, after)
        return best
