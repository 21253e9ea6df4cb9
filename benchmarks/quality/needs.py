"""Needs: the figures of docs/choose.md that no other benchmark has. A step on a CPU, both directions, DNA.

    python benchmarks/quality/needs.py [step] [both] [hidden] [dna]

step: one step of one sequence through a layer of width 256, by turns with `torch.nn.LSTM`. both: the class of
scikit-learn's digits, 8 x 8 pixels; models that read both ways, and causal ones of the same width and steps of
training, which answer after the last pixel. hidden: the value of 15 % of the pixels, which are hidden, from the others;
the error is relative to the variance of a pixel. dna: bits for a base of the last 5 % of the genome of `scanl data get
ecoli`. HyenaDNA predicts the next base; the others fill in 15 % of the bases from both sides. The rows are in
benchmarks/results/needs.csv. All take some minutes on one core.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl import data, layers
from scanl.layers.state import leaves
from scanl.learning.descent import optimize
from scanl.models import Features, Patches, SequenceClassifier, Stack, StrandModel, caduceus, hyena_dna, vim
from scanl.models.whole.dna import FIRST_BASE, MASK, VOCABULARY

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, measure, parse, parser

WIDTH = 256
STEP = ("lru", "mingru", "gru", "hawk", "mamba2", "gated_deltanet")
DIM, DEPTH, STEPS, RATE = 32, 2, 400, 4e-3
HIDDEN_STEPS = 150
WINDOW, ROWS, TEST_ROWS, MASKED = 128, 16, 128, 0.15


def step(results: Results, options: argparse.Namespace) -> None:
    width = 8 if options.quick else WIDTH
    x, calls, floats = torch.randn(1, width), {}, {}
    torch.manual_seed(0)
    lstm = nn.LSTM(width, width).eval()
    h = torch.zeros(1, 1, width), torch.zeros(1, 1, width)
    calls["torch.nn.LSTM"], floats["torch.nn.LSTM"] = lambda: lstm(x[None], h), 2 * width
    for name in STEP:
        layer = layers.build(name, width).eval()
        state = layer.init_state(1)
        calls[name] = lambda layer=layer, state=state: layer.step(x, state)
        floats[name] = sum(leaf.numel() * (2 if leaf.is_complex() else 1) for _, leaf in leaves(state))
    if not all(results.timed(need="step", model=name, width=width) for name in calls):
        with torch.inference_mode():
            took = measure(calls, options.rounds)
        for name, each in took.items():
            row = {"microseconds": 1e6 * each.processor, "floats": floats[name]}
            results.add(need="step", model=name, width=width, **row)


def digits() -> Any:
    """Return pixels (n, 64) in [0, 1] for training and test, and their classes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    split: Any = train_test_split(x.astype(np.float32) / 16, y, test_size=0.25, random_state=0)
    return map(torch.from_numpy, split)


def both(results: Results, options: argparse.Namespace) -> None:
    x, test, classes, answers = digits()

    def series(layer: str, **more: Any) -> Callable[[Tensor], Tensor]:
        model = SequenceClassifier(10, Stack(DIM, DEPTH, layer, **more), Features(1), pool=pool_of(layer))
        return Reading(lambda rows: model(rows[..., None])[0], model)

    def images() -> Callable[[Tensor], Tensor]:
        model = vim(10, Patches((8, 8), 1, 2), DIM, DEPTH)
        return Reading(lambda rows: model(rows.view(-1, 1, 8, 8)), model)

    models = {
        "vim": images,
        "bidirectional lru": lambda: series("bidirectional", layer_options={"layer": "lru"}),
        "bidirectional gru": lambda: series("bidirectional", layer_options={"layer": "gru"}),
        "lru": lambda: series("lru"),
        "gru": lambda: series("gru"),
    }
    for name, make in models.items():
        steps = 2 if options.quick else STEPS
        if results.has(need="both", model=name, steps=steps):
            continue
        torch.manual_seed(0)
        model, draw = make(), np.random.default_rng(0)

        def loss(_: int, model: Any = model, draw: np.random.Generator = draw) -> Tensor:
            rows = torch.from_numpy(draw.integers(len(x), size=32))
            return F.cross_entropy(model(x[rows]), classes[rows])

        minutes = learn(model, steps, loss)
        with torch.inference_mode():
            right = (model(test).argmax(1) == answers).double().mean().item()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        results.add(need="both", model=name, steps=steps, accuracy=right, parameters=parameters, minutes=minutes)


def hidden(results: Results, options: argparse.Namespace) -> None:
    x, test, _, _ = digits()
    steps = 2 if options.quick else HIDDEN_STEPS
    for name in ("bidirectional lru", "bidirectional gru", "lru", "gru"):
        if results.has(need="hidden", model=name, steps=steps):
            continue
        torch.manual_seed(0)
        model, draw = Filling(name), np.random.default_rng(0)

        def loss(_: int, model: Filling = model, draw: np.random.Generator = draw) -> Tensor:
            return model.error(x[torch.from_numpy(draw.integers(len(x), size=32))], draw)

        minutes = learn(model, steps, loss)
        with torch.inference_mode():
            error = (model.error(test, np.random.default_rng(1)) / (test - x.mean(0)).square().mean()).item()
        results.add(need="hidden", model=name, steps=steps, error=error, minutes=minutes)


