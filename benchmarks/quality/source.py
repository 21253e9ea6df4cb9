"""Train language models on the source of Python's standard library: attention that remembers, and memories beside it.

    python benchmarks/quality/source.py [NAME ...] [--minutes 15] [--runs FOLDER]

Each model has two blocks and the width with which it comes nearest to --parameters, 800,000. It trains for --minutes on
sequences of 512 bytes with the options of `scanl train`. Segments, chunks and windows have 128 bytes;
`window_attention` sees the last 512. The score is that of `scanl eval`: bits per byte of the held-out files, read from
the beginning with the state carried over, so that a model may remember more than a segment. An interrupted run goes on
from its folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.learning import RunFolder
from scanl.learning.evaluation import measures
from scanl.models import LanguageModel, Stack

SEGMENT, DEPTH = 128, 2
# Options of the layer, then of the stack. rmt and flash mix the channels themselves; two layers of flash are a block.
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "window_attention": ({"num_heads": 4, "window": 512, "rope_fraction": 1.0}, {}),
    "transformer_xl": ({"num_heads": 4, "window": SEGMENT, "chunk_size": SEGMENT}, {}),
    "rmt": ({"num_heads": 4, "chunk_size": SEGMENT, "depth": DEPTH}, {"depth": "1", "channel_mixer": "none"}),
    "infini_attention": ({"num_heads": 4, "chunk_size": SEGMENT}, {}),
    "block_recurrent": ({"num_heads": 4, "window": SEGMENT, "num_slots": SEGMENT}, {}),
    "flash": ({"chunk_size": SEGMENT}, {"channel_mixer": "none", "depth": "4"}),
    "mega": ({"chunk_size": SEGMENT}, {}),
    "hawk": ({}, {}),
    "gated_deltanet": ({"num_heads": 4}, {}),
}


def stack(name: str, dim: int) -> Stack:
    """Return the stack of a model of a width."""
    options, more = MODELS[name]
    mixer = more.get("channel_mixer", "gated_mlp")
    return Stack(dim, int(more.get("depth", DEPTH)), name, layer_options=options, channel_mixer=mixer)


def width(name: str, parameters: int) -> int:
    """Return the multiple of 8 with which the number of parameters comes nearest to the given one."""

    def distance(dim: int) -> int:
        with torch.device("meta"):
            model = LanguageModel(256, stack(name, dim))
        return abs(sum(p.numel() for p in model.parameters()) - parameters)

    return min(range(16, 513, 8), key=distance)


def command(name: str, dim: int, out: Path, minutes: float) -> list[str]:
    """Return the words of the command that trains a model."""
    options, more = MODELS[name]
    words = ["train", "--layer", name, "--layer-options", json.dumps(options), "--dim", str(dim)]
    words += ["--depth", more.get("depth", str(DEPTH)), "--sequence-length", "512", "--batch-size", "8"]
    if "channel_mixer" in more:
        words += ["--channel-mixer", more["channel_mixer"]]
    return [*words, "--lr", "3e-3", "--minutes", f"{minutes:g}", "--out", str(out)]


def trained(words: list[str], out: Path, threads: int) -> float:
    """Run the command, or go on with its run, and return the minutes."""
    begin, environment = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": str(threads)}
    words = ["train", "--resume", str(out)] if out.exists() else words  # which does nothing after the last step
    subprocess.run([sys.executable, "-m", "scanl.cli", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - begin) / 60


def main() -> None:
    made = parser(__doc__, MODELS, threads=1)
    made.add_argument("--minutes", type=float, default=15, help="of training")
    made.add_argument("--parameters", type=int, default=800_000, help="of each model, nearly")
    made.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the runs here")
    options: argparse.Namespace = parse(made)
    minutes, parameters = (0.01, 20_000) if options.quick else (options.minutes, options.parameters)
    results = Results("source", options)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names:
            if results.has(model=name, budget=minutes):
                continue
            out, dim = (options.runs or Path(scratch)) / name, width(name, parameters)
            took = trained(command(name, dim, out, minutes), out, options.threads)
            run = RunFolder.open(out)
            model, exam = run.load_model(), run.source.exam()
            count, scores = sum(p.numel() for p in model.parameters()), measures(model, run.source, exam.examples)
            results.add(
                **{"model": name, "budget": minutes, "minutes": took, "dim": dim, "parameters": count, **scores}
            )


if __name__ == "__main__":
    main()
