"""Train every layer on every synthetic task, and record how far between guessing and solving each comes.

    python benchmarks/quality/tasks.py [NAME ...] [--short] [--tasks adding parity]

NAME is a layer. Each cell is one `scanl train` command on one core, which its row has; `scanl eval` of its run gives
the same number again. scaled: 0 is chance, 1 is the best there is. The rows are in benchmarks/results/tasks.csv, and
docs/tasks.png shows those of short tasks.
"""

import contextlib
import io
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scanl import layers, tasks
from scanl.cli import main as scanl
from scanl.learning import RunFolder, score
from scanl.tasks.base import AFTER_TRAINING

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, Row, parse, parser

COUNT = 1000  # fresh examples that a finished run is scored on

# Of a task: its options, the score at which it counts as solved, and what --short changes in the options.
SETTINGS: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "adding": ({}, 0.01, {"length": 30}),
    "associative_recall": ({}, 0.99, {"length": 8, "vocab_size": 10}),
    "copy": ({}, 0.99, {"length": 10, "num_symbols": 3}),
    "induction": ({}, 0.99, {"length": 32}),
    "irregular": ({}, 0.01, {"length": 12}),
    "mqar": ({}, 0.99, {"length": 16, "num_pairs": 2, "vocab_size": 1024}),
    "parity": ({}, 0.99, {"length": 10}),
    "selective_copy": ({"length": 256}, 0.99, {"length": 16, "num_symbols": 4}),  # 4096 takes a GPU
}
MODEL = {"dim": 64, "depth": 2, "batch-size": 32, "lr": 0.003, "steps": 5000, "eval-every": 250}
SHORT = {"dim": 32, "steps": 1000, "eval-every": 100}
# Options of layers for the width of SHORT.
NARROW = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 16},
    "rwkv6": {"head_dim": 16},
    "rwkv7": {"head_dim": 16},
}


def command(task: str, layer: str, short: bool, steps: int | None) -> list[str]:
    """Return what trains a cell, less the folder."""
    given, until, changed = SETTINGS[task]
    chosen = {**given, **(changed if short else {})}
    model = {**MODEL, **(SHORT if short else {})} | ({} if steps is None else {"steps": steps})
    parts = ["train", "--data", task, *(f"--data-options.{option}={value}" for option, value in chosen.items())]
    options = NARROW.get(layer, {}) if short else {}
    parts += ["--layer", layer, *(f"--layer-options.{option}={value}" for option, value in options.items())]
    parts += [f"--{option}={value}" for option, value in model.items()]
    return [*parts, f"--until={until}", "--accelerator=cpu"]


def cell(task: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Train and score one layer on one task."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, said, began = Path(temporary, "run"), io.StringIO(), time.perf_counter()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = scanl([*arguments, "--out", str(folder)])
        if status == 130:
            raise KeyboardInterrupt
        if status:
            return {"refused": said.getvalue().splitlines()[-1]}
        run = RunFolder.open(folder)
        config = run.config()
        made = tasks.build(task, **config.source.data_options)
        value = score(run.load_model(), made, COUNT, (config.run.seed, AFTER_TRAINING))
        return {
            "score": value,
            "metric": made.metric,
            "scaled": (value - made.chance) / (made.best - made.chance),
            "solved": "*" if made.reaches(value, SETTINGS[task][1]) else "",
            "steps": int(run.metrics.read_text().splitlines()[-1].split(",")[0]),
            "minutes": (time.perf_counter() - began) / 60,
        }


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by the package of their layers, in alphabetical order."""
    families: dict[str, list[str]] = {}
    for name in sorted(names):
        families.setdefault(layers.get(name).__module__.split(".")[2], []).append(name)
    return dict(sorted(families.items()))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the scores as a map of layers by tasks, layers in their families."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    at = {(row["layer"], row["task"]): row for row in rows if row["scaled"]}
    columns = list(dict.fromkeys(task for _, task in at))
    groups = grouped(dict.fromkeys(layer for layer, _ in at))
    lines = [name for members in groups.values() for name in members]
    figure = Figure((4 + 1.2 * len(columns), 2 + 0.3 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    grid = [[max(0.0, float(at[a, b]["scaled"])) if (a, b) in at else 0.0 for b in columns] for a in lines]
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, line in enumerate(lines):
        for x, column in enumerate(columns):
            shown = f"{grid[y][x]:.2f}{at[line, column]['solved']}" if (line, column) in at else "-"
            color = "white" if grid[y][x] > 0.6 else "black"
            axes.text(x, y, shown, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(columns)), [column.replace("_", "\n") for column in columns], fontsize=9)
    axes.set_yticks(range(len(lines)), lines, fontsize=9)
    axes.tick_params(length=0)
    end = 0
    for family, members in groups.items():
        beside = {"xycoords": axes.get_yaxis_transform(), "va": "center", "annotation_clip": False}
        axes.annotate(family, (1.01, end + len(members) / 2 - 0.5), fontsize=9, **beside)
        end += len(members)
        axes.axhline(end - 0.5, color="black", lw=1)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40)
    bar.set_label("score, from guessing (0) to the best there is (1); * solved")
    axes.set_title("What each layer has learned of each task", fontsize=13)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def main() -> None:
    causal = [name for name in layers.names(presets=False) if not layers.get(name).bidirectional]
    made = parser(__doc__, layers.names())
    made.set_defaults(names=causal)
    made.add_argument("--tasks", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    made.add_argument("--short", action="store_true", help="short sequences, narrow models, a thousand steps")
    options = parse(made)
    results = Results("tasks", options)
    for task in options.tasks:
        for layer in options.names:
            arguments = command(task, layer, options.short, 2 if options.quick else None)
            key = {"setting": "short" if options.short else "long", "task": task, "layer": layer}
            if not results.has(**key):
                results.add(**key, **cell(task, arguments), command=shlex.join(["scanl", *arguments]))
    if any(row["setting"] == "short" for row in results.rows):
        draw(results.of(setting="short"), results.pictures / "tasks.png")


if __name__ == "__main__":
    main()
