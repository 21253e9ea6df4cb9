"""Train every layer on every synthetic task, and print how far between guessing and solving each comes.

    python benchmarks/tasks.py [--quick] [--layers lru,hawk] [--tasks adding,parity]
    python benchmarks/tasks.py --redraw docs/tasks.md

Each cell is one `scanl train` command on one core, which is printed; `scanl eval` of its run gives the same number
again. 0 is chance, 1 is the best there is. Writes benchmarks/results/tasks-cpu.json and .png after every cell; cells
that stand there, of the same command on the same machine, are not run again. --redraw trains nothing: it makes the
picture anew, beside the file, from the rows of such a JSON or from the table of a page.
"""

import argparse
import contextlib
import io
import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from run import RESULTS, machine
from scanl import layers, tasks
from scanl.cli import main as scanl
from scanl.learning import RunFolder, score
from scanl.tasks.base import AFTER_TRAINING

COUNT = 1000  # fresh examples that a finished run is scored on

# Of a task: its options, the score at which it counts as solved, and what --quick changes in the options.
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
QUICK = {"dim": 32, "steps": 1000, "eval-every": 100}
# Options of layers for the width of QUICK.
NARROW = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 16},
    "rwkv6": {"head_dim": 16},
    "rwkv7": {"head_dim": 16},
}

FAMILIES = {  # the rows of the picture, in this order
    "RNNs": ("elman", "gru", "lstm", "slstm", "mingru"),
    "diagonal recurrences": ("hawk", "hgrn", "linear_rnn", "lru", "mega_ema", "multi_scale", "rglru"),
    "state-space models": ("h3", "hyena", "mamba", "mamba2", "s4", "s4d", "s5"),
    "matrix memories": (
        *("deltanet", "gated_deltanet", "gateloop", "gla", "linear_attention", "mlstm", "mlstm_large", "retnet"),
    ),
    "AFT and RWKV": ("aft", "rwkv4", "rwkv6", "rwkv7"),
    "attention": ("attention", "window_attention"),
}


def command(task: str, layer: str, quick: bool) -> list[str]:
    """What trains a cell, less the folder."""
    given, until, changed = SETTINGS[task]
    chosen = {**given, **(changed if quick else {})}
    model = {**MODEL, **(QUICK if quick else {})}
    parts = ["train", "--data", task, *(f"--data-options.{option}={value}" for option, value in chosen.items())]
    options = NARROW.get(layer, {}) if quick else {}
    parts += ["--layer", layer, *(f"--layer-options.{option}={value}" for option, value in options.items())]
    parts += [f"--{option}={value}" for option, value in model.items()]
    return [*parts, f"--until={until}", "--accelerator=cpu"]


def cell(task: str, layer: str, quick: bool) -> dict[str, Any]:
    """Train and score one layer on one task."""
    arguments = command(task, layer, quick)
    found: dict[str, Any] = {"task": task, "layer": layer, "command": shlex.join(["scanl", *arguments])}
    with tempfile.TemporaryDirectory() as temporary:
        folder, said, began = Path(temporary, "run"), io.StringIO(), time.perf_counter()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = scanl([*arguments, "--out", str(folder)])
        if code == 130:
            raise KeyboardInterrupt
        if code:
            return {**found, "refused": said.getvalue().splitlines()[-1]}
        run = RunFolder.open(folder)
        config = run.config()
        made = tasks.build(task, **config.source.data_options)
        value = score(run.load_model(), made, COUNT, (config.run.seed, AFTER_TRAINING))
        return found | {
            "score": value,
            "metric": made.metric,
            "scaled": (value - made.chance) / (made.best - made.chance),
            "solved": made.reaches(value, SETTINGS[task][1]),
            "steps": int(run.metrics.read_text().splitlines()[-1].split(",")[0]),
            "seconds": time.perf_counter() - began,
        }


def shown(row: dict[str, Any] | None) -> str:
    if row is None or "refused" in row:
        return "-"
    return f"{max(0.0, row['scaled']):.2f}" + ("*" if row["solved"] else "")


