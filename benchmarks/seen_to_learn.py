"""Train the layers that are known to solve a synthetic task, and score them where they are said to.

    python benchmarks/seen_to_learn.py                       # lists them
    python benchmarks/seen_to_learn.py selective_copy-mamba  # minutes to half an hour on one core

Each is one to three `scanl train` commands, which are printed: a later one starts from the weights of the one before,
often of a shorter version of the task. Runs lie under runs/seen_to_learn and are exact to the seed.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("runs", "seen_to_learn")


class Seen(NamedTuple):
    """stages: options of `scanl train`, one after the other.   length: what is scored in the end; None: as trained."""

    task: str
    layer: str
    stages: tuple[str, ...]
    length: int | None = None


def short_then_long(layer: str, options: str, steps: int = 3000, often: int = 250) -> Seen:
    """Selective copy of 16 symbols among 16 noise tokens, then among 256."""
    model = f"--layer-options '{options}' --dim 64 --depth 4 --eval-every {often}"
    return Seen(
        "selective_copy",
        layer,
        (
            f"--task-options.length 16 {model} --batch-size 32 --steps 3000 --lr 3e-3 --until 0.99",
            f"--task-options.length 256 {model} --batch-size 16 --steps {steps} --lr 2e-3 --until 0.995",
        ),
    )


MQAR = "num_pairs: 8, vocab_size: 1024"
DELTA = "--layer-options '{num_heads: 2, head_dim: 32, expand_v: 1}' --dim 64 --depth 2 --weight-decay 0.01"
ADDING = "--layer-options '{r_min: 0.998, r_max: 0.99998, max_phase: 0.002}' --dim 32 --depth 2 --eval-examples 256"
LASTING = (  # steps so small at the start that nothing is forgotten within 2^14 of them
    "--layer-options '{dt_min: 1e-6, dt_max: 1e-4, dt_init_floor: 1e-7}' --channel-mixer none --dim 64 --depth 1 "
    "--batch-size 32 --weight-decay 0"
)
SEEN = {
    "selective_copy-mamba": short_then_long("mamba", "{}"),
    "selective_copy-gla": short_then_long("gla", "{num_heads: 4, expand_k: 1}"),
    "selective_copy-rwkv6": short_then_long("rwkv6", "{head_size: 16}", steps=2000),
    "selective_copy-s4d": short_then_long("s4d", "{}", often=500),
    "selective_copy-gated_deltanet": Seen(
        "selective_copy",
        "gated_deltanet",
        (
            "--task-options.length 256 --layer-options '{num_heads: 2, head_dim: 32, expand_v: 1}' --dim 64 --depth 2 "
            "--batch-size 16 --steps 5000 --lr 2e-3 --eval-every 250 --until 0.995",
        ),
    ),
    "mqar-gated_deltanet": Seen(
        "mqar",
        "gated_deltanet",
        (
            f"--task-options '{{length: 32, {MQAR}}}' {DELTA} --batch-size 64 --steps 3000 --lr 3e-3 --eval-every 250 "
            "--until 0.995",
            f"--task-options '{{length: 128, {MQAR}}}' {DELTA} --batch-size 32 --steps 2000 --lr 2e-3 --eval-every 250 "
            "--until 0.995",
        ),
    ),
    "induction-mamba": Seen(
        "induction",
        "mamba",
        (
            f"--task-options.length 32 {LASTING} --steps 1500 --lr 5e-3 --eval-every 250 --until 0.999",
            f"--task-options.length 256 {LASTING} --steps 1000 --lr 1e-3 --eval-every 100",
            f"--task-options.length 256 {LASTING} --steps 500 --lr 3e-4 --eval-every 500",
        ),
        2**14,
    ),
    "adding-lru": Seen(
        "adding",
        "lru",
        (f"--task-options.length 500 {ADDING} --batch-size 32 --steps 8000 --lr 4e-3 --eval-every 200 --until 0.008",),
    ),
}


def scanl(*arguments: str) -> None:
    print("scanl", shlex.join(arguments), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "scanl.cli", *arguments], check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=SEEN, default=None)
    name = parser.parse_args().name
    if name is None:
        print("\n".join(SEEN))
        return
    seen, folder, before = SEEN[name], FOLDER, ""
    for number, stage in enumerate(seen.stages, 1):
        folder = FOLDER / f"{name}-{number}"
        first = ["--init", before] if before else []
        scanl("train", "--task", seen.task, "--layer", seen.layer, *shlex.split(stage), *first, "--out", str(folder))
        before = str(folder)
    length = [] if seen.length is None else ["--length", str(seen.length)]
    scanl("eval", str(folder), *length, "--count", "1000" if seen.length is None else "200")


if __name__ == "__main__":
    main()
