"""Memory and time of a sample for each learning algorithm, against the length of the stream.

    python benchmarks/speed/algorithms.py [NAME ...] [--rounds 5]

A labeler of numbers over one layer (lru, and gru for algorithms of full recurrences) reads a stream in blocks of 16
samples; backpropagation through time reads all of the stream in one update. kept: bytes of tensors that are saved for
a backward pass, at their peak, and of the learner. The time is that of the processor for a sample, learning included.
The rows are in benchmarks/results/algorithms.csv, the picture is docs/learning_online.png.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.layers.state import leaves
from scanl.learning.algorithms import algorithms
from scanl.learning.questions import answerer
from scanl.models import Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, measure, parse, parser, picture

BLOCK, WIDTH, INPUTS = 16, 16, 4
LENGTHS = (16, 64, 256, 1024)
CASES: dict[str, dict[str, Any]] = {
    "bptt": {"layer": "lru", "whole": True},
    "tbptt": {"layer": "lru", "options": {"every": 16, "window": 32}},
    "diagonal_rtrl": {"layer": "lru"},
    "online_lru": {"layer": "lru"},
    "rtrl": {"layer": "gru"},
    "snap": {"layer": "gru", "options": {"n": 1}},
    "uoro": {"layer": "gru"},
    "kfrtrl": {"layer": "lstm"},
}


class Saved:
    """Counts the bytes of distinct tensors that graphs hold for their backward passes."""

    def __init__(self) -> None:
        self.peak, self.seen = 0, dict[int, int]()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.seen[storage.data_ptr()] = storage.nbytes()
        self.peak = max(self.peak, sum(self.seen.values()))
        return tensor


def learn(name: str, length: int) -> tuple[Any, Any]:
    """Return a call that learns a stream of this length, and a call that returns the bytes kept meanwhile."""
    case = CASES[name]
    torch.manual_seed(0)
    task = answerer(Numbers(FeatureInputs(INPUTS), count=1))
    model = task.model(Stack(WIDTH, 1, case["layer"], channel_mixer="none"))
    algorithm = algorithms.get(name)(task.loss, **case.get("options", {}))
    x, y = torch.randn(1, length, INPUTS), torch.randn(1, length, 1)
    size = length if case.get("whole") else BLOCK

    def call(saved: Saved | None = None) -> Any:
        learner = algorithm.init(model, 1)
        for begin in range(0, length, size):
            if saved is not None:
                saved.seen.clear()
            model.zero_grad()
            samples = Batch(x[:, begin:][:, :size].clone(), y[:, begin:][:, :size].clone())
            loss, learner = algorithm.update(model, learner, samples)
            loss.backward()
        return learner

    def kept() -> int:
        saved = Saved()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            learner = call(saved)
        return saved.peak + sum(leaf.nbytes for _, leaf in leaves(learner))

    return call, kept


def draw(results: Results) -> None:
    rows = results.of(width=WIDTH)
    memory, time = ({name: [] for name in CASES} for _ in range(2))
    for row in rows:
        memory[row["name"]].append((int(row["length"]), int(row["kept"])))
        time[row["name"]].append((int(row["length"]), 1e3 * float(row["processor"])))
    memory, time = ({name: points for name, points in lines.items() if points} for lines in (memory, time))
    panels = [
        Panel("memory", "samples of the stream", "bytes kept", memory, "xy"),
        Panel("time", "samples of the stream", "milliseconds a sample", time, "xy"),
    ]
    picture(results.pictures / "learning_online.png", panels, title="One layer of width 16, blocks of 16 samples")


def main() -> None:
    options: argparse.Namespace = parse(parser(__doc__, CASES, rounds=5))
    results = Results("algorithms", options)
    for name in options.names:
        for length in LENGTHS[: 2 if options.quick else None]:
            if results.timed(name=name, length=length, width=WIDTH):
                continue
            call, kept = learn(name, length)
            took = measure({name: call}, options.rounds)[name]
            layer = CASES[name]["layer"]
            results.add(
                name=name, layer=layer, width=WIDTH, length=length, kept=kept(), seconds=took.seconds / length,
                processor=took.processor / length,
            )  # fmt: skip
    draw(results)


if __name__ == "__main__":
    main()
