"""Time each layer on a CPU beside `torch.nn.LSTM` of the same width, forward and backward.

    python benchmarks/slow_corners.py [NAME ...] [--threads 2] [--rounds 5]

NAME is a registered layer or preset; without names: every layer, and every preset that runs code of its own. x is (4,
1024, 256) in float32, options are the defaults, and the gradients are those of x and of all parameters. Each layer runs
in turns with the LSTM in one process. A number is the layer's median time over the LSTM's: of the clock, and of the
processor, which other work on the machine disturbs less. `*` marks more than 3, `**` more than 6.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from run import machine
from scanl import layers

BATCH, STEPS, DIM = 4, 1024, 256
MARKS = 6.0, 3.0


def both(module: nn.Module) -> Callable[[], None]:
    x = torch.randn(BATCH, STEPS, DIM, requires_grad=True)
    leaves = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]

    def call() -> None:
        torch.autograd.grad(module(x)[0].sum(), leaves, allow_unused=True)

    return call


def compare(name: str, rounds: int) -> tuple[float, float, float]:
    """Return the layer's time over the LSTM's, by the clock and by the processor, and its seconds by the clock."""
    torch.manual_seed(0)
    calls = both(nn.LSTM(DIM, DIM, batch_first=True)), both(layers.build(name, DIM))
    for call in calls:  # compiles kernels
        call()
    clock, processor = ([[], []] for _ in range(2))
    for _, (number, call) in itertools.product(range(rounds), enumerate(calls)):
        start = time.perf_counter(), time.process_time()
        call()
        clock[number].append(time.perf_counter() - start[0])
        processor[number].append(time.process_time() - start[1])
    (lstm, layer), (lstm_cpu, layer_cpu) = ([statistics.median(times) for times in kind] for kind in (clock, processor))
    return layer / lstm, layer_cpu / lstm_cpu, layer


def timed(name: str) -> bool:
    layer = layers.get(name)
    return layer.preset_of is None or layer.own_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{machine('cpu')}\nload at the start {os.getloadavg()[0]:.1f}")
    print(f"{'layer':32}{'clock':>8}{'processor':>11}{'ms':>9}")
    ratios = {}
    for name in options.names or filter(timed, layers.names()):
        ratios[name], processor, seconds = compare(name, options.rounds)
        mark = "*" * sum(ratios[name] > limit for limit in MARKS)
        print(f"{name:32}{ratios[name]:8.2f}{processor:11.2f}{1000 * seconds:9.1f} {mark}", flush=True)
    counts = ", ".join(f"{sum(ratio > limit for ratio in ratios.values())} above {limit:g}" for limit in MARKS)
    print(f"load at the end {os.getloadavg()[0]:.1f}; of {len(ratios)} layers {counts}")


if __name__ == "__main__":
    main()
