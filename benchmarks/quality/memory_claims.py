"""Train layers that remember beyond a segment until they show what their papers claim, and print their scores.

    python benchmarks/quality/memory_claims.py [NAME ...]      # each name takes at most 40 minutes of one thread

A name is a claim. Its runs are made by `scanl train`, one stage from the weights of the one before, and scored by
`scanl eval`. The first run must reach the bar of the claim; the others, of another layer with the same data, batch and
steps, must miss it. The exit status is 1 if a claim did not hold. Runs are in runs/memory_claims and are exact to the
seed; what was interrupted there goes on. The rows are in benchmarks/results/memory_claims.csv: score, minutes by the
clock and minutes of the processor.
"""

import json
import re
import resource
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scanl import tasks

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from quality.seen_to_learn import scanl

FOLDER = Path("runs", "memory_claims")


class Run(NamedTuple):
    """stages: options of `scanl train`, one after the other."""

    layer: str
    stages: tuple[str, ...]


class Claim(NamedTuple):
    """runs: the first shows the claim, the others are beside it.   exam: options of `scanl eval`.

    reached: the score that the first run must reach.   missed: the score that no other may reach.
    """

    task: str
    runs: tuple[Run, ...]
    exam: str
    reached: float
    missed: float | None = None

    def show(self, name: str, results: Results) -> bool:
        """Train each run, unless its score is recorded, and return whether the claim holds."""
        task, holds = tasks.build(self.task), True
        for number, run in enumerate(self.runs):
            if not results.has(name=name, layer=run.layer):
                score, minutes, processor = trained(f"{name}-{run.layer}", self.task, run, self.exam)
                results.add(
                    name=name, layer=run.layer, exam=self.exam, score=score, minutes=minutes, processor=processor
                )
            score = float(results.of(name=name, layer=run.layer)[-1]["score"])
            if number == 0:
                holds &= task.reaches(score, self.reached)
            elif self.missed is not None:
                holds &= not task.reaches(score, self.missed)
        return holds


def reversal(layer: str, model: str) -> Run:
    """Reversal of 6 symbols, of 12, then of 24, read in segments of 12 steps."""
    stages = (
        "--data-options.length 6 --steps 2000 --lr 3e-3 --until 0.99",
        "--data-options.length 12 --steps 1000 --lr 3e-3 --until 0.99",
        "--data-options.length 24 --steps 1000 --lr 2e-3 --until 0.98",
    )
    common = f"{model} --dim 64 --batch-size 32 --weight-decay 0 --eval-every 250 --eval-examples 256"
    return Run(layer, tuple(f"{stage} {common}" for stage in stages))


NTM = (
    "--layer-options '{width: 100, num_slots: 128, head_dim: 20}' --dim 32 --depth 1 --channel-mixer none "
    "--batch-size 16 --steps 5000 --lr 3e-3 --weight-decay 0 --clip-value 10 --eval-every 250 "
    "--eval-examples 128 --until 0.0005"
)
RMT = "--layer-options '{num_heads: 4, num_slots: 8, chunk_size: 12, depth: 2}' --depth 1 --channel-mixer none"
INFINI = (
    "--layer-options '{num_heads: 4, chunk_size: 32}' --dim 64 --depth 3 --channel-options '{expand: 2.0}' "
    "--weight-decay 0"
)
XL = "--layer-options '{num_heads: 4, window: 12, chunk_size: 12}' --depth 2 --channel-options '{expand: 2.0}'"
PARITY = "--data-options.length 64 --dim 64 --batch-size 32 --steps 3000 --lr 2e-3 --weight-decay 0 --eval-every 500"
TLB = "--layer-options '{num_heads: 4, num_slots: 4, chunk_size: 4, depth: 2}' --depth 1 --channel-mixer none"
FULL = "--layer-options '{num_heads: 4}' --depth 3"
CLAIMS = {
    "copy-ntm": Claim("copy_vectors", (Run("ntm", (NTM,)),), "--length 60", 0.01),
    "pass_key-infini": Claim(
        "pass_key",
        (
            Run(
                "infini_attention",
                tuple(
                    f"--data-options.length {length} --batch-size {size} --lr {lr} {INFINI} {stage}"
                    for length, size, lr, stage in (
                        (80, 16, 3e-3, "--steps 3000 --eval-every 250 --eval-examples 256 --until 0.99"),
                        (200, 16, 2e-3, "--steps 1000 --eval-every 100 --eval-examples 256 --until 0.98"),
                        (500, 8, 1e-3, "--steps 600 --eval-every 100 --eval-examples 256 --until 0.98"),
                        (2112, 4, 1e-3, "--steps 300 --eval-every 100 --eval-examples 64"),
                    )
                ),
            ),
        ),
        "--length 2112 --count 200",
        0.95,
    ),
    "parity-tlb": Claim(
        "parity",
        (Run("tlb", (f"{TLB} {PARITY}",)), Run("attention", (f"{FULL} {PARITY}",))),
        "--length 256",
        0.95,
        0.7,
    ),
    "reverse-rmt": Claim("segments", (reversal("rmt", RMT), reversal("transformer_xl", XL)), "", 0.95, 0.7),
}


@contextmanager
def counted(path: Path) -> Iterator[None]:
    """Add the minutes that are spent inside, by the clock and of the processor, to those that a file has."""
    before = minutes(path)
    begin, processor = time.perf_counter(), of_processor()
    try:
        yield
    finally:
        spent = time.perf_counter() - begin, of_processor() - processor
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([old + new / 60 for old, new in zip(before, spent, strict=True)]), encoding="utf-8")


def minutes(path: Path) -> list[float]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else [0.0, 0.0]


def of_processor() -> float:
    """Return the seconds of the processor that commands have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def trained(name: str, task: str, run: Run, exam: str) -> tuple[float, float, float]:
    """Train in the folders NAME-1, NAME-2 and so on, and return the score and the minutes."""
    spent, before = FOLDER / f"{name}.json", ""
    for number, stage in enumerate(run.stages, 1):
        folder = FOLDER / f"{name}-{number}"
        with counted(spent):
            if (folder / "config.yaml").exists():
                scanl("train", "--resume", str(folder))  # which does nothing after the last step
            else:
                first = ["--init", before] if before else []
                options = [*shlex.split(stage), *first, "--out", str(folder)]
                scanl("train", "--data", task, "--layer", run.layer, *options)
        before = str(folder)
    with counted(spent):
        score = re.search(r"this model +(\S+)", scanl("eval", before, *shlex.split(exam)))
    assert score is not None
    clock, processor = minutes(spent)
    return float(score[1]), clock, processor


def main() -> int:
    """Return the exit status: 1 when a claim did not hold."""
    options = parse(parser(__doc__, CLAIMS))
    results, failed = Results("memory_claims", options), False
    for name in options.names:
        holds = CLAIMS[name].show(name, results)
        print(f"{name}: the claim {'holds' if holds else 'does not hold'}")
        failed |= not holds
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
