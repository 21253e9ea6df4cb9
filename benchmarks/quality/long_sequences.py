"""Train on long sequences: images pixel by pixel, reviews by bytes, Wikipedia by bytes, and ListOps.

    python benchmarks/quality/long_sequences.py mnist [--seeds 2]  # a table of docs/measurements/long_sequences.md

A run is one of the library's own, with a budget of minutes. It has its folder in benchmarks/results/runs, and continues
from the last checkpoint there when it was interrupted. The weights are those that are best on a validation part of the
training part; the test part is measured once, at the end. The data lie where `scanl data get NAME` puts them.
"""

import argparse
import gzip
import lzma
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.cli.train import start_from
from scanl.data import sources
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.evaluation import measures
from scanl.learning.report import ScoreReport
from scanl.learning.run.checkpoint import read_checkpoint
from scanl.learning.run.metrics import read_metrics
from scanl.learning.run.run import Run
from scanl.learning.run.train import Outcome, planned, train

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

Options = Mapping[str, Any]

PERMUTED = {"order": "bit_reversal"}  # as S4, S5 and LRU have it
IMAGES: dict[str, dict[str, Options]] = {  # what the models of a table read
    "mnist": {"MNIST": {"data": ["mnist"]}, "permuted": {"data": ["mnist"], "data_options": PERMUTED}},
    "image_layers": {"MNIST": {"data": ["mnist"]}, "Fashion-MNIST": {"data": ["fashion_mnist"]}},
}
PIXELS: Options = {
    "dim": 64, "depth": 2, "channel_mixer": "none", "batch_size": 50, "eval_examples": 1000, "patience": 10,
}  # fmt: skip
SHORT: Options = {**PIXELS, "minutes": 15.0}
RUNS: dict[str, dict[str, Options]] = {  # of each table: by what it is called
    "mnist": {
        "s5": {**PIXELS, "layer": "s5", "lr": 4e-3, "minutes": 57.0},
        "gru": {**PIXELS, "layer": "gru", "depth": 1, "lr": 4e-3, "layer_options": {"t_max": 784}, "minutes": 57.0},
    },
    "image_layers": {
        "s5": {**SHORT, "layer": "s5", "lr": 4e-3},
        "gru": {**SHORT, "layer": "gru", "depth": 1, "lr": 4e-3, "layer_options": {"t_max": 784}},
        "lru": {**SHORT, "layer": "lru", "lr": 4e-3, "layer_options": {"r_min": 0.9, "max_phase": math.pi / 10}},
        "lstm": {**SHORT, "layer": "lstm", "depth": 1, "lr": 4e-3, "layer_options": {"t_max": 784}},
        "lem": {**SHORT, "layer": "lem", "depth": 1, "lr": 4e-3},
        "indrnn": {**SHORT, "layer": "indrnn", "lr": 1e-3, "layer_options": {"max_length": 784}},
        "hawk": {**SHORT, "layer": "hawk", "lr": 4e-3},
        "s4d": {**SHORT, "layer": "s4d", "lr": 4e-3},
    },
    "cifar10": {
        "s5": {
            **PIXELS, "data": ["cifar10"], "layer": "s5", "depth": 3, "lr": 5e-3, "patience": 20, "minutes": 75.0,
        },
    },
    "imdb": {
        "hawk": {
            "data": ["imdb"], "data_options": {"max_length": 2048}, "layer": "hawk", "dim": 64, "depth": 2,
            "channel_mixer": "none", "dropout": 0.2, "lr": 3e-3, "batch_size": 32, "eval_examples": 2500, "patience": 5,
            "minutes": 57.0,
        },
    },
    "enwik8": {
        "gru": {
            "data": ["enwik8"], "layer": "gru", "dim": 256, "depth": 2, "channel_mixer": "none", "sequence_length": 128,
            "batch_size": 32, "carry_state": True, "eval_bytes": 2**17, "lr": 3e-3, "patience": 10, "minutes": 83.0,
        },
    },
    "listops": {
        "hawk": {
            "data": ["listops"], "layer": "hawk", "dim": 64, "depth": 4, "channel_mixer": "none", "lr": 3e-3,
            "batch_size": 32, "eval_examples": 500, "minutes": 85.0,
        },
        "gru": {
            "data": ["listops"], "layer": "gru", "dim": 96, "depth": 2, "channel_mixer": "none", "lr": 3e-3,
            "batch_size": 32, "eval_examples": 500, "minutes": 34.0,
        },
    },
}  # fmt: skip
# What a run of a table learns before, one stage after the other, each from the weights of the one before.
EASIER: dict[tuple[str, str], list[Options]] = {
    ("listops", "gru"): [
        {"data_options": {"least": 4, "length": 60}, "batch_size": 64, "minutes": 16.0},
        {"data_options": {"least": 30, "length": 200}, "batch_size": 64, "minutes": 18.0},
        {"data_options": {"least": 100, "length": 600}, "minutes": 14.0},
    ],
}


def images(table: str, options: argparse.Namespace) -> None:
    """Accuracy on the test part of images that are read pixel by pixel."""
    results = Results(table, options)
    for seed in range(options.seeds):
        for layer, own in RUNS[table].items():
            for kind, source in IMAGES[table].items():
                if not results.has(images=kind, model=layer, seed=seed):
                    path = results.folder / "runs" / f"{table}-{kind}-{layer}-{seed}"
                    found = _run(path, _short({**own, **source}, options), seed)
                    results.add(images=kind, model=layer, seed=seed, **found)


