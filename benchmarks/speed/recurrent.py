"""Time torch's recurrent modules plain and after `scanl.hub.accelerate`, at shapes that a seed draws.

    python benchmarks/speed/recurrent.py [GRU RNN LSTM] [--seed 0] [--shapes 60]

A shape is a batch of 1 to 32, 1 to 2,048 steps and a width of 8 to 512, each drawn evenly by its logarithm, and one or
two directions. Both programs take turns, and the least processor time of each counts: other work on the machine only
adds to it. Ways: `forward` without gradients, and `both` with those of the input and all parameters. A ratio is the
accelerated time over the plain one. The rows are in benchmarks/results/recurrent.csv.
"""

import copy
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from scanl import hub

sys.path.append(str(Path(__file__).parents[1]))
from harness import WAYS, Results, Took, of_module, parse, parser

KINDS = {"GRU": nn.GRU, "RNN": nn.RNN, "LSTM": nn.LSTM}
LIMITS = (1, 32), (1, 2048), (8, 512)  # of the batch, the steps and the width
BUDGET = 0.25  # seconds of each program
RUNS = 3, 300  # of each program, at least and at most


class RecurrentShape(NamedTuple):
    """A module and its input."""

    name: str
    batch: int
    steps: int
    width: int
    directions: int


def shapes(names: Sequence[str], seed: int, count: int) -> list[RecurrentShape]:
    """Return shapes that a seed draws, of each module as many."""
    rng, drawn = random.Random(seed), []
    for n in range(count):
        sizes = [round(math.exp(rng.uniform(*map(math.log, limits)))) for limits in LIMITS]
        drawn.append(RecurrentShape(names[n % len(names)], *sizes, rng.randint(1, 2)))
    return drawn


def least(calls: Sequence[Callable[[], object]]) -> list[Took]:
    """Return the least times of calls that take turns."""
    for call in calls:
        call()
    times: list[list[Took]] = [[] for _ in calls]
    begin = time.process_time()
    while len(times[0]) < RUNS[0] or (len(times[0]) < RUNS[1] and time.process_time() - begin < BUDGET * len(calls)):
        for call, took in zip(calls, times, strict=True):
            clock, processor = time.perf_counter(), time.process_time()
            call()
            used = time.process_time() - processor
            took.append(Took(time.perf_counter() - clock, used))
    return [Took(*map(min, zip(*took, strict=True))) for took in times]


def main() -> None:
    made = parser(__doc__, KINDS)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--shapes", type=int, default=60)
    options = parse(made)
    results, ratios = Results("recurrent", options), []
    for name, batch, steps, width, directions in shapes(options.names, options.seed, options.shapes):
        if options.quick:
            batch, steps, width = 2, 5, 3
        key = {"name": name, "shape": str((batch, steps, width)), "directions": directions, "seed": options.seed}
        if not results.timed(**key):
            torch.manual_seed(0)
            plain, x = (
                KINDS[name](width, width, batch_first=True, bidirectional=directions == 2),
                torch.randn(batch, steps, width),
            )
            fast = copy.deepcopy(plain)
            hub.accelerate(fast)
            torch.testing.assert_close(fast(x)[0], plain(x)[0], rtol=1e-3, atol=1e-4)
            pair = [of_module(each, x) for each in (plain, fast)]
            took = {}
            for way in WAYS:
                calls = [call for each in pair if (call := getattr(each, way)) is not None]
                took |= {(who, way): each for who, each in zip(("plain", "accelerated"), least(calls), strict=True)}
            results.record(took, "plain", **key)
        rows = results.of(**key, program="accelerated")
        ratios += [float(row["processor_ratio"]) for row in rows[-len(WAYS) :]]
    print(
        f"{len(ratios)} ratios of processor time: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}, "
        f"{sum(ratio > 1.05 for ratio in ratios)} above 1.05"
    )


if __name__ == "__main__":
    main()