def dna(results: Results, options: argparse.Namespace) -> None:
    steps, length = (2, 16) if options.quick else (STEPS, WINDOW)
    source: Any = data.sources.get("ecoli")()
    parts = [torch.from_numpy(np.asarray(part).astype(np.int64)) + FIRST_BASE for part in source.texts]
    models = {
        "caduceus": lambda: caduceus(DIM, DEPTH),
        "bidirectional mamba": lambda: strands(both_strands=True),
        "bidirectional mamba, one strand": lambda: strands(both_strands=False),
        "hyena_dna": lambda: hyena_dna(DIM, DEPTH, length),
    }
    for name, make in models.items():
        if results.has(need="dna", model=name, steps=steps):
            continue
        torch.manual_seed(0)
        model, draw = make(), np.random.default_rng(0)
        asked = next_base if name == "hyena_dna" else masked_bases

        def loss(_: int, model: Any = model, draw: np.random.Generator = draw, asked: Any = asked) -> Tensor:
            return asked(model, windows(parts[0], ROWS, length, draw), draw)

        minutes = learn(model, steps, loss)
        test = np.random.default_rng(1)
        with torch.inference_mode():
            nats = [asked(model, windows(parts[-1], ROWS, length, test), test).item() for _ in range(TEST_ROWS // ROWS)]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        bits = float(np.mean(nats)) / math.log(2)
        results.add(need="dna", model=name, steps=steps, bits=bits, parameters=parameters, minutes=minutes)


def strands(*, both_strands: bool) -> StrandModel:
    stack = Stack(DIM, DEPTH, "bidirectional", layer_options={"layer": "mamba"}, channel_mixer="none")
    return StrandModel(VOCABULARY, stack, both_strands=both_strands)


class Filling(nn.Module):
    """Tell the pixels that are hidden, at each place from those that the stack has read there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        wrapper, _, layer = name.rpartition(" ")
        options = {"layer_options": {"layer": layer}} if wrapper else {}
        self.places = nn.Parameter(torch.zeros(64, DIM))
        self.enter, self.stack, self.leave = (
            nn.Linear(2, DIM),
            Stack(DIM, 1, wrapper or layer, **options),
            nn.Linear(DIM, 1),
        )

    def error(self, rows: Tensor, draw: np.random.Generator) -> Tensor:
        """Mean squared error of the 15 % of the pixels that are hidden."""
        hidden = torch.from_numpy(draw.random(rows.shape) < MASKED)
        known = torch.stack([rows.where(~hidden, 0), hidden.float()], 2)
        told = self.leave(self.stack(self.enter(known) + self.places)[0])[..., 0]
        return F.mse_loss(told[hidden], rows[hidden])


class Reading(nn.Module):
    """A model, and how it reads rows of pixels."""

    def __init__(self, read: Callable[[Tensor], Tensor], model: nn.Module) -> None:
        super().__init__()
        self.model, self.read = model, read

    def forward(self, rows: Tensor) -> Tensor:
        return self.read(rows)


def pool_of(layer: str) -> str:
    """A causal model answers at the last step; one that reads both ways knows the whole at each."""
    return "mean" if layer == "bidirectional" else "last"


def learn(model: Any, steps: int, loss: Callable[[int], Tensor]) -> float:
    began = time.perf_counter()
    optimize(model, steps, RATE, 0, loss)
    return (time.perf_counter() - began) / 60


def windows(genome: Tensor, count: int, length: int, draw: np.random.Generator) -> Tensor:
    begins = torch.from_numpy(draw.integers(len(genome) - length, size=(count, 1)))
    return genome[begins + torch.arange(length)]


def masked_bases(model: Any, bases: Tensor, draw: np.random.Generator) -> Tensor:
    """Mean nats of the bases at 15 % of the positions, which are hidden."""
    hidden = torch.from_numpy(draw.random(bases.shape) < MASKED)
    return F.cross_entropy(model(bases.where(~hidden, MASK))[hidden], bases[hidden])


def next_base(model: Any, bases: Tensor, draw: np.random.Generator) -> Tensor:
    """Mean nats of each base from those before it."""
    return F.cross_entropy(model(bases[:, :-1])[0].flatten(0, 1), bases[:, 1:].flatten())


NAMES = {"step": step, "both": both, "hidden": hidden, "dna": dna}


def main() -> None:
    options = parse(parser(__doc__, NAMES, rounds=7))
    results = Results("needs", options)
    for name in options.names:
        NAMES[name](results, options)


if __name__ == "__main__":
    main()
