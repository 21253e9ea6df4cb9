"""Train memories on multi-query recall, and compare their accuracy with the floats of their state.

    python benchmarks/recall.py                            # 16 pairs in 256 tokens: two to three hours on one core
    python benchmarks/recall.py --only gla mamba2          # some of them
    python benchmarks/recall.py --pairs 4 --length 16 --vocabulary 64 --widths 16 --rates 5e-3 --before --steps 1000
    python benchmarks/recall.py --write                    # the page docs/recall.md, from all that has been kept

In the manner of the figure of zoology (Arora et al., arXiv:2312.04927): two blocks, each memory at several widths, at
several learning rates of which the best counts. A run begins with easier sequences: `--before 700 300` trains 700 steps
on 4 pairs in 16 tokens, then 300 steps on all the pairs without an empty step, and then `--steps`.

Each run is kept in benchmarks/results/evidence/recall.csv when it is over, so what was interrupted goes on where it
stopped. Everything runs on one thread, and in one process: two would overwrite the rows of each other.
"""

import argparse
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evidence_results import Results, learn
from scanl.data.base import Source
from scanl.files import written_whole
from scanl.layers import state as states
from scanl.layers.base import Layer
from scanl.layers.parts.short_convolution import ShortConvolution
from scanl.learning import TrainConfig
from scanl.learning.evaluation import score
from scanl.learning.run.config import seeded_model
from scanl.models import Block

DOCS = Path(__file__).parents[1] / "docs"
SETTING = ("pairs", "length", "vocabulary", "before", "steps")
MARKERS = "osD^vPX<>hd8p*+"
SCORED = 1000  # new examples

Row = dict[str, str]


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

HEAD = """\
# Recall against the size of the state

A sequence begins with pairs of a key and a value. Then each key comes once more, and the model answers with its value:
[multi-query recall](tasks.md). A memory of constant size holds some pairs and no more. The tables have the accuracy,
which is the share of right answers on {scored} new sequences. Rows are sorted by the floats of the whole model's state.
The steps between the questions are empty, as in figure 2 of zoology (arXiv:2312.04927).

All models have two blocks without channel mixers, as in zoology. The first block is a gated convolution over four
steps, which joins a value with the key before it. The second block is the memory. The optimiser is AdamW, with 64
sequences a step (256 of 16 tokens where those come first) and seed 0. With one seed and few steps, a low number says
that the model has not learnt the task. It does not say that the state is too small.

`python benchmarks/recall.py` runs its default setting: 16 pairs in 256 tokens of a vocabulary of 2,048, at two widths.
By the runs below it takes two to three hours of one core. A run begins with easier sequences, so that it learns in
minutes what the keys and values are. Trained on the 256 tokens alone, `gated_deltanet` of width 64 was still guessing
after 900 steps. The tables below have the settings and layers that have been run so far. `--write` makes this page from
the rows in `benchmarks/results/evidence/recall.csv`.
"""


def floats(model: torch.nn.Module) -> int:
    """Return how many floats of state a model has for a sequence."""
    leaves = states.leaves(model.init_state(1))
    return sum(leaf.numel() * (2 if leaf.is_complex() else 1) for _, leaf in leaves if leaf.dtype != torch.int64)


def run(results: Results, name: str, dim: int, lr: float, chosen: argparse.Namespace) -> None:
    """Train, unless that has been done, and keep the accuracy on new examples."""
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
    results.add({**key, "state": floats(model), "accuracy": found, "minutes": minutes})


