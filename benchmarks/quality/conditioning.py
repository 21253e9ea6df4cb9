"""Trace conditioning: columnar networks that learn by real-time recurrent learning, beside an LSTM by truncated BPTT.

    python benchmarks/quality/conditioning.py [NAME ...] [--rates 1e-2] [--updates 1000]

A cue announces an event 24 to 36 steps later, and the answer at each step is the discounted sum of future events (Javed
et al., arXiv:2302.05326). `STREAMS` streams run side by side and share the parameters, and an update is a block of
`BLOCK` steps. All learners have about the same multiplications a step, by the formulas that `scanl algorithms` prints:
2 p for `ccn`, 3 p for `columnar` with `diagonal_rtrl`, and 2 p window / block for an LSTM with `tbptt`. An LSTM whose
window reaches back to the cue is therefore smaller than one whose window is a block. "ccn's layer, window 10" is the
network of `ccn` by `tbptt`, all stages at once: it tells the algorithm from the layer, which normalizes its features.

The error is the mean square over a tenth of the updates; `path` has all ten. `best` is that of the expected sum, given
the steps since the cue and no event so far; `nothing` that of an answer of 0.

Differs from the paper: targets are the sums themselves in the place of TD(0.99), many streams in the place of one, Adam
for all, and far fewer steps. The rows are in benchmarks/results/conditioning.csv.
"""

import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.learning.algorithms import CCN, TBPTT, Algorithm, DiagonalRTRL
from scanl.learning.questions import answerer
from scanl.models import Stack
from scanl.tasks.conditioning import TraceConditioning

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

STREAMS, BLOCK = 64, 10
TASK = answerer(TraceConditioning.question)


class Learner(NamedTuple):
    """layer, width, options: of the model.   window: steps of a backward pass of `tbptt`; 0 for RTRL."""

    layer: str
    width: int
    options: dict[str, object]
    window: int = 0


LEARNERS = {
    "ccn": Learner("columnar_constructive", 20, {"columns": 4, "decay": 0.999, "init_scale": 0.1}),
    "ccn's layer, window 10": Learner(
        "columnar_constructive", 20, {"columns": 4, "decay": 0.999, "init_scale": 0.1}, BLOCK
    ),
    "columnar": Learner("columnar", 18, {"init_scale": 0.1}),
    "lstm, window 10": Learner("lstm", 17, {}, BLOCK),
    "lstm, window 20": Learner("lstm", 12, {}, 2 * BLOCK),
    "lstm, window 40": Learner("lstm", 8, {}, 4 * BLOCK),
}


def blocks(updates: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs (updates, rows, BLOCK, 2) and targets (updates, rows, BLOCK, 1) of streams side by side."""
    task = TraceConditioning(seed=0)
    inputs = np.zeros((rows, updates * BLOCK, 2), np.float32)
    targets = np.zeros((rows, updates * BLOCK, 1), np.float32)
    for row in range(rows):
        draw = np.random.default_rng((seed, row))
        away = int(draw.integers(0, 150))  # the streams are at different times of a trial
        for t, (x, y) in enumerate(itertools.islice(task.samples(draw), away, away + updates * BLOCK)):
            inputs[row, t], targets[row, t] = x, y
    cut = [torch.tensor(each).unflatten(1, (updates, BLOCK)).transpose(0, 1) for each in (inputs, targets)]
    return cut[0].contiguous(), cut[1].contiguous()


def best(inputs: Tensor, targets: Tensor) -> float:
    """Return the error of the expected sum of what the steps since the cue say, where a stream's first cue was seen."""
    task = TraceConditioning(seed=0)
    waits = range(task.least_wait, task.most_wait + 1)
    expected = {}
    for t in range(task.most_wait):
        sums = [task.gamma ** (wait - t - 1) for wait in waits if wait > t]
        expected[t] = sum(sums) / len(sums)
    errors = []
    for x, y in zip(*(each.transpose(0, 1).flatten(1, 2).numpy() for each in (inputs, targets)), strict=True):
        since = None
        for (cue, event), (truth,) in zip(x, y, strict=True):
            since = 0 if cue else None if event or since is None else since + 1
            errors.append((truth - (0 if since is None else expected[since])) ** 2)
    return float(np.mean(errors))


def learn(name: str, rate: float, seed: int, inputs: Tensor, targets: Tensor) -> tuple[list[float], int, float]:
    """Return the errors over each tenth of the updates, multiplications a step, and the seconds."""
    torch.manual_seed(seed)
    learner, updates, rows = LEARNERS[name], len(inputs), inputs.shape[1]
    model = TASK.model(
        Stack(learner.width, 1, learner.layer, layer_options=learner.options, channel_mixer="none", own_norm=True)
    )
    algorithm: Algorithm
    if learner.window:
        algorithm, times = TBPTT(TASK.loss, every=BLOCK, window=learner.window), 2 * learner.window // BLOCK
    elif learner.layer == "columnar":
        algorithm, times = DiagonalRTRL(TASK.loss), 3
    else:
        algorithm, times = CCN(TASK.loss, stage_updates=updates // 5), 2
    operations = times * sum(parameter.numel() for parameter in model.stack.mixers()[0].parameters())
    optimizer = torch.optim.Adam(model.parameters(), rate)
    kept, errors, begin = algorithm.init(model, rows), [], time.perf_counter()
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss, kept = algorithm.update(model, kept, Batch(x, y))
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    tenths = [float(np.mean(part)) for part in np.array_split(errors, 10)]
    return tenths, operations, time.perf_counter() - begin


def main() -> None:
    made = parser(__doc__, LEARNERS, seeds=True)
    made.add_argument("--updates", type=int, default=1000)
    made.add_argument("--rates", type=float, nargs="+", default=[1e-2], help="learning rates of Adam")
    options = parse(made)
    results = Results("conditioning", options)
    updates, rows = (20, 4) if options.quick else (options.updates, STREAMS)
    for seed in range(options.seeds):
        inputs, targets = blocks(updates, rows, seed)
        key = {"updates": updates, "seed": seed}
        if not results.has(learner="best", **key):
            late = slice(-(updates // 10), None)
            results.add(learner="best", **key, error=best(inputs[late], targets[late]))
            results.add(learner="nothing", **key, error=targets[late].square().mean().item())
        for name, rate in itertools.product(options.names, options.rates):
            if not results.has(learner=name, **key, rate=rate):
                tenths, operations, seconds = learn(name, rate, seed, inputs, targets)
                path = " ".join(f"{error:.5f}" for error in tenths)
                results.add(
                    learner=name, **key, rate=rate, operations=operations, error=tenths[-1], path=path, seconds=seconds
                )


if __name__ == "__main__":
    main()