def enwik8(table: str, options: argparse.Namespace) -> None:
    """Bits per byte of the last five million bytes of enwik8: layers, two compressors and counts of five bytes."""
    results, (train_part, _, test) = Results(table, options), sources.get("enwik8")().texts
    text = test.tobytes()
    others: dict[str, Callable[[], float]] = {
        "gzip -9": lambda: 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9": lambda: 8 * len(lzma.compress(text, preset=9)) / len(text),
        "5-gram": lambda: counted(train_part, test, 5),
    }
    for who, measure in others.items():
        if not results.has(model=who, seed=0):
            begin = time.perf_counter()
            bits = measure()
            minutes = (time.perf_counter() - begin) / 60
            results.add(**{"model": who, "seed": 0, "bits per byte": bits, "minutes": minutes})
    runs(table, options)


def runs(table: str, options: argparse.Namespace) -> None:
    """The score on the test part: of coloured images, of reviews, of Wikipedia, or of fresh rows of ListOps."""
    results = Results(table, options)
    for seed in range(options.seeds):
        for who, own in RUNS[table].items():
            if not results.has(model=who, seed=seed):
                path = results.folder / "runs" / f"{table}-{who}-{seed}"
                easier = [_short(stage, options) for stage in EASIER.get((table, who), ())]
                results.add(model=who, seed=seed, **_run(path, _short(own, options), seed, easier))


def _short(own: Options, options: argparse.Namespace) -> Options:
    return {**own, "minutes": 0.1} if options.quick else own


def _run(path: Path, options: Options, seed: int, easier: Sequence[Options] = ()) -> dict[str, Any]:
    """Train, or continue a run that was interrupted, and measure the model on the test part.

    easier: what each stage before has in place of the options. Minutes and steps are those of all stages.
    """
    minutes, processor, steps, init = 0.0, 0.0, 0, None
    for number, stage in enumerate(easier):
        own = str(path.with_name(f"{path.name}-easier-{number}"))
        folder, outcome, seconds = _trained(TrainConfig.of(**{**options, **stage}, seed=seed, out=own, init=init))
        minutes, processor, steps = minutes + _seconds(folder) / 60, processor + seconds / 60, steps + outcome.step
        init = own
    config = TrainConfig.of(**options, seed=seed, out=str(path), init=init)
    folder, outcome, seconds = _trained(config)
    source = config.open_source()
    report = ScoreReport.of(source)
    validation = [float(row[report.measured]) for row in read_metrics(folder) if row[report.measured]]
    return {
        **measures(outcome.model, source, source.exam().examples),
        "validation": max(validation) if report.higher_is_better else min(validation),
        "minutes": minutes + _seconds(folder) / 60,
        "processor_minutes": processor + seconds / 60,
        "steps": steps + outcome.step,
        "parameters": sum(p.numel() for p in outcome.model.parameters()),
    }


def _seconds(folder: RunFolder) -> float:
    return read_checkpoint(folder.checkpoint)["scanl"]["seconds"]


def _trained(config: TrainConfig) -> tuple[RunFolder, Outcome, float]:
    """Return the folder of a run that has ended, its outcome, and the seconds of the processor in this call."""
    path = Path(str(config.run.out))
    begun = (path / "config.yaml").exists()
    folder = RunFolder.open(path) if begun else RunFolder.fresh(config)
    ready = Run(config, folder)
    if not begun:
        folder.create(config)
    if config.run.init is not None and not folder.checkpoint.exists():
        start_from(config.run.init, ready.model)
    with folder.locked():
        began = time.process_time()
        outcome = train(ready, planned(ready))
        processor = time.process_time() - began
    if outcome.interrupted:
        raise SystemExit(130)
    return folder, outcome, processor


def counted(train_part: NDArray[np.uint8], test: NDArray[np.uint8], order: int) -> float:
    """Return the bits per byte of `test` by counts of up to `order` successive bytes in `train_part`.

    With c a context of n - 1 bytes, N(c) its count and D(c) how many different bytes follow it, the probability is

        p_n(b | c) = (N(c b) + D(c) p_{n-1}(b | c without its first byte)) / (N(c) + D(c)),  p_0 = 1/256,

    and p_{n-1} where c never occurs. The first bytes of the test part have shorter contexts.

    Source: Witten and Bell, "The Zero-Frequency Problem", IEEE Trans. Inf. Theory 37(4), 1991, method C.
    """
    chance = np.full(len(test), 1 / 256)
    for n in range(1, order + 1):
        seen, times = np.unique(_strings(train_part, n), return_counts=True)
        contexts, first = np.unique(seen >> np.uint64(8), return_index=True)
        different = np.diff(np.append(first, len(seen)))
        total = np.add.reduceat(times, first)
        asked = _strings(test, n)
        with_byte, place = _found(seen, asked), _found(contexts, asked >> np.uint64(8))
        known, spread = place >= 0, different[place]
        count = np.where(with_byte >= 0, times[with_byte], 0)
        tail = chance[n - 1 :]
        chance[n - 1 :] = np.where(known, (count + spread * tail) / (total[place] + spread), tail)
    return float(-np.log2(chance).mean())


def _strings(text: NDArray[np.uint8], n: int) -> NDArray[np.uint64]:
    """Return every n successive bytes as one number."""
    number = np.zeros(len(text) - n + 1, np.uint64)
    for i in range(n):
        number = (number << np.uint64(8)) | text[i : len(text) - n + 1 + i]
    return number


def _found(known: NDArray[np.uint64], asked: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the index of each asked number among the sorted known ones, or -1."""
    place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[place] == asked, place, -1)


TABLES: dict[str, Callable[[str, argparse.Namespace], None]] = {
    **dict.fromkeys(IMAGES, images), "cifar10": runs, "imdb": runs, "enwik8": enwik8, "listops": runs,
}  # fmt: skip


def main() -> None:
    options = parse(parser(__doc__, TABLES, seeds=True))
    for name in options.names:
        TABLES[name](name, options)


if __name__ == "__main__":
    main()
