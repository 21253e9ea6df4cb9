"""What an `exact` context costs: training and decoding of layers within it, beside the same without.

    python benchmarks/speed/exact.py [hawk] [mamba] ... [--threads 2]

training: forward and backward passes of a layer over (2, 512) tokens; decoding: one step, batch 1, without gradients.
Both at widths 256 and 768. The programs take turns. The rows are in benchmarks/results/exact.csv.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import scanl
from scanl import layers
from scanl.layers.state import detach

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, measure, parse, parser

LAYERS = ("gru", "hawk", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "mlstm")
WIDTHS, BATCH, STEPS = (256, 768), 2, 512


def exactly(call: Callable[[], object]) -> Callable[[], object]:
    def within() -> object:
        with scanl.exact():
            return call()

    return within


def training(layer: layers.Layer, width: int, steps: int) -> Callable[[], object]:
    x, parameters = torch.randn(BATCH, steps, width), list(layer.parameters())

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x)[0].sum(), parameters, allow_unused=True)

    return both


def decoding(layer: layers.Layer, width: int, steps: int) -> Callable[[], object]:
    x = torch.randn(1, width)
    with torch.no_grad():
        state = detach(layer(torch.randn(1, steps, width))[1])

    @torch.no_grad()
    def tokens() -> None:
        for _ in range(8):
            layer.step(x, state)

    return tokens


WORK = {"training": training, "decoding": decoding}


def run(results: Results, options: argparse.Namespace, name: str) -> None:
    for width in (48,) if options.quick else WIDTHS:
        for work, make in WORK.items():
            key = {"layer": name, "width": width, "work": work}
            if results.timed(**key):
                continue
            torch.manual_seed(0)
            call = make(layers.build(name, width), width, 8 if options.quick else STEPS)
            took = measure({"plain": call, "exact": exactly(call)}, options.rounds)
            ratio = took["exact"].seconds / took["plain"].seconds
            results.add(**key, plain_ms=1e3 * took["plain"].seconds, exact_ms=1e3 * took["exact"].seconds, ratio=ratio)


def main() -> None:
    options = parse(parser(__doc__, LAYERS, rounds=15))
    results = Results("exact", options)
    for name in options.names:
        run(results, options, name)


if __name__ == "__main__":
    main()
