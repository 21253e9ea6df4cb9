"""Train five layers on three tasks of Long Range Arena: attention, and four layers that carry a state.

    python benchmarks/quality/arena.py TASK [--minutes 4] [--runs FOLDER]     # listops, text or image

Each model has two blocks of width 64 without a channel mixer, one set of options, and --minutes of training with
`scanl train`. The score is the accuracy on 1,000 to 2,500 rows of the test part: every so many batches, as a file may
be sorted by class. `listops` makes its rows as the paper did, of 300 to 600 tokens in place of 500 to 2,000; `text`
reads the first 1,000 bytes of a review; `image` is CIFAR-10 in grey, 1,024 pixels. `scanl data get imdb` and
`scanl data get cifar10` bring the data. An interrupted run goes on from its folder.

Source: Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", ICLR 2021.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from quality.source import trained
from scanl.learning import RunFolder
from scanl.learning.evaluation import measures

LAYERS: dict[str, dict[str, Any]] = {
    "attention": {}, "linear_rnn": {}, "mamba": {}, "mamba2": {}, "rwkv6": {},
}  # fmt: skip
TASKS: dict[str, tuple[str, dict[str, Any], int]] = {  # the source, its options, and of how many batches one is scored
    "listops": ("listops", {"length": 600, "least": 300}, 1),
    "text": ("imdb", {"max_length": 1000}, 12),
    "image": ("lra_image", {}, 8),
}
SHORT: dict[str, dict[str, Any]] = {"listops": {"length": 30, "least": 5}, "text": {"max_length": 20}, "image": {}}


def command(task: str, layer: str, minutes: float, out: Path, quick: bool) -> list[str]:
    """Return the words of the command that trains a model."""
    source, own, _ = TASKS[task]
    given = SHORT[task] if quick else own
    words = ["train", "--data", source, "--data-options", json.dumps(given), "--layer", layer]
    words += ["--layer-options", json.dumps(LAYERS[layer]), "--dim", "64", "--depth", "2"]
    words += ["--channel-mixer", "none", "--batch-size", "2" if quick else "32"]
    words += ["--eval-examples", "4" if quick else "128"]
    return [*words, "--lr", "3e-3", "--minutes", f"{minutes:g}", "--out", str(out)]


def main() -> None:
    made = parser(__doc__, TASKS, threads=1)
    made.add_argument("--minutes", type=float, default=4, help="of training")
    made.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs here")
    options: argparse.Namespace = parse(made)
    minutes = 0.005 if options.quick else options.minutes
    results = Results("arena", options)
    with tempfile.TemporaryDirectory() as scratch:
        for task, layer in itertools.product(options.names, LAYERS):
            if results.has(task=task, model=layer, budget=minutes):
                continue
            out = (options.runs or Path(scratch)) / f"{task}-{layer}"
            took = trained(command(task, layer, minutes, out, options.quick), out, options.threads)
            run, begin = RunFolder.open(out), time.perf_counter()
            model = run.load_model()
            examples = itertools.islice(run.source.exam().examples, 0, 1 if options.quick else None, TASKS[task][2])
            scores = measures(model, run.source, examples)
            results.add(
                task=task,
                model=layer,
                budget=minutes,
                minutes=took,
                exam_minutes=(time.perf_counter() - begin) / 60,
                parameters=sum(p.numel() for p in model.parameters()),
                **scores,
            )


if __name__ == "__main__":
    main()
