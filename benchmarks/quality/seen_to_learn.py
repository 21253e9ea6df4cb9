"""Train the layers that are known to solve a synthetic task, and score them where they are said to.

    python benchmarks/quality/seen_to_learn.py selective_copy-mamba  # minutes to half an hour on one core

Most are one to three `scanl train` commands, which are printed: a later one starts from the weights of the one before,
often of a shorter version of the task. Runs are in runs/seen_to_learn and are exact to the seed. Others compare two
layers, and the exit status is 1 if a claim did not hold. The rows are in benchmarks/results/seen_to_learn.csv.

`mackey_glass-esn` is an echo state network that generates the Mackey-Glass series freely, beside PyPI's reservoirpy
where it is installed. The measure is NRMSE_84 of Jaeger and Haas, "Harnessing Nonlinearity", Science 304, 2004: from
many starts the network reads the series, then it reads its own answers for 84 steps. The root mean squared error of the
84th is divided by the standard deviation of the series.
"""

import importlib
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scanl import tasks
from scanl.layers.rnn.esn import ESN
from scanl.learning.forecasting.readout import Ridge
from scanl.tasks.mackey_glass import euler

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

FOLDER = Path("runs", "seen_to_learn")
AHEAD = 84
PENALTY = 1e-8


class Seen(NamedTuple):
    """stages: options of `scanl train`, one after the other.   length: what is scored in the end; None: as trained."""

    task: str
    layer: str
    stages: tuple[str, ...]
    length: int | None = None

    def run(self, name: str, results: Results) -> bool:
        if not results.has(name=name):
            scored(results, name, self.layer, "", lambda: trained(name, *self))
        return True


class Side(NamedTuple):
    """Options of `scanl train` for each run of a layer; the best run counts."""

    layer: str
    runs: tuple[str, ...]


class Beside(NamedTuple):
    """A layer that learns a task, and one that does not with the same budget.

    stages: options of every run, one stage after the other.
    reached: the score that the learner must reach; None: a better one than the other's.
    missed: the score that the other must not reach.
    length: what is scored in the end; None: as trained.
    """

    task: str
    stages: tuple[str, ...]
    learner: Side
    other: Side
    reached: float | None = None
    missed: float | None = None
    length: int | None = None

    def run(self, name: str, results: Results) -> bool:
        """Train each run, unless its score is recorded, and return whether the claim holds."""
        task, best = tasks.build(self.task), []
        for layer, runs in (self.learner, self.other):
            scores = []
            for number, own in enumerate(runs, 1):
                stages = tuple(f"{stage} {own}" for stage in self.stages)
                key = f"{name}-{layer}-{number}", self.task, layer, stages, self.length
                if not results.has(name=name, layer=layer, options=own):
                    scored(results, name, layer, own, lambda key=key: trained(*key))
                scores.append(float(results.of(name=name, layer=layer, options=own)[-1]["score"]))
            best.append(min(scores) if task.best < task.chance else max(scores))
        ours, theirs = best
        reached = ours != theirs and task.reaches(ours, theirs if self.reached is None else self.reached)
        return reached and (self.missed is None or not task.reaches(theirs, self.missed))


class Forecast(NamedTuple):
    """An echo state network on the Mackey-Glass series. below: the bar of NRMSE_84."""

    below: float

    def run(self, name: str, results: Results) -> bool:
        """Score five reservoirs of each program, of which the median counts."""
        sizes, medians = Sizes(), {}
        programs = {"esn": reservoir, "reservoirpy": reservoirpy}
        for who, generate in programs.items():
            if who != "esn" and find_spec(who) is None:
                print(f"{who} is not installed: pip install {who}")
                continue
            for seed in range(sizes.seeds):
                if not results.has(name=name, layer=who, options=f"seed {seed}"):
                    scored(results, name, who, f"seed {seed}", lambda s=seed, g=generate: nrmse(sizes, g, s))
            rows = results.of(name=name, layer=who)
            medians[who] = statistics.median(float(row["score"]) for row in rows[-sizes.seeds :])
        return medians["esn"] < self.below and medians["esn"] <= medians.get("reservoirpy", medians["esn"])


