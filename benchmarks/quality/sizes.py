"""How the sizes of a model act: state, width, depth, expansion and window, one at a time.

    python benchmarks/quality/sizes.py [NAME ...] [--seeds 1]

A language model of bytes trains for a fixed number of steps on the source of Python's standard library, with one
learning rate and the schedule of `scanl train`. Its layer is mamba2 without a channel mixer, so all sizes are those of
the layer. State, expansion and window are changed at width 64 and depth 2; a depth has the width that gives it about
as many parameters as the others. The score is bits per byte of held-out files. Minutes are those of the processor on
one thread; about four for a seed. Seed 0 is shown, the others say how much a seed changes. The rows are in
benchmarks/results/sizes.csv, and docs/sizes.png shows them.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from scanl.layers.state import leaves
from scanl.learning import TrainConfig
from scanl.learning.evaluation import measures
from scanl.learning.run.config import seeded_model

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, parse, parser, picture
from quality.learn import learn

LAYER, DIM, DEPTH = "mamba2", 64, 2
BASE = {"state_dim": 64, "expand": 2, "conv_size": 4, "head_dim": 16}
SIZES: dict[str, list[dict[str, Any]]] = {  # what differs from the base
    "state": [{"state_dim": size} for size in (1, 4, 16, 64, 256)],
    "width": [{"dim": dim} for dim in (16, 32, 64, 128)],
    "expansion": [{"expand": expand} for expand in (1, 2, 4)],
    "window": [{"conv_size": size} for size in (1, 2, 3, 4, 8, 16)],
    "depth": [{"depth": 1, "dim": 88}, {"depth": 2}, {"depth": 4, "dim": 48}, {"depth": 8, "dim": 32}],
}
VARIED = {"state": "state_dim", "width": "dim", "expansion": "expand", "window": "conv_size", "depth": "depth"}
STEPS, LENGTH, BATCH, RATE, SCORED = 400, 128, 8, 4e-3, 65536


def configuration(changed: dict[str, Any], seed: int, quick: bool) -> TrainConfig:
    """Return the configuration of a run."""
    sizes = {"dim": DIM, "depth": DEPTH, **BASE, **changed}
    dim, depth = sizes.pop("dim"), sizes.pop("depth")
    return TrainConfig.of(
        layer=LAYER, layer_options=sizes, dim=dim, depth=depth, channel_mixer="none", lr=RATE, seed=seed,
        steps=2 if quick else STEPS, sequence_length=16 if quick else LENGTH, batch_size=BATCH,
        eval_bytes=64 if quick else SCORED,
    )  # fmt: skip


def run(results: Results, changed: dict[str, Any], seed: int, quick: bool) -> None:
    """Train a model, unless that has been done, and add its score."""
    key = {"dim": DIM, "depth": DEPTH, **BASE, **changed, "seed": seed}
    if results.has(**key):
        return
    config = configuration(changed, seed, quick)
    config.check()
    source = config.open_source()
    model = seeded_model(config, source.question)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = sum(leaf.numel() for _, leaf in leaves(model.stack.init_state(1)))
    began = time.process_time()
    learn(model, (source, config))
    minutes = (time.process_time() - began) / 60
    with torch.inference_mode():
        scores = measures(model, source, source.exam(sample=True).examples)
    results.add(**key, parameters=parameters, state=state, processor=minutes, **scores)


def draw(results: Results) -> None:
    """Draw the score of seed 0 against each size, beside that of the model in the middle."""
    middle = {"dim": DIM, "depth": DEPTH, **BASE}
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, changes in SIZES.items():
        for change in changes:
            for row in results.of(**{**middle, **change}, seed=0):
                size = {**middle, **change}[VARIED[name]] / middle[VARIED[name]]
                lines.setdefault(name, []).append((size, float(row["bits per byte"])))
    sizes = "size, beside that of the model in the middle"
    picture(results.pictures / "sizes.png", [Panel("One size changed at a time", sizes, "bits per byte", lines, "x")])


def main() -> None:
    options = parse(parser(__doc__, SIZES, threads=1, seeds=True))
    results = Results("sizes", options)
    for seed in range(options.seeds):
        for name in options.names:
            for changed in SIZES[name][: 1 if options.quick else None]:
                run(results, changed, seed, options.quick)
    draw(results)


if __name__ == "__main__":
    main()
