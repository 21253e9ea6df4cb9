"""Runs of `scanl train` by several processes have the losses of one process, also when they were killed on the way.

    python benchmarks/quality/sharded.py            # all: five minutes on two cores
    python benchmarks/quality/sharded.py killed     # some of them

forms: how several processes share the run; they are forked, and find each other as under torchrun.   launched: the same
by the launchers themselves.   killed: two processes with a shard of the model each get SIGKILL at a random moment, and
as many as the row says go on.   lost: one process of several gets SIGKILL; how long the others run, and how many say
that another process has ended.   other: one of two processes has another version of scanl; how many say so.

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
from torch.distributed import TCPStore

from scanl.cli import main as scanl
from scanl.learning.run import train as loaded  # before the forks: Lightning takes seconds  # noqa: F401
from scanl.parallel import context

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

LAYER, STEPS, ROWS = "gated_deltanet", 24, 8
TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"
FORMS = {  # name: the processes, and their options
    "ddp": (2, "--strategy ddp"),
    "fsdp": (2, "--strategy fsdp"),
    "fsdp, 4": (4, "--strategy fsdp"),
    "fsdp, recomputed": (2, "--strategy fsdp --recompute"),
    "stretches": (2, "--strategy ddp --sequence-parallel 2"),
    "ddp x stretches": (4, "--strategy ddp --sequence-parallel 2"),
    "fsdp x stretches": (4, "--strategy fsdp --sequence-parallel 2"),
}
RESUMED = {1: "--strategy auto", 2: "--strategy fsdp", 4: "--strategy fsdp"}  # processes that go on, and their options
LOST = ("ddp", "fsdp", "fsdp x stretches")
LAUNCHED = {  # the words before and after `scanl train`
    "scanl train": ((), "--devices 2"),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), ""),
}
BOUND = 64


class Processes:
    """Forked processes that run `scanl train`, and their output. other: added to the version of the second one."""

    def __init__(self, words: str, size: int, log: Path, other: str = "") -> None:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        rows = ROWS * (2 if "--sequence-parallel" in words else 1) // size
        self.log, self.store, self.pids = log, store, list[int]()
        for rank in range(size):
            if (pid := os.fork()) == 0:
                context.__version__ += other * rank
                self._run([*words.split(), "--batch-size", str(rows)], rank, size)
            self.pids.append(pid)

    def _run(self, words: list[str], rank: int, size: int) -> None:
        """Be one of the processes, and never return."""
        said = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if size > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
            numbers |= {"MASTER_PORT": self.store.port, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": 0}
            os.environ |= {name: str(value) for name, value in numbers.items()}
            os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        code = 1
        try:
            code = scanl(["train", *words])
        finally:
            sys.stderr.flush()
            os._exit(code)

    def codes(self) -> list[int]:
        """Wait for the end of all, and return their exit codes; that of a killed one is negative."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def done(self) -> None:
        codes = self.codes()
        assert not any(codes), (codes, self.log.read_text())

    def lines(self, beginning: str) -> int:
        """Return how many lines of the output begin so."""
        return sum(line.startswith(beginning) for line in self.log.read_text().splitlines())


def fresh(folder: Path, steps: int) -> str:
    """Return the options of a new run."""
    sizes = "--dim 32 --depth 2 --sequence-length 64 --eval-bytes 64 --eval-every 20 --log-every 1"
    return f"--data {TEXT} --out {folder} --layer {LAYER} --steps {steps} --accelerator cpu {sizes}"


def wait_for_rows(folder: Path, processes: Processes, rows: int) -> None:
    """Wait until a run has written a checkpoint, and the rows of some steps."""
    metrics = folder / "metrics.csv"
    while not (metrics.exists() and metrics.read_text().count("\n") > rows):
        assert os.waitpid(processes.pids[0], os.WNOHANG) == (0, 0), processes.log.read_text()
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
    for name, (size, words) in FORMS.items():
        if results.has(part="forms", form=name):
            continue
        folder = scratch / name.replace(" ", "_")
        Processes(f"{fresh(folder, steps)} {words}", size, scratch / "log").done()
        results.add(part="forms", form=name, options=words, processes=size, difference=difference(folder, alone))


def launched(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    for name, (launcher, words) in LAUNCHED.items():
        if results.has(part="launched", form=name):
            continue
        folder = scratch / name.replace(" ", "_")
        words = f"{fresh(folder, steps)} --strategy fsdp --batch-size {ROWS // 2} {words}"
        command = [sys.executable, *launcher, "-m", "scanl.cli", "train", *words.split()]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        results.add(part="launched", form=name, processes=2, difference=difference(folder, alone))


def killed(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    for size, words in RESUMED.items():
        if results.has(part="killed", resumed=size):
            continue
        folder, log = scratch / f"killed-{size}", scratch / f"log-{size}"
        processes = Processes(f"{fresh(folder, steps)} --strategy fsdp --save-seconds 0", 2, log)
        wait_for_rows(folder, processes, random.randrange(steps - 1))
        time.sleep(random.uniform(0, 0.2))
        processes.kill(0, 1)
        assert processes.codes() == [-signal.SIGKILL] * 2
        after = len(losses(folder))
        Processes(f"--resume {folder} {words} --save-seconds 30 --devices {size}", size, log).done()
        results.add(part="killed", resumed=size, killed_after=after, difference=difference(folder, alone))


def lost(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    for name in LOST:
        if results.has(part="lost", form=name):
            continue
        (size, words), folder = FORMS[name], scratch / f"lost-{name.replace(' ', '_')}"
        processes = Processes(f"{fresh(folder, 100_000)} {words}", size, scratch / f"log-{name}")
        wait_for_rows(folder, processes, 2)
        processes.kill(1)
        begin = time.monotonic()
        codes = processes.codes()
        seconds = time.monotonic() - begin
        assert sorted(codes) == [-signal.SIGKILL, *[2] * (size - 1)], (codes, processes.log.read_text())
        errors = processes.lines("scanl: train: another process of the run has ended")
        assert errors == size - 1, processes.log.read_text()
        results.add(part="lost", form=name, options=words, processes=size, seconds=seconds, errors=errors)


def other(results: Results, options: argparse.Namespace, scratch: Path, alone: Path, steps: int) -> None:
    if results.has(part="other"):
        return
    begin = time.monotonic()
    processes = Processes(f"{fresh(scratch / 'other', steps)} --strategy ddp", 2, scratch / "log-other", "+other")
    assert all(processes.codes())
    errors = processes.lines("scanl: parallel: rank 1 has another version of scanl than rank 0")
    assert errors == 2, processes.log.read_text()
    results.add(part="other", processes=2, errors=errors, seconds=time.monotonic() - begin)


PARTS = {"forms": forms, "launched": launched, "killed": killed, "lost": lost, "other": other}


def main() -> None:
    options = parse(parser(__doc__, PARTS))
    results, steps = Results("sharded", options), 6 if options.quick else STEPS
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        Processes(fresh(scratch / "alone", steps), 1, scratch / "log-alone").done()
        for part in options.names:
            PARTS[part](results, options, scratch, scratch / "alone", steps)


if __name__ == "__main__":
    main()
