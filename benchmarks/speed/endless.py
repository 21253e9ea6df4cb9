"""Learn from a stream without end: memory and time of a sample along the stream, and the time beside deep-river's.

    python benchmarks/speed/endless.py [lru] [columnar] [deep_river] [--samples 1000000] [--width 64] [--original CLONE]

lru, columnar: `scanl learn -` reads numbers from a pipe and predicts the next one, in a process of its own, by
`online_lru` and by `diagonal_rtrl`. Each row is a twentieth of the stream: the memory of the process in use at its end,
and the processor's time of a sample. Compiling is in the first.

deep_river: the rolling LSTM of deep-river with the same width, which goes back 10 steps, and learners of ours, in one
process by turns: the time of a sample, prediction and update, of the processor and by the clock. It needs
`pip install deep-river`.

--original: a clone of https://github.com/NicolasZucchet/Online-learning-LR-dependencies, the authors' program of online
LRU, and `pip install jax flax optax`. Its training step takes turns with the others: one layer of the same width, one
sequence of one step. It carries no state to the next call, and the time of its answer is left out.
The rows are in benchmarks/results/endless.csv.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from scanl.learning.online import AnswerNumbers, Online
from scanl.models import Stack

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
    if results.timed(**key, part=PARTS):
        return
    known = results.of(**key)  # of a run that did not end, or with --again
    results.rows = [row for row in results.rows if row not in known]
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


def original(clone: Path, width: int) -> Callable[[float, float], Any]:
    """Return the training step of the authors' program, for a number and the next one."""
    import jax  # pyright: ignore[reportMissingImports]
    from flax import linen  # pyright: ignore[reportMissingImports]

    sys.modules.setdefault("wandb", ModuleType("wandb"))  # it is imported, and logs nothing here
    vars(linen.recurrent).setdefault("RNNCellCompatibilityMeta", type(linen.Module))  # of a GRU; later flax lacks it
    sys.path.insert(0, str(clone))
    from online_lru.rec import LRU  # pyright: ignore[reportMissingImports]
    from online_lru.seq_model import BatchClassificationModel  # pyright: ignore[reportMissingImports]
    from online_lru.train_helpers import create_train_state, train_step  # pyright: ignore[reportMissingImports]

    mode = "online_full"
    recurrent = partial(LRU, d_hidden=width, d_model=width, seq_length=1, training_mode=mode)
    model = BatchClassificationModel(
        rec=recurrent, rec_type="LRU", d_input=1, d_output=2, d_model=width, n_layers=1, seq_length=1, padded=False,
        activation="full_glu", dropout=0.0, training=True, training_mode=mode, mode="none", prenorm=True,
    )  # fmt: skip
    key = jax.random.PRNGKey(0)
    state, carried = create_train_state(model, key, False, in_dim=1, bsz=1, seq_len=1)
    mask = np.ones((1, 1), np.float32)

    def step(now: float, following: float) -> None:
        nonlocal state, carried
        x, label = np.full((1, 1, 1), now, np.float32), np.full((1, 1), following > now, np.float32)
        state, loss, carried = train_step(state, carried, key, x, label, mask, model)
        loss.block_until_ready()

    return step


def beside(results: Results, options: argparse.Namespace) -> None:
    from deep_river.regression import RollingRegressor  # pyright: ignore[reportMissingImports]

    width = options.width
    if results.timed(name="deep_river", width=width):
        return
    known = results.of(name="deep_river", width=width)
    results.rows = [row for row in results.rows if row not in known]

    class Rolling(torch.nn.Module):
        def __init__(self, n_features: int) -> None:
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(n_features, width, 1), torch.nn.Linear(width, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][-1])

    other = RollingRegressor(Rolling(1), loss_fn="mse", optimizer_fn="adam", lr=1e-3, window_size=WINDOW)
    loops = {
        layer: Online(
            Stack(width, 1, layer), AnswerNumbers(feedback=False), algorithm=algorithm, compile_after=50
        ).begin(1)
        for layer, algorithm in CASES.items()
    }
    authors = None if options.original is None else original(options.original, width)
    values = numbers(10**6)
    programs = "deep_river", *CASES, *(["original"] if authors else [])
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for turn in range(1 + (2 if options.quick else options.rounds)):
        for name in took:
            pairs = zip(values[turn * TURN :][:TURN], values[turn * TURN + 1 :][:TURN], strict=True)
            clock, processor = time.perf_counter(), time.process_time()
            for now, following in pairs:
                if name == "original" and authors is not None:
                    authors(now, following)
                elif name == "deep_river":
                    other.predict_one({"x": now})
                    other.learn_one({"x": now}, following)
                else:
                    loops[name].answer([now])
                    loops[name].learn(following)
            used = time.process_time() - processor, time.perf_counter() - clock
            took[name].append((1e3 * used[0] / TURN, 1e3 * used[1] / TURN))
    for name, times in took.items():
        # The first turn compiles.
        used, clock = np.median(times[1:], axis=0).tolist()
        results.add(name="deep_river", width=width, learner=name, processor_ms=used, clock_ms=clock)


def main() -> None:
    made = parser(__doc__, (*CASES, "deep_river"), rounds=10)
    made.add_argument("--samples", type=int, default=10**6)
    made.add_argument("--width", type=int, default=64)
    made.add_argument("--original", type=Path, metavar="CLONE", help="of the authors' program of online LRU")
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