class Sizes(NamedTuple):
    """units: of the reservoir.   washout: steps read before a state counts.   fitted: steps of the regression.

    starts: of the generation, `apart` steps from one to the next.   seeds: reservoirs, of which the median counts.
    """

    units: int = 500
    washout: int = 500
    fitted: int = 3000
    starts: int = 100
    apart: int = 50
    seeds: int = 5


def series(steps: int, delay: int = 17, fine: int = 10) -> Tensor:
    """Return the Mackey-Glass series, less 1: (steps,), after 1000 that still depend on the constant start."""
    return torch.from_numpy(euler(np.full((1, delay * fine), 1.2), 1.2, 1000 + steps, fine)[0, 1000:]) - 1


@torch.no_grad()
def reservoir(fitted: Tensor, starts: Tensor, seed: int, sizes: Sizes) -> Tensor:
    """Fit on a series (T), and return what follows each row of `starts` (N, W): (N, 84)."""
    torch.manual_seed(seed)
    layer = ESN(1, sizes.units, spectral_radius=1.1, leak=0.35, input_connectivity=1.0, bias_scaling=0.3).double()
    seen: list[Tensor] = []
    layer.readout.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    layer(fitted[None, :-1, None])
    weight, bias = Ridge(PENALTY).add(seen[0][0, sizes.washout :], fitted[sizes.washout + 1 :, None]).solve()
    layer.readout.weight.copy_(weight)
    layer.readout.bias.copy_(bias)
    y, state = layer(starts[..., None])
    answers = [y[:, -1]]
    while len(answers) < AHEAD:
        y, state = layer(answers[-1][:, None], state)
        answers.append(y[:, -1])
    return torch.cat(answers, 1)


def reservoirpy(fitted: Tensor, starts: Tensor, seed: int, sizes: Sizes) -> Tensor:
    """Do the same with reservoirpy."""
    nodes = importlib.import_module("reservoirpy.nodes")
    bias = 0.3 * np.random.default_rng(seed).choice([-1.0, 1.0], sizes.units)
    states = nodes.Reservoir(sizes.units, lr=0.35, sr=1.1, input_connectivity=1.0, bias=bias, seed=seed)
    readout = nodes.Ridge(ridge=PENALTY)
    s = states.run(fitted[:-1, None].numpy())[sizes.washout :]
    readout.fit(s, fitted[sizes.washout + 1 :, None].numpy())
    rows = []
    for start in starts:
        states.reset()
        answers = [readout.run(states.run(start[:, None].numpy())[-1:])[0]]
        while len(answers) < AHEAD:
            answers.append(readout.run(states.run(answers[-1][None]))[0])
        rows.append(torch.from_numpy(np.concatenate(answers)))
    return torch.stack(rows)


def nrmse(sizes: Sizes, generate: Callable[[Tensor, Tensor, int, Sizes], Tensor], seed: int) -> float:
    """Return NRMSE_84 of one reservoir."""
    x = series(sizes.fitted + sizes.apart * sizes.starts + sizes.washout + AHEAD)
    later = x[sizes.fitted :].unfold(0, sizes.washout + AHEAD, sizes.apart)[: sizes.starts]
    answers = generate(x[: sizes.fitted], later[:, : sizes.washout], seed, sizes)
    return float((answers[:, -1] - later[:, -1]).square().mean().sqrt() / x.std())


def short_then_long(layer: str, options: str, steps: int = 3000, often: int = 250) -> Seen:
    """Selective copy of 16 symbols among 16 noise tokens, then among 256."""
    model = f"--layer-options '{options}' --dim 64 --depth 4 --eval-every {often}"
    return Seen(
        "selective_copy",
        layer,
        (
            f"--data-options.length 16 {model} --batch-size 32 --steps 3000 --lr 3e-3 --until 0.99",
            f"--data-options.length 256 {model} --batch-size 16 --steps {steps} --lr 2e-3 --until 0.995",
        ),
    )


