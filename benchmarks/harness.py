"""What all benchmarks share: the clock, the row, the file of rows, the options and the picture.

A row says what was measured and what came out, and then where: the machine, threads, load, date and versions. The rows
of a benchmark lie in benchmarks/results/NAME.csv, which is written after each row. A benchmark leaves out what its file
has already, unless `--again` is given; so an interrupted run continues. The pages of docs/ are filled from these files.
"""

import argparse
import csv
import datetime
import functools
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.files import written_whole

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PACKAGES = (
    "torch", "numba", "triton", "transformers", "flash-linear-attention", "jax", "statsmodels", "aeon", "tirex-2",
)  # fmt: skip
WAYS = {"forward": "forward", "both": "forward + backward"}
SHORT = 0.005  # seconds that a run is repeated for at least, so that neither clock nor launch counts
SLOW = 1.0  # seconds from which a program is timed once only

Row = dict[str, str]


class Took(NamedTuple):
    """Median seconds of a call: by the clock (on a GPU by its events), and of the processor on all threads.

    Other work on the machine disturbs the processor's time less.
    """

    seconds: float
    processor: float


class Contender(NamedTuple):
    """Calls without arguments that return y, forward alone and with the backward pass; None is not timed."""

    forward: Callable[[], object] | None
    both: Callable[[], object] | None = None


def in_torch(function: Callable[..., Tensor], leaves: Sequence[Tensor | None], dy: Tensor | None = None) -> Contender:
    """Return both passes of a function of the leaves. The gradients are those of all leaves; dy: of its output."""
    fresh = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    learned = [leaf for leaf in fresh if leaf is not None]
    if dy is None:
        with torch.no_grad():
            dy = torch.randn_like(function(*leaves))

    def both() -> Tensor:
        y = function(*fresh)
        torch.autograd.grad(y, learned, dy, allow_unused=True)
        return y.detach()

    return Contender(torch.no_grad()(lambda: function(*leaves)), both)


def of_module(module: torch.nn.Module, x: Tensor) -> Contender:
    """Return both passes of a module that maps x to y or (y, state). Gradients are those of x and all parameters."""
    leaves = [x.detach().requires_grad_(), *(p for p in module.parameters() if p.requires_grad)]

    def output() -> Tensor:
        y = module(leaves[0])
        return y[0] if isinstance(y, tuple) else y

    def both() -> Tensor:
        y = output()
        torch.autograd.grad(y.sum(), leaves, allow_unused=True)
        return y.detach()

    return Contender(torch.no_grad()(output), both)


def measure(calls: Mapping[Any, Callable[[], object]], rounds: int, device: str = "cpu") -> dict[Any, Took]:
    """Return the medians of runs that take turns in this process, after a first run that compiles."""

    def timed(call: Callable[[], object], times: int) -> Took:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        begin, processor = time.perf_counter(), time.process_time()
        for event in events[:1]:
            event.record()
        for _ in range(times):
            call()
        for event in events[1:]:
            event.record()
            event.synchronize()
        end, used = time.perf_counter(), time.process_time() - processor
        seconds = events[0].elapsed_time(events[1]) / 1000 if events else end - begin
        return Took(seconds / times, used / times)

    for call in calls.values():
        call()
    first = {name: timed(call, 1) for name, call in calls.items()}
    runs = {name: [took] if took.seconds > SLOW else [] for name, took in first.items()}
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        if first[name].seconds <= SLOW:
            runs[name].append(timed(call, max(1, int(SHORT / first[name].seconds))))
    return {name: Took(*map(statistics.median, zip(*took, strict=True))) for name, took in runs.items()}


