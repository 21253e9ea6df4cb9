"""Follow a stream with `scanl forecast RUN --follow`: the time of a row and the peak memory, at a tenth and at the end.

    python benchmarks/speed/follow.py [--rows 100000]

The run is that of the plain command on 2,000 hours of one series, without the model in the package. Its further rows
go to the standard input of a process of its own, which writes 12 steps and two intervals after each. pace: at_once, as
fast as they are read; alone, each after the answer to the one before. A row of results has the milliseconds a row since
the tenth before, by the clock and of the processor. The rows are in benchmarks/results/follow.csv.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from scanl.cli import main as scanl

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser, resident

TRAINING, HORIZON, TENTHS = 2000, 12, 10
ALONE = 1000  # of so many rows one is sent alone
MIB = 2**20
PACES = ("at_once", "alone")


def table(rows: int) -> pd.DataFrame:
    """A day's wave about a wave of a year, with noise, hour by hour."""
    hours = np.arange(rows)
    noise = np.random.default_rng(0).normal(size=rows)
    y = 100 * np.sin(2 * np.pi * hours / 8766) + 10 * np.sin(2 * np.pi * hours / 24) + noise
    return pd.DataFrame({"time": pd.date_range("2000-01-01", periods=rows, freq="h"), "y": y.round(3)})


def trained(folder: Path, minutes: float) -> Path:
    """Train as a newcomer does, and return the run folder."""
    table(TRAINING).to_csv(folder / "table.csv", index=False)
    roles = ["--question", "forecast", "--target", "y", "--time", "time", "--horizon", str(HORIZON)]
    out = ["--minutes", str(minutes), "--pretrained", "0", "--out", str(folder / "run")]
    assert scanl(["train", "--data", str(folder / "table.csv"), *roles, *out]) == 0
    return folder / "run"


def processor(process: int) -> float:
    """Return the seconds that a process has had of the processor, as Linux counts them."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def follow(results: Results, run: Path, lines: Sequence[bytes], pace: str) -> None:
    """Send lines to a process that follows them, and add a row of results for each tenth. lines: names, then rows."""
    command = [sys.executable, "-m", "scanl.cli", "forecast", str(run), "--follow"]
    rows, answered = len(lines) - 1, threading.Semaphore(1)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def send() -> None:
            with stdin:
                stdin.write(lines[0])
                for line in lines[1:]:
                    if pace == "alone":
                        answered.acquire()
                    stdin.write(line)
                    if pace == "alone":
                        stdin.flush()

        threading.Thread(target=send, daemon=True).start()
        stdout.readline()  # the names
        begin, used = time.perf_counter(), processor(process.pid)
        for tenth in range(1, TENTHS + 1):
            part = rows * tenth // TENTHS - rows * (tenth - 1) // TENTHS
            for _ in range(part):
                for _ in range(HORIZON):
                    assert stdout.readline(), "the process has ended"
                answered.release()
            now, peak = (time.perf_counter(), processor(process.pid)), resident("VmHWM", process.pid) / MIB
            ms, of_processor = (
                1000 * (after - before) / part for after, before in zip(now, (begin, used), strict=True)
            )
            results.add(pace=pace, rows=rows, tenth=tenth, ms=ms, processor_ms=of_processor, peak_mib=round(peak))
            begin, used = now
    assert process.returncode == 0


def measured(results: Results, options: argparse.Namespace) -> None:
    rows = 2 * TENTHS if options.quick else options.rows
    counts = {"at_once": rows, "alone": max(TENTHS, rows // ALONE)}
    paces = [pace for pace in options.names if not results.timed(pace=pace, rows=counts[pace])]
    if not paces:
        return
    lines = table(TRAINING + rows).to_csv(index=False).encode().splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder), 0.01 if options.quick else 0.5)
        for pace in paces:
            follow(results, run, [lines[0], *lines[TRAINING + 1 :][: counts[pace]]], pace)


def main() -> None:
    made = parser(__doc__, PACES)
    made.add_argument("--rows", type=int, default=100_000, help="of the stream")
    options = parse(made)
    measured(Results("follow", options), options)


if __name__ == "__main__":
    main()
