"""Learning while a sequence runs: on the adding problem with little memory, and estimates of a gradient against it.

    python benchmarks/quality/forward_learning.py [adding] [estimates] [--seeds 3]

adding: two of n numbers are marked, and the sum of both is the answer at the end (Hochreiter and Schmidhuber, 1997).
Each rule sees n/10 steps at a time. `fptt` makes a step of the optimizer after each part, on p/10 times the squared
error of the answer after part p (Kag and Saligrama, ICML 2021), with its penalty; `fptt without penalty` is the same
without it. `tbptt` carries the state and goes back n/10 steps from the error at the end. `bptt` has the memory for all
n steps. The score is the squared error at the end of new sequences, 0.167 for the mean as the answer; `path` has it
after each tenth of the batches.

estimates: the mean of many estimates of `uoro` and `kfrtrl` against the exact gradient, over 5 steps of an Elman
network of 3 units. `deviation` is the largest difference in standard errors of the mean.

The rows are in benchmarks/results/forward_learning.csv.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.learning.algorithms import BPTT, FPTT, KFRTRL, UORO
from scanl.learning.questions import answerer
from scanl.models import Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

PARTS = 10
RULES = ["fptt", "fptt without penalty", "tbptt", "bptt"]


def sequences(rows: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (rows, length, 2), a number and a mark, and the sums (rows, 1). A mark is in each half."""
    values, marks = torch.rand(rows, length, generator=draw), torch.zeros(rows, length)
    for begin in (0, length // 2):
        marks[torch.arange(rows), begin + torch.randint(length // 2, (rows,), generator=draw)] = 1
    return torch.stack([values, marks], 2), (values * marks).sum(1, keepdim=True)


class Weighted:
    """The squared error at the last step of a batch, times a weight that changes from part to part."""

    weight = 1.0

    def __call__(self, model: Any, batch: Batch, state: Any) -> tuple[Tensor, Any]:
        outputs, state = model(batch.inputs, state)
        return self.weight * (outputs[:, -1] - batch.targets).square().mean(), state


def run(rule: str, options: argparse.Namespace, seed: int, length: int, batches: int) -> tuple[list[float], float]:
    """Train a GRU. Return the errors after each tenth of the batches, and the seconds."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = answerer(Numbers(FeatureInputs(2), count=1)).model(Stack(options.dim, 1, "gru", channel_mixer="none"))
    optimizer = torch.optim.Adam(model.parameters(), options.rate)
    loss = Weighted()
    algorithm = FPTT(loss, alpha=options.alpha) if rule == "fptt" else BPTT(loss)
    step, errors, learner = length // PARTS, [], algorithm.init(model, options.batch)
    begin = time.perf_counter()
    for count in range(1, batches + 1):
        x, y = sequences(options.batch, length, draw)
        learner = algorithm.renew(model, learner, options.batch)
        for part in range(1) if rule == "bptt" else range(PARTS):
            inputs = x if rule == "bptt" else x[:, part * step : (part + 1) * step]
            last = rule == "bptt" or part == PARTS - 1
            loss.weight = float(last) if rule in ("bptt", "tbptt") else (part + 1) / PARTS
            value, learner = algorithm.update(model, learner, Batch(inputs, y))
            if loss.weight:
                optimizer.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        if count % max(1, batches // 10) == 0:
            with torch.no_grad():
                x, y = sequences(1000, length, torch.Generator().manual_seed(10_000))
                errors.append((model(x)[0][:, -1] - y).square().mean().item())
    return errors, time.perf_counter() - begin


def adding(results: Results, options: argparse.Namespace) -> None:
    length, batches = (20, 10) if options.quick else (options.length, options.batches)
    for seed in range(options.seeds):
        for rule in options.rules:
            key = {"name": "adding", "rule": rule, "length": length, "batches": batches, "seed": seed}
            if not results.has(**key):
                errors, seconds = run(rule, options, seed, length, batches)
                path = " ".join(f"{error:.4f}" for error in errors)
                results.add(**key, error=errors[-1], path=path, seconds=seconds)


def estimates(results: Results, options: argparse.Namespace) -> None:
    draws, rows = (200, 10) if options.quick else (20_000, 50)
    question = answerer(Numbers(FeatureInputs(3), count=2))
    torch.manual_seed(0)
    model = question.model(Stack(3, 1, "elman", channel_mixer="none")).double()
    one = Batch(torch.randn(1, 5, 3, dtype=torch.float64), torch.randn(1, 5, 2, dtype=torch.float64))
    batch = one.rows(np.zeros(rows, dtype=np.int64))
    layer = list(model.stack.mixers()[0].parameters())

    def gradient(algorithm: Any, steps: int) -> Tensor:
        model.zero_grad()
        learner = algorithm.init(model, rows)
        for t in range(0, 5, steps):
            loss, learner = algorithm.update(model, learner, batch.steps(t, t + steps, targets=True))
            (loss * steps / 5).backward()
        return torch.cat([parameter.grad.flatten() for parameter in layer if parameter.grad is not None])

    exact = gradient(BPTT(question.loss), 5)
    for algorithm in (UORO(question.loss), KFRTRL(question.loss)):
        if results.has(name="estimates", rule=algorithm.name, draws=draws):
            continue
        means = torch.stack([gradient(algorithm, 1) for _ in range(draws // rows)])
        error = means.std(0) / len(means) ** 0.5
        off = means.mean(0) - exact
        results.add(
            name="estimates", rule=algorithm.name, draws=draws, error=(off.norm() / exact.norm()).item(),
            deviation=(off.abs() / error).max().item(),
            spread=(means.std(0).norm() * rows**0.5 / exact.norm()).item(),
        )  # fmt: skip


NAMES = {"adding": adding, "estimates": estimates}


def main() -> None:
    made = parser(__doc__, NAMES, seeds=True)
    made.add_argument("--rules", nargs="+", default=RULES, choices=RULES, help="of the adding problem")
    made.add_argument("--length", type=int, default=50, help="n, steps of a sequence of the adding problem")
    made.add_argument("--batches", type=int, default=500, help="of training")
    made.add_argument("--batch", type=int, default=16, help="sequences of a batch")
    made.add_argument("--dim", type=int, default=24, help="units")
    made.add_argument("--rate", type=float, default=5e-3, help="learning rate of Adam")
    made.add_argument("--alpha", type=float, default=0.1, help="α of fptt")
    options = parse(made)
    results = Results("forward_learning", options)
    for name in options.names:
        NAMES[name](results, options)


if __name__ == "__main__":
    main()
