"""Learn over a stream, in blocks, what lies ten blocks back: traces of the past beside truncated backpropagation.

    python benchmarks/quality/online_memory.py [NAME ...]     # bptt diagonal_rtrl online_lru

Copy online: a sign is shown for one step, and is asked for `DELAY` steps later; pauses are of 0 to 5 steps, and many
streams run side by side. An LRU whose eigenvalues begin below `RADIUS` forgets within the delay. A block has a tenth of
the delay, so truncated backpropagation never sees the sign and its answer in one block. The error is the mean square
over the last tenth of the updates, 1 for an answer of 0. A minute a run on one free core. The rows are in
benchmarks/results/online_memory.csv.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.learning.algorithms import algorithms
from scanl.learning.questions import answerer
from scanl.models import Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

BLOCK, DELAY = 2, 20
RADIUS, WIDTH, LR = 0.72, 8, 1e-2
NAMES = ("bptt", "diagonal_rtrl", "online_lru")
TASK = answerer(Numbers(FeatureInputs(2), count=1))


class Streams:
    """Streams of signs that are shown and asked for: inputs are the sign and a request, answers NaN or the sign."""

    def __init__(self, rows: int, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.at = self.draw.integers(0, DELAY, rows)
        self.sign = self._signs(rows)

    def _signs(self, count: int) -> NDArray[np.float32]:
        return self.draw.choice([-1, 1], count).astype(np.float32)

    def block(self, steps: int) -> Batch:
        """Return the next steps of all streams."""
        inputs = np.zeros((len(self.at), steps, 2), np.float32)
        answers = np.full((len(self.at), steps, 1), np.nan, np.float32)
        for t in range(steps):
            shown, requested = self.at == 0, self.at == DELAY
            inputs[shown, t, 0] = self.sign[shown]
            inputs[requested, t, 1] = 1
            answers[requested, t, 0] = self.sign[requested]
            self.at += 1
            over = self.at > DELAY
            self.at[over] = -self.draw.integers(0, 6, over.sum())
            self.sign[over] = self._signs(int(over.sum()))
        return Batch(torch.tensor(inputs), torch.tensor(answers))


def learn(name: str, seed: int, updates: int, rows: int) -> tuple[float, float]:
    """Return the error over the last tenth of the updates, and the seconds of all updates."""
    torch.manual_seed(seed)
    options = {"state_dim": 2 * WIDTH, "r_min": 0.5, "r_max": RADIUS, "max_phase": 0.3}
    model = TASK.model(Stack(WIDTH, 1, "lru", layer_options=options, channel_mixer="none", own_norm=True))
    nn.init.zeros_(model.input.bias)  # an empty step is an input of 0
    optimizer, algorithm = torch.optim.Adam(model.parameters(), LR), algorithms.get(name)(TASK.loss)
    streams, learner, errors = Streams(rows, seed), algorithm.init(model, rows), []
    start = time.perf_counter()
    for _ in range(updates):
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, streams.block(BLOCK))
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    return float(np.mean(errors[-(updates // 10) :])), time.perf_counter() - start


def main() -> None:
    options = parse(parser(__doc__, NAMES, seeds=True))
    results = Results("online_memory", options)
    updates, rows = (20, 32) if options.quick else (1000, 512)
    for name in options.names:
        for seed in range(options.seeds):
            key = {"algorithm": name, "block": BLOCK, "delay": DELAY, "updates": updates, "seed": seed}
            if not results.has(**key):
                error, seconds = learn(name, seed, updates, rows)
                results.add(**key, error=error, seconds=seconds)


if __name__ == "__main__":
    main()
