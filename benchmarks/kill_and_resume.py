"""Kill a training run at random moments, resume it each time, and compare with a run that was left alone.

    python benchmarks/kill_and_resume.py --kills 10

The weights must be equal to the bit. One thread, because sums over several threads may differ from run to run.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

TRAIN = [sys.executable, "-m", "scanl.cli", "train"]
RUN = ["--accelerator", "cpu", "--dim", "32", "--depth", "2", "--sequence-length", "64", "--save-seconds", "0.2"]


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        TRAIN + arguments, env=os.environ | threads, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"training failed with {process.returncode}:\n{errors.decode()}")


def training_since(folder: Path, launch: float) -> bool:
    """Whether the process launched then has begun its steps: it writes metrics.csv first."""
    metrics = folder / "metrics.csv"
    return metrics.exists() and metrics.stat().st_mtime > launch


def killed(options: list[str], folder: Path, kills: int, longest: float, chance: random.Random) -> int:
    """Train in `folder` to the end, killed at most `kills` times on the way; how many times it was.

    The kill comes up to `longest` seconds after the first step, or, one time in five, while the process starts.
    """
    done = 0
    while True:
        resume = (folder / "config.yaml").exists()
        launch = time.time()
        process = start(["--resume", str(folder)] if resume else [*options, "--out", str(folder)])
        if done == kills:
            finish(process)
            return done
        if early := chance.random() < 0.2:
            time.sleep(chance.uniform(0, 4))
        else:
            while process.poll() is None and not training_since(folder, launch):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, longest))
        if process.poll() is not None:
            finish(process)
            return done
        process.kill()
        process.communicate()
        done += 1
        rows = (folder / "metrics.csv").read_text().splitlines() if (folder / "metrics.csv").exists() else []
        step = rows[-1].split(",")[0] if len(rows) > 1 else "0"
        print(f"  killed {'while it started' if early else 'in training'}, after step {step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--carry-state", action="store_true")
    args = parser.parse_args()
    options = [*RUN, "--steps", str(args.steps), *(["--carry-state"] if args.carry_state else [])]
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        alone = Path(temporary, "alone")
        process = start([*options, "--out", str(alone)])
        while process.poll() is None and not training_since(alone, 0):
            time.sleep(0.01)
        began = time.perf_counter()
        finish(process)
        took = time.perf_counter() - began
        print(f"uninterrupted: {args.steps} steps in {took:.1f} s", flush=True)
        expected = load_file(alone / "model.safetensors")
        left, runs = args.kills, 0
        while left:
            runs += 1
            folder = Path(temporary, f"killed-{runs}")
            left -= killed(options, folder, left, 0.4 * took, chance)
            found = load_file(folder / "model.safetensors")
            for name, value in expected.items():
                if found[name].tobytes() != value.tobytes():
                    sys.exit(f"run {runs}: {name} differs from the uninterrupted run")
            print(f"run {runs}: weights equal to the bit", flush=True)


if __name__ == "__main__":
    main()
