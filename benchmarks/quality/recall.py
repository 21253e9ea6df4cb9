"""Train memories on multi-query recall, and compare their accuracy with the floats of their state.

    python benchmarks/quality/recall.py                    # 16 pairs in 256 tokens: two to three hours on one core
    python benchmarks/quality/recall.py gla mamba2         # some of them
    python benchmarks/quality/recall.py --pairs 4 --length 16 --vocabulary 64 --widths 16 --rates 5e-3 --before

In the manner of the figure of zoology (Arora et al., arXiv:2312.04927): two blocks, each memory at several widths, at
several learning rates of which the best counts. A run begins with easier sequences: `--before 700 300` trains 700 steps
on 4 pairs in 16 tokens, then 300 steps on all the pairs without an empty step, and then `--steps`.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scanl.data.base import Source
from scanl.layers import state as states
from scanl.layers.base import Layer
from scanl.layers.parts.short_convolution import ShortConvolution
from scanl.learning import TrainConfig
from scanl.learning.evaluation import score
from scanl.learning.run.config import seeded_model
from scanl.models import Block

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, Row, parse, parser, picture
from quality.learn import learn

SETTING = ("pairs", "length", "vocabulary", "before", "steps")
SCORED = 1000  # new examples


class BaseConv(Layer):
    """The gated convolution of zoology, over four steps: y_t = (W x_t + b) * (sum_j c_j x_{t-j} + d)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.linear, self.convolution = dim, nn.Linear(dim, dim), ShortConvolution(dim, 4)

    def init_state(self, batch_size: int, **kind: Any) -> Any:
        return self.convolution.init_state(batch_size, **kind)

    def forward(self, x: Tensor, state: Any = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Any]:
        y, state = self.convolution(x, state, cu_seqlens=cu_seqlens)
        return self.linear(x) * y, state


def memories(dim: int, length: int) -> dict[str, dict[str, Any]]:
    """Return the layers with the options by which one of width `dim` has two heads, where it has heads."""
    half = dim // 2
    return {
        "linear_attention": {"num_heads": 2},
        "based": {"num_heads": 2},
        "dpfp": {"num_heads": 2},
        "retnet": {"num_heads": 2},
        "gla": {"num_heads": 2},
        "hgrn2": {"head_dim": half},
        "gsa": {"num_heads": 2},
        "mamba": {},
        "mamba2": {"head_dim": half, "state_dim": half},
        "mamba3": {"head_dim": half, "state_dim": half},
        "deltanet": {"num_heads": 2},
        "gated_deltanet": {"num_heads": 2, "head_dim": half, "expand_v": 1},
        "mesanet": {"num_heads": 2, "head_dim": half},
        "rwkv7": {"head_dim": half},
        "attention": {"num_heads": 2, "max_length": length},
    }


NAMES = list(memories(32, 256))


def floats(model: torch.nn.Module) -> int:
    """Return how many floats of state a model has for a sequence."""
    leaves = states.leaves(model.init_state(1))
    return sum(leaf.numel() * (2 if leaf.is_complex() else 1) for _, leaf in leaves if leaf.dtype != torch.int64)


def run(results: Results, name: str, dim: int, lr: float, chosen: argparse.Namespace) -> None:
    """Train, unless that has been done, and add the accuracy on new examples."""
    setting = {key: getattr(chosen, key) for key in SETTING} | {"before": " ".join(map(str, chosen.before))}
    key = {"layer": name, "dim": dim, "lr": f"{lr:.5g}", **setting}
    if results.has(**key):
        return

    def stage(pairs: int, length: int, batch_size: int, steps: int) -> tuple[Source, TrainConfig]:
        task = {"length": length, "num_pairs": pairs, "vocab_size": chosen.vocabulary, "random_non_queries": False}
        config = TrainConfig.of(
            data=["mqar"], data_options=task, layer=name, layer_options=memories(dim, chosen.length)[name],
            dim=dim, depth=1, channel_mixer="none", batch_size=batch_size, steps=steps, lr=lr, seed=0,
        )  # fmt: skip
        config.check()
        source = config.open_source()
        source.check()
        return source, config

    easier = [(4, 16, 256), (chosen.pairs, 4 * chosen.pairs, 64)]
    stages = [stage(*sizes, steps) for sizes, steps in zip(easier, chosen.before, strict=False)]
    stages.append(stage(chosen.pairs, chosen.length, 64, chosen.steps))
    source, config = stages[-1]
    model = seeded_model(config, source.question)
    torch.manual_seed(0)
    model.stack.blocks.insert(0, Block(BaseConv(dim), "none"))
    minutes = learn(model, *stages)
    found = score(model, source.task, SCORED, (1,))
    results.add(**key, state=floats(model), accuracy=found, minutes=minutes)


def settings(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of each setting; of the runs with other learning rates the best alone."""
    best: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        at = best.setdefault(tuple(row[name] for name in SETTING), {})
        who = (row["layer"], row["dim"])
        if who not in at or float(row["accuracy"]) > float(at[who]["accuracy"]):
            at[who] = row
    return {setting: sorted(at.values(), key=lambda row: int(row["state"])) for setting, at in best.items()}


def draw(results: Results) -> None:
    """Draw a picture of each setting: accuracy against the floats of state."""
    for setting, rows in settings(results.rows).items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in sorted(rows, key=lambda row: row["layer"]):
            lines.setdefault(row["layer"], []).append((int(row["state"]), float(row["accuracy"])))
        path = results.pictures / f"recall_{'_'.join(' '.join(setting).split())}.png"
        picture(path, [Panel("", "floats of state", "accuracy", lines, log="x")])


def main() -> None:
    made = parser(__doc__, NAMES)
    made.add_argument("--pairs", type=int, default=16, help="of a key and a value")
    made.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    made.add_argument("--vocabulary", type=int, default=2048, help="tokens that there are")
    made.add_argument("--widths", nargs="+", type=int, default=[32, 64])
    made.add_argument("--rates", nargs="+", type=float, default=[1e-2])
    made.add_argument("--before", nargs="*", type=int, default=[700, 300], help="steps on easier sequences, 0 to 2")
    made.add_argument("--steps", type=int, default=400)
    chosen = parse(made)
    if len(chosen.before) > 2:
        made.error(f"--before has {len(chosen.before)} numbers, expected at most 2")
    if chosen.quick:
        chosen.pairs, chosen.length, chosen.widths, chosen.before, chosen.steps = 2, 8, [8], [1, 1], 1
    results = Results("recall", chosen)
    for dim, lr, name in itertools.product(chosen.widths, chosen.rates, chosen.names):
        run(results, name, dim, lr, chosen)
    draw(results)


if __name__ == "__main__":
    main()