def race(contenders: Mapping[str, Contender], rounds: int, device: str = "cpu") -> dict[tuple[str, str], Took]:
    """Measure both passes of all programs in turns; return them by program and way."""
    calls = {(who, way): getattr(each, way) for who, each in contenders.items() for way in WAYS}
    return measure({key: call for key, call in calls.items() if call is not None}, rounds, device)


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns in a fresh process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def resident(field: str, process: int | str = "self") -> int:
    """Return bytes that Linux counts for a process: VmRSS now, or the peak VmHWM. process: its number, or this one."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def machine(device: str = "cpu") -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.split(": ") for line in info.read_text(encoding="utf-8").splitlines())
        name = next((line[1] for line in lines if line[0].startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


@functools.cache
def versions() -> str:
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)


class Results:
    """The rows of a benchmark, in a CSV file."""

    def __init__(self, name: str, options: argparse.Namespace | None = None) -> None:
        self.folder = RESULTS if options is None else options.results
        self.pictures = DOCS if self.folder == RESULTS else self.folder
        self.path = self.folder / f"{name}.csv"
        self.again = options is not None and options.again
        self.device = "cpu" if options is None else options.device
        self.rows: list[Row] = []
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
        self.known = list(self.rows)

    def of(self, **key: Any) -> list[Row]:
        """Return the rows that have these values."""
        return [row for row in self.rows if all(row.get(name) == text(value) for name, value in key.items())]

    def has(self, **key: Any) -> bool:
        """Return whether a row has these values, so that its run is left out. With --again no row of before counts."""
        return any(not self.again or row not in self.known for row in self.of(**key))

    def timed(self, **key: Any) -> bool:
        """Return whether this machine has measured these values with as many threads."""
        return self.has(**key, machine=machine(self.device), threads=torch.get_num_threads())

    def add(self, line: str = "", /, **row: Any) -> Row:
        """Add a row, write the file, and print `line`, or the row."""
        added = {name: text(value) for name, value in row.items() if value is not None}
        print(line or "  ".join(f"{name} {value}" for name, value in added.items()), flush=True)
        about = {
            "machine": machine(self.device), "threads": torch.get_num_threads(), "load": f"{os.getloadavg()[0]:.1f}",
            "date": datetime.date.today(), "versions": versions(),
        }  # fmt: skip
        self.rows.append(added | {name: str(value) for name, value in about.items()})
        write(self.path, self.rows)
        return self.rows[-1]

    def record(self, took: Mapping[tuple[str, str], Took], base: str, **key: Any) -> list[Row]:
        """Add a row for each program and way. ratio: its time over that of the program `base`."""
        added = []
        for (who, way), each in took.items():
            row: dict[str, Any] = {"seconds": each.seconds, "processor": each.processor}
            line = f"{' '.join(map(text, key.values()))}  {who}, {way}: {1e3 * each.seconds:.3f} ms"
            if (beside := took.get((base, way))) is not None:
                row |= {"base": base, "ratio": each.seconds / beside.seconds}
                row |= {"processor_ratio": each.processor / max(beside.processor, 1e-9)}
                line += f", {row['ratio']:.3g} × {base} ({row['processor_ratio']:.3g} × by the processor)"
            added.append(self.add(line, **key, program=who, way=way, **row))
        return added


def text(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with the columns of all of them; where the run was comes last."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    last = ("machine", "threads", "load", "date", "versions", "note")
    names = [name for name in names if name not in last] + [name for name in last if name in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def parser(
    about: str | None,
    names: Iterable[str] = (),
    *,
    rounds: int | None = None,
    threads: int | None = 1,
    devices: Sequence[str] = ("cpu",),
    seeds: bool = False,
) -> argparse.ArgumentParser:
    """Return the options that all benchmarks have; `parse` reads them. rounds: of programs that are timed."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(names)
    if known:
        made.add_argument("names", nargs="*", metavar="NAME", default=known, help=", ".join(known))
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="runs of each program, of which the median counts")
    if seeds:
        made.add_argument("--seeds", type=int, default=1, help="runs of each model, with the seeds 0, 1, ...")
    made.add_argument("--threads", type=int, default=threads, help="of the processor")
    made.add_argument("--device", choices=devices, default=devices[0])
    made.add_argument("--quick", action="store_true", help="small sizes and one round; rows go to a folder `quick`")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the rows are")
    made.add_argument("--again", action="store_true", help="measure what the file of results has already")
    made.set_defaults(known=known)
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, refuse what cannot run, and set the threads."""
    options = made.parse_args()
    for name in getattr(options, "names", ()):
        if name not in options.known:
            made.error(f"unknown name {name!r}; known: {', '.join(options.known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).stem}: no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.rounds, options.results = 1, options.results / "quick"
    return options


class Panel(NamedTuple):
    """Lines of a picture: by name, their points."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log: str = ""  # the axes with a logarithmic scale


def picture(path: Path, panels: Sequence[Panel], columns: int = 2, title: str = "") -> None:
    """Draw panels side by side. Lines of one name have one color and one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    deep = -(-len(panels) // columns)
    figure = Figure((5 * columns + 2, 3.8 * deep), layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(deep, columns, squeeze=False).flat, panels, strict=False):
        for name, points in panel.lines.items():
            at = names.index(name)
            style = {"marker": "osD^vPX<>hd8p*"[at % 14], "color": f"C{at % 10}", "markersize": 5}
            (handles[name],) = axes.plot(*zip(*sorted(points), strict=True), **style)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        for axis in panel.log:
            getattr(axes, f"set_{axis}scale")("log")
        axes.grid(alpha=0.3)
    figure.legend([handles[name] for name in names], names, loc="outside right center", fontsize="small")
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")
    print(f"written: {path}")