def read_table(page: str) -> list[dict[str, Any]]:
    """The rows of a picture from a table in Markdown: `| layer | a task | ... |`, cells as `shown` writes them."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    lines = [[cell.strip("` ") for cell in line] for line in lines]
    begin = next(i for i, line in enumerate(lines) if line[0] == "layer")
    _, *columns = lines[begin]
    rows = []
    for layer, *cells in lines[begin + 1 :]:
        for task, text in zip(columns, cells, strict=True):
            if text != "-":
                rows.append({"task": task, "layer": layer, "scaled": float(text.rstrip("*")), "solved": "*" in text})
    return rows


def grouped(names: list[str]) -> dict[str, list[str]]:
    """The names by family; those that FAMILIES does not know come last."""
    families = {family: [name for name in members if name in names] for family, members in FAMILIES.items()}
    known = [name for members in families.values() for name in members]
    return families | {"others": [name for name in names if name not in known]}


def picture(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, found = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "layer"))
    groups = grouped(found)
    lines = [name for members in groups.values() for name in members]
    at = {(row["layer"], row["task"]): row for row in rows}
    figure = Figure(figsize=(4 + 1.2 * len(columns), 2 + 0.3 * len(lines)))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    axes = figure.add_subplot()
    grid = [[max(0.0, at.get((line, column), {}).get("scaled", 0.0)) for column in columns] for line in lines]
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, line in enumerate(lines):
        for x, column in enumerate(columns):
            color = "white" if grid[y][x] > 0.6 else "black"
            axes.text(x, y, shown(at.get((line, column))), ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(columns)), [column.replace("_", "\n") for column in columns], fontsize=9)
    axes.set_yticks(range(len(lines)), lines, fontsize=9)
    axes.tick_params(length=0)
    end = 0
    for family, members in groups.items():
        if members:
            axes.annotate(
                family.replace(" ", "\n", 1),
                (1.01, end + len(members) / 2 - 0.5),
                xycoords=axes.get_yaxis_transform(),
                va="center",
                fontsize=9,
                annotation_clip=False,
            )
            end += len(members)
            axes.axhline(end - 0.5, color="black", lw=1)
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40)
    bar.set_label("score, from guessing (0) to the best there is (1); * solved")
    axes.set_title("What each layer has learnt of each task", fontsize=13)
    if title:
        axes.set_xlabel(title.replace(", ", ",\n", 1), fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short sequences, small models, few steps")
    parser.add_argument("--layers", default=None, help="names with commas between; none: all")
    parser.add_argument("--tasks", default=None, help="names with commas between; none: all")
    parser.add_argument(
        "--redraw", type=Path, default=None, metavar="FILE", help="draw the numbers of FILE, no training"
    )
    options = parser.parse_args()
    if options.redraw is not None:
        text, path = options.redraw.read_text(encoding="utf-8"), options.redraw.with_suffix(".png")
        report = {"rows": read_table(text), "machine": ""} if options.redraw.suffix == ".md" else json.loads(text)
        picture(report["rows"], report["machine"], path)
        print(f"written: {path}")
        return
    causal = [name for name in layers.names(presets=False) if not layers.get(name).bidirectional]
    chosen = options.layers.split(",") if options.layers else causal
    wanted = options.tasks.split(",") if options.tasks else tasks.names()
    for name in chosen:
        layers.get(name)
    for name in wanted:
        tasks.get(name)
    torch.set_num_threads(1)  # as OMP_NUM_THREADS=1: sums over several threads may differ from run to run
    title = f"{machine('cpu')}{', quick' if options.quick else ''}"
    print(f"{title}\n0: chance, 1: best, *: solved")
    RESULTS.mkdir(exist_ok=True)
    path, rows = RESULTS / "tasks-cpu.json", []
    before = json.loads(path.read_text()) if path.exists() else {"machine": None, "rows": []}
    known = {row["command"]: row for row in before["rows"] if before["machine"] == title}
    for task in wanted:
        for layer in chosen:
            row = known.get(shlex.join(["scanl", *command(task, layer, options.quick)]))
            row = cell(task, layer, options.quick) if row is None else row
            rows.append(row)
            detail = row.get("refused") or f"{row['metric']} {row['score']:.4g} after {row['steps']} steps"
            print(f"{task:20}{layer:18}{shown(row):7}{detail}\n    {row['command']}", flush=True)
            path.write_text(json.dumps({"machine": title, "quick": options.quick, "rows": rows}, indent=1) + "\n")
            picture(rows, title, path.with_suffix(".png"))
    print("\n" + f"{'':18}" + "".join(f"{task[:13]:>14}" for task in wanted))
    at = {(row["layer"], row["task"]): row for row in rows}
    for layer in chosen:
        print(f"{layer:18}" + "".join(f"{shown(at[layer, task]):>14}" for task in wanted))
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