MQAR = "num_pairs: 8, vocab_size: 1024"
DELTA = "--layer-options '{num_heads: 2, head_dim: 32, expand_v: 1}' --dim 64 --depth 2 --weight-decay 0.01"
ADDING = "--layer-options '{r_min: 0.998, r_max: 0.99998, max_phase: 0.002}' --dim 32 --depth 2 --eval-examples 256"
LASTING = (  # steps so small at the start that nothing is forgotten within 2^14 of them
    "--layer-options '{dt_min: 1e-6, dt_max: 1e-4, dt_init_floor: 1e-7}' --channel-mixer none --dim 64 --depth 1 "
    "--batch-size 32 --weight-decay 0"
)
CELL = "--dim 32 --depth 1 --channel-mixer none --batch-size 32 --weight-decay 0 --eval-every 50 --eval-examples 256"
RATES = ("3e-3", "5e-3", "1e-2")
SEEN = {
    "selective_copy-mamba": short_then_long("mamba", "{}"),
    "selective_copy-gla": short_then_long("gla", "{num_heads: 4, expand_k: 1}"),
    "selective_copy-rwkv6": short_then_long("rwkv6", "{head_dim: 16}", steps=2000),
    "selective_copy-s4d": short_then_long("s4d", "{}", often=500),
    "selective_copy-gated_deltanet": Seen(
        "selective_copy",
        "gated_deltanet",
        (
            "--data-options.length 256 --layer-options '{num_heads: 2, head_dim: 32, expand_v: 1}' --dim 64 --depth 2 "
            "--batch-size 16 --steps 5000 --lr 2e-3 --eval-every 250 --until 0.995",
        ),
    ),
    "mqar-gated_deltanet": Seen(
        "mqar",
        "gated_deltanet",
        (
            f"--data-options '{{length: 32, {MQAR}}}' {DELTA} --batch-size 64 --steps 3000 --lr 3e-3 --eval-every 250 "
            "--until 0.995",
            f"--data-options '{{length: 128, {MQAR}}}' {DELTA} --batch-size 32 --steps 2000 --lr 2e-3 --eval-every 250 "
            "--until 0.995",
        ),
    ),
    "induction-mamba": Seen(
        "induction",
        "mamba",
        (
            f"--data-options.length 32 {LASTING} --steps 1500 --lr 5e-3 --eval-every 250 --until 0.999",
            f"--data-options.length 256 {LASTING} --steps 1000 --lr 1e-3 --eval-every 100",
            f"--data-options.length 256 {LASTING} --steps 500 --lr 3e-4 --eval-every 500",
        ),
        2**14,
    ),
    "mackey_glass-esn": Forecast(1e-2),
    "copy-exprnn": Beside(
        "copy",
        (
            "--data-options.length 500 --dim 128 --depth 1 --channel-mixer none --batch-size 32 --steps 500 "
            "--weight-decay 0 --eval-every 100 --eval-examples 256 --until 0.999",
        ),
        Side("exprnn", ("--lr 1e-3",)),
        Side("elman", ("--lr 3e-4", "--lr 1e-3", "--lr 3e-3")),
        reached=0.99,
        missed=0.2,
    ),
    "irregular-cfc": Beside(  # with as many parameters: 12,705 and 12,736
        "irregular",
        ("--depth 1 --channel-mixer none --batch-size 50 --steps 3000 --weight-decay 0",),
        Side("cfc", tuple(f"--dim 32 --layer-options '{{hidden_dim: 64, activation: silu}}' --lr {r}" for r in RATES)),
        Side("gru", tuple(f"--dim 45 --lr {r}" for r in RATES)),
    ),
    "adding-lem": Beside(  # at 1e-2 an LSTM learns the task too, in twice as many steps
        "adding",
        (
            f"--data-options.length 200 {CELL} --steps 500 --until 0.003",
            f"--data-options.length 2000 {CELL} --steps 100 --until 0.008",
        ),
        Side("lem", ("--layer-options '{dt: 0.1}' --lr 1e-2",)),
        Side("lstm", ("--lr 1e-3", "--lr 3e-3", "--lr 1e-2")),
        reached=0.01,
        missed=0.01,
    ),
    "parity-deltanet": Beside(
        "parity",
        tuple(
            "--layer-options '{num_heads: 2}' --dim 32 --depth 1 --channel-mixer none --weight-decay 0 "
            f"--eval-examples 256 --eval-every 100 {stage}"
            for stage in (
                "--data-options.length 40 --batch-size 32 --steps 300 --lr 1e-2",
                "--data-options.length 256 --batch-size 16 --steps 100 --lr 3e-3",
            )
        ),
        Side("deltanet_negative_eigenvalues", ("",)),
        Side("gla", ("",)),
        reached=0.99,
        missed=0.6,
        length=512,
    ),
    "permutations-deltaproduct": Beside(  # a convolution mixes neighbouring permutations, and neither layer learns
        "word_problem",
        tuple(
            "--dim 32 --depth 1 --channel-mixer none --weight-decay 0 "
            f"--batch-size 32 --eval-examples 256 --eval-every 100 {stage}"
            for stage in (
                "--data-options.length 8 --steps 300 --lr 1e-2",
                "--data-options.length 32 --steps 200 --lr 5e-3",
                "--data-options.length 128 --steps 100 --lr 3e-3",
            )
        ),
        Side("deltaproduct", ("--layer-options '{num_heads: 2, head_dim: 16, expand_v: 1, conv_size: null}'",)),
        Side("gla", ("--layer-options '{num_heads: 2}'",)),
        reached=0.99,
        missed=0.6,
        length=256,
    ),
    "adding-lru": Seen(
        "adding",
        "lru",
        (f"--data-options.length 500 {ADDING} --batch-size 32 --steps 8000 --lr 4e-3 --eval-every 200 --until 0.008",),
    ),
}


