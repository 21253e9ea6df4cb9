"""Learn from a stream without end: memory and time of a sample along the stream, and the time beside deep-river's.

    python benchmarks/speed/endless.py [lru] [columnar] [deep_river] [--samples 1000000] [--width 64]

lru, columnar: `scanl learn -` reads numbers from a pipe and predicts the next one, in a process of its own, by
`online_lru` and by `diagonal_rtrl`. Each row is a twentieth of the stream: the memory of the process in use at its end,
and the processor's time of a sample. Compiling is in the first.

deep_river: the rolling LSTM of deep-river with the same width, which goes back 10 steps, and learners of ours, in one
process by turns: the processor's time of a sample, prediction and update. It needs `pip install deep-river`.
The rows are in benchmarks/results/endless.csv.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from scanl.learning.online import AnswerNumbers, make_loop
from scanl.learning.run.config import StackConfig

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

CASES = {"lru": "online_lru", "columnar": "diagonal_rtrl"}
PARTS = 20
WINDOW = 10  # steps of deep-river's gradient
TURN = 200  # samples of one learner before the next one's turn


def numbers(count: int) -> np.ndarray:
    """Return two sines and noise."""
    at, draw = np.arange(count), np.random.default_rng(0)
    return np.sin(0.3 * at) + np.sin(0.071 * at) + 0.1 * draw.standard_normal(count)


def process(pid: int) -> tuple[float, float]:
    """Return the resident MiB of a process, and the seconds of the processor that it has used."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return resident, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def endless(results: Results, options: argparse.Namespace, layer: str) -> None:
    samples = 2 * PARTS if options.quick else options.samples
    key = {"name": layer, "samples": samples, "width": options.width}
    if results.timed(**key):
        return
    command = [
        sys.executable, "-m", "scanl.cli", "learn", "-", "--layer", layer, "--dim", str(options.width), "--algorithm",
        CASES[layer], "--horizon", "1",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as learner:
        assert learner.stdin is not None
        before, part = 0.0, samples // PARTS
        values = numbers(samples)
        for number in range(PARTS):
            learner.stdin.write("".join(f"{value:.6f}\n" for value in values[number * part :][:part]))
            learner.stdin.flush()  # the pipe holds some thousand lines: the process is at most so far behind
            resident, used = process(learner.pid)
            results.add(**key, part=number + 1, resident_mib=resident, processor_ms=1e3 * (used - before) / part)
            before = used
        learner.stdin.close()
    if learner.returncode:
        raise RuntimeError(f"scanl learn ended with {learner.returncode}")


def beside(results: Results, options: argparse.Namespace) -> None:
    from deep_river.regression import RollingRegressor  # pyright: ignore[reportMissingImports]

    if results.timed(name="deep_river", width=options.width):
        return
    width = options.width

    class Rolling(torch.nn.Module):
        def __init__(self, n_features: int) -> None:
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(n_features, width, 1), torch.nn.Linear(width, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][-1])

    other = RollingRegressor(Rolling(1), loss_fn="mse", optimizer_fn="adam", lr=1e-3, window_size=WINDOW)
    stacks = {layer: StackConfig(layer=layer, dim=width, depth=1) for layer in CASES}
    loops = {
        layer: make_loop(AnswerNumbers(1, 10_000, False), 1, stack, algorithm=CASES[layer], lr=[1e-3], compile_after=50)
        for layer, stack in stacks.items()
    }
    values = numbers(10**6)
    took: dict[str, list[float]] = {name: [] for name in ("deep_river", *CASES)}
    for turn in range(1 + (2 if options.quick else options.rounds)):
        for name in took:
            pairs = zip(values[turn * TURN :][:TURN], values[turn * TURN + 1 :][:TURN], strict=True)
            begin = time.process_time()
            for now, following in pairs:
                if name == "deep_river":
                    other.predict_one({"x": now})
                    other.learn_one({"x": now}, following)
                else:
                    loops[name].answer([now])
                    loops[name].learn(following)
            took[name].append(1e3 * (time.process_time() - begin) / TURN)
    for name, times in took.items():
        # The first turn compiles.
        results.add(name="deep_river", width=width, learner=name, processor_ms=float(np.median(times[1:])))


def main() -> None:
    made = parser(__doc__, (*CASES, "deep_river"), rounds=10)
    made.add_argument("--samples", type=int, default=10**6)
    made.add_argument("--width", type=int, default=64)
    options = parse(made)
    torch.set_num_threads(1)
    results = Results("endless", options)
    for name in options.names:
        if name == "deep_river":
            beside(results, options)
        else:
            endless(results, options, name)


if __name__ == "__main__":
    main()