def settings(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of each setting; of the runs with other learning rates the best alone."""
    best: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        at = best.setdefault(tuple(row[name] for name in SETTING), {})
        who = (row["layer"], row["dim"])
        if who not in at or float(row["accuracy"]) > float(at[who]["accuracy"]):
            at[who] = row
    return {setting: sorted(at.values(), key=lambda row: int(row["state"])) for setting, at in best.items()}


def told(setting: tuple[str, ...], rows: Sequence[Row], everything: Sequence[Row]) -> str:
    """Return the section of a setting."""
    pairs, length, vocabulary, before, steps = setting
    same = [row for row in everything if tuple(row[name] for name in SETTING) == setting]
    rates = sorted({row["lr"] for row in same}, key=float)
    load = [float(row["load"]) for row in same]
    minutes = sum(float(row["minutes"]) for row in same)
    many = len(rates) > 1
    lines = [
        f"\n## {pairs} pairs in {length} tokens\n",
        textwrap.fill(
            f"A vocabulary of {int(vocabulary):,}, {_before(pairs, before)}{int(steps):,} steps, "
            f"{'learning rates' if many else 'a learning rate of'} {', '.join(rates)}"
            f"{', of which the best counts' if many else ''}. {len(same)} runs, {minutes:.0f} minutes by the clock; "
            f"other work ran beside them, at a load of {min(load):.0f} to {max(load):.0f}. "
            f"Guessing one of the values that were shown scores {1 / int(pairs):.2f}.",
            120,
        ),
        "",
        f"![Accuracy against the floats of state]({picture_of(setting)})\n",
        "| memory | width | floats of state | accuracy |",
        "|---|---|---|---|",
        *(
            f"| `{row['layer']}` | {row['dim']} | {int(row['state']):,} | {float(row['accuracy']):.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def _before(pairs: str, before: str) -> str:
    """Return what a run trained on before the sequences of its setting."""
    easier = ["on 4 pairs in 16 tokens", f"on {pairs} pairs in {4 * int(pairs)} tokens"]
    return "".join(f"{int(steps):,} steps {what}, then " for steps, what in zip(before.split(), easier, strict=False))


def picture_of(setting: tuple[str, ...]) -> str:
    return f"recall_{'_'.join(' '.join(setting).split())}.png"


def draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    by_layer: dict[str, list[Row]] = {}
    for row in rows:
        by_layer.setdefault(row["layer"], []).append(row)
    for number, (name, own) in enumerate(sorted(by_layer.items())):
        at, accuracy = [int(row["state"]) for row in own], [float(row["accuracy"]) for row in own]
        axes.plot(at, accuracy, marker=MARKERS[number % len(MARKERS)], color=f"C{number % 10}", label=name)
    axes.set(xscale="log", xlabel="floats of state", ylabel="accuracy", ylim=(-0.03, 1.03))
    figure.legend(loc="outside right", fontsize="small")
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def write(rows: Sequence[Row], folder: Path, seen: Mapping[tuple[str, ...], str]) -> None:
    """Write the page and its pictures. seen: what is to be said below the table of a setting."""
    found = settings(rows)
    page = HEAD.format(scored=f"{SCORED:,}")
    for setting, best in found.items():
        draw(best, folder / picture_of(setting))
        page += told(setting, best, rows) + seen.get(setting, "")
    with written_whole(folder / "recall.md") as temporary:
        temporary.write_text(page, encoding="utf-8")


SEEN = {
    ("16", "256", "2048", "700 300", "400"): """
The task is learnt, by most of these memories nearly wholly. Those with a delta rule recall most for the size of their
state. `gla` and `retnet`, which forget with time, recall less than `linear_attention`, which forgets nothing. `mamba`
has not learnt the task at this learning rate. The run of `dpfp` stood still for three quarters of an hour.
""",
    ("4", "16", "64", "", "1000"): """
Softmax attention keeps every key, and has learnt the task. RWKV-7 with 192 floats is near it. RetNet, gated DeltaNet
and DPFP are above guessing. The others give one of the values that were shown. The number of floats alone does not
explain this. Gated DeltaNet and DeltaNet have equally many, and at a learning rate of 0.01 gated DeltaNet had 0.74
after 400 steps. To show how accuracy grows with the state takes several widths and more steps.
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--pairs", type=int, default=16, help="of a key and a value")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens that there are")
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-2])
    parser.add_argument("--before", nargs="*", type=int, default=[700, 300], help="steps on easier sequences, 0 to 2")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--write", action="store_true", help="write the page, and train nothing")
    chosen = parser.parse_args()
    if len(chosen.before) > 2:
        parser.error(f"--before has {len(chosen.before)} numbers, expected at most 2")
    results = Results("recall")
    if chosen.write:
        write(results.rows, DOCS, SEEN)
        return
    torch.set_num_threads(1)
    for dim, lr, name in itertools.product(chosen.widths, chosen.rates, chosen.only):
        run(results, name, dim, lr, chosen)


if __name__ == "__main__":
    main()