def scanl(*arguments: str) -> str:
    """Run a command of `scanl`, and return what it printed."""
    print("scanl", shlex.join(arguments), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scanl.cli", *arguments]
    printed = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    print(printed, end="", flush=True)
    return printed


def trained(name: str, task: str, layer: str, stages: tuple[str, ...], length: int | None = None) -> float:
    """Train in the folder `name`-1, `name`-2 and so on, and return the score."""
    folder, before = FOLDER, ""
    for number, stage in enumerate(stages, 1):
        folder = FOLDER / f"{name}-{number}"
        first = ["--init", before] if before else []
        scanl("train", "--data", task, "--layer", layer, *shlex.split(stage), *first, "--out", str(folder))
        before = str(folder)
    options = ["--count", "1000"] if length is None else ["--length", str(length), "--count", "200"]
    found = re.search(r"this model +(\S+)", scanl("eval", str(folder), *options))
    assert found is not None
    return float(found[1])


def scored(results: Results, name: str, layer: str, options: str, run: Callable[[], float]) -> None:
    """Add the score of a run, and its minutes by the clock."""
    begin = time.perf_counter()
    score = run()
    results.add(name=name, layer=layer, options=options, score=score, minutes=(time.perf_counter() - begin) / 60)


def main() -> int:
    """Return the exit status: 1 when a claim did not hold."""
    options = parse(parser(__doc__, SEEN))
    results, failed = Results("seen_to_learn", options), False
    for name in options.names:
        holds = SEEN[name].run(name, results)
        failed |= not holds
        if not isinstance(SEEN[name], Seen):
            print(f"{name}: the claim {'holds' if holds else 'does not hold'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
