"""Runs of `scanl train` by several processes have the losses of one process, also when they were killed on the way.

    python benchmarks/quality/sharded.py            # all: ten minutes on two cores
    python benchmarks/quality/sharded.py killed     # some of them

alone: one process, with which the others are compared.   forms: how several processes share the run.   torchrun: the
same, started by torchrun.   killed: two processes with a shard of the model each get SIGKILL at a random moment, and as
many as the row says go on.   lost: one process of several gets SIGKILL; how long the others run, and how many say that
another process has ended.   other: one of two processes has another version of scanl, and both say so.

`difference` is the largest of (loss - that of one process) / loss / step, in units of float32's epsilon. A batch that
is summed in several parts is rounded in another way, and the steps that follow enlarge what that makes, so at most 64
is asserted.
"""

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

LAYER, STEPS, ROWS = "gated_deltanet", 24, 8
TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"
FORMS = {  # name: the options
    "ddp": "--strategy ddp --devices 2",
    "fsdp": "--strategy fsdp --devices 2",
    "fsdp, 4": "--strategy fsdp --devices 4",
    "fsdp, recomputed": "--strategy fsdp --devices 2 --recompute",
    "stretches": "--devices 2 --sequence-parallel 2",
    "ddp x stretches": "--devices 4 --sequence-parallel 2",
    "fsdp x stretches": "--strategy fsdp --devices 4 --sequence-parallel 2",
}
RESUMED = {  # processes that go on: their options
    1: "--strategy auto --devices 1",
    2: "--strategy fsdp --devices 2",
    4: "--strategy fsdp --devices 4",
}
LOST = ("ddp", "fsdp", "fsdp x stretches")
BOUND = 64
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OTHER = """
import os, sys
import scanl
scanl.__version__ += "+other" * int(os.environ["RANK"])
from scanl.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def rows_each(words: str) -> str:
    """Return the option that gives a step `ROWS` rows, whatever the number of processes."""
    options = dict(zip(words.split()[::2], words.split()[1::2], strict=False))
    return f"--batch-size {ROWS * int(options.get('--sequence-parallel', 1)) // int(options.get('--devices', 1))}"


def command(words: str, launcher: tuple[str, ...] = (sys.executable,)) -> list[str]:
    return [*launcher, "-m", "scanl.cli", "train", *words.split()]


def fresh(folder: Path, steps: int) -> str:
    """Return the options of a new run."""
    sizes = "--dim 32 --depth 2 --sequence-length 64 --eval-bytes 64 --eval-every 20 --log-every 1"
    return f"--data {TEXT} --out {folder} --layer {LAYER} --steps {steps} --accelerator cpu {sizes}"


def begun(words: list[str]) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def done(words: list[str]) -> None:
    process = begun(words)
    said = process.communicate()[1]
    assert process.returncode == 0, said


def wait_for_rows(folder: Path, process: "subprocess.Popen[str]", rows: int) -> None:
    """Wait until a run has written a checkpoint, and the rows of some steps."""
    metrics = folder / "metrics.csv"
    while not (metrics.exists() and metrics.read_text().count("\n") > rows):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def losses(folder: Path) -> list[float]:
    """Return the loss of every step."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1)), rows
    return [float(row["loss"]) for row in rows]


def difference(folder: Path, alone: Path) -> float:
    pairs = list(zip(losses(folder), losses(alone), strict=True))
    eps = torch.finfo(torch.float32).eps
    largest = max(abs(loss - one) / one / step for step, (loss, one) in enumerate(pairs, 1)) / eps
    assert largest <= BOUND, (largest, pairs)
    return largest


def forms(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    for name, words in list(FORMS.items())[: 2 if options.quick else None]:
        if not results.has(part="forms", form=name):
            folder = scratch / name.replace(" ", "_")
            done(command(f"{fresh(folder, steps)} {words} {rows_each(words)}"))
            results.add(part="forms", form=name, options=words, difference=difference(folder, alone))


def torchrun(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    if results.has(part="torchrun"):
        return
    folder = scratch / "torchrun"
    done(command(f"{fresh(folder, steps)} --strategy fsdp --batch-size {ROWS // 2}", (sys.executable, *TORCHRUN)))
    results.add(part="torchrun", form="fsdp", difference=difference(folder, alone))


def killed(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    draw = random.Random()
    for number, words in RESUMED.items():
        if results.has(part="killed", resumed=number):
            continue
        folder, first = scratch / f"killed-{number}", FORMS["fsdp"]
        process = begun(command(f"{fresh(folder, steps)} {first} {rows_each(first)} --save-seconds 0"))
        wait_for_rows(folder, process, draw.randrange(steps - 1))
        time.sleep(draw.uniform(0, 0.2))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        step = len(losses(folder))
        done(command(f"--resume {folder} {words} {rows_each(words)} --save-seconds 30"))
        results.add(part="killed", resumed=number, killed_after=step, difference=difference(folder, alone))


def lost(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    for name in LOST:
        if results.has(part="lost", form=name):
            continue
        folder = scratch / f"lost-{name.replace(' ', '_')}"
        words = FORMS[name]
        process = begun(command(f"{fresh(folder, 100_000)} {words} {rows_each(words)}"))
        wait_for_rows(folder, process, 2)
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(ranks[0]), signal.SIGKILL)
        begin = time.monotonic()
        said = process.communicate(timeout=60)[1].splitlines()
        seconds = time.monotonic() - begin
        errors = [line for line in said if line.startswith("scanl: train: another process of the run has ended")]
        assert process.returncode == 2, (process.returncode, said)
        assert len(errors) == len(ranks), said  # of all processes but the one that was killed
        results.add(
            part="lost", form=name, options=words, processes=len(ranks) + 1, seconds=seconds, errors=len(errors)
        )


def other(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    if results.has(part="other"):
        return
    begin = time.monotonic()
    words = f"{fresh(scratch / 'other', steps)} --batch-size {ROWS // 2}"
    process = begun([sys.executable, *TORCHRUN, "--no-python", sys.executable, "-c", OTHER, *words.split()])
    said = process.communicate(timeout=600)[1].splitlines()
    errors = [line for line in said if line.startswith("scanl: parallel: rank 1 has another version of scanl")]
    assert process.returncode
    assert len(errors) == 2, said
    results.add(part="other", processes=2, seconds=time.monotonic() - begin, errors=len(errors))


PARTS = {"forms": forms, "torchrun": torchrun, "killed": killed, "lost": lost, "other": other}


def main() -> None:
    options = parse(parser(__doc__, PARTS))
    results, steps = Results("sharded", options), 6 if options.quick else STEPS
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        done(command(f"{fresh(scratch / 'alone', steps)} {rows_each('')}"))
        for part in options.names:
            PARTS[part](results, options, scratch, scratch / "alone", steps)


if __name__ == "__main__":
    main()
