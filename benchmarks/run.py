"""Time the backends of an op, as the registry has them, beside a memory floor and other libraries.

    python benchmarks/run.py NAME [--quick] [--device cpu|cuda]

NAME is an op, or one use of it; beside.py has their operands, shapes and peers. Medians of interleaved runs in one
process, as ratios to the floor: how long the machine takes to move the same bytes. Prints tables; writes
benchmarks/results/NAME-DEVICE.json and .png. `python benchmarks/gpu.py` times them all on a GPU.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from beside import BENCHMARKS, Benchmark, Contender, Draw, Operands, Shape, in_torch
from scanl.ops import registry

RESULTS = Path(__file__).parent / "results"
WAYS = {"forward": "forward", "both": "forward + backward"}
HALF = 0.02  # of the norm, that bfloat16 may differ by
SLOW = 1.0  # seconds from which a contender is timed once only
LONGEST_LOOP = 2**12  # steps of the reference,
LARGEST_LOOP = 2**26  # and steps × elements of its backward pass, which takes time in proportion to them


def as_tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(numpy.asarray(value))


def agree(actual: object, right: Tensor) -> None:
    if right.dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(as_tensor(actual).to(right), right, rtol=1e-3, atol=1e-3)
        return
    actual, right = as_tensor(actual).to(right.device).float(), right.float()
    error = ((actual - right).norm() / right.norm()).item()
    assert error < HALF, f"differs by {error:.3g} of the output's norm"


def contenders(
    benchmark: Benchmark, operands: Operands, quick: bool, only: Sequence[str] | None = None
) -> Iterator[tuple[str, Contender]]:
    """Our backends, or `only` those, and the peers that are installed.

    What computes the same agrees with the backend that is chosen by itself.
    """
    op, inputs, dy = registry.get(benchmark.op), operands[:-1], operands[-1]
    assert dy is not None
    device, elements, steps = dy.device.type, dy.numel(), dy.shape[1]
    able = dict(line.split(": ", 1) for line in op.explain(*inputs, **benchmark.options).splitlines())
    makers = {
        name: partial(in_torch, lambda *leaves, name=name: op(*leaves, **benchmark.options, backend=name)[0])
        for name, reasons in able.items()
        if reasons == "can run" and (name != "reference" or steps <= LONGEST_LOOP) and (not only or name in only)
    }
    peers = {} if quick else {name: peer for name, peer in benchmark.peers.items() if device in peer.devices}
    makers |= {name: peer.make for name, peer in peers.items()}
    with torch.no_grad():
        right = op(*inputs, **benchmark.options)[0]
    for name, make in makers.items():
        try:
            contender = make(*operands)
            if not benchmark.backward or (name == "reference" and steps * elements > LARGEST_LOOP):
                contender = contender._replace(both=None)
            for call in contender:
                if call is not None and (name not in peers or peers[name].same):
                    agree(call(), right)
            yield name, contender
        except Exception as error:
            if name in able and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"  {name}: left out: {type(error).__name__}: {str(error).strip().splitlines()[0][:150]}")


def measure(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """The median seconds of each; short ones are repeated within a run, so that clock and launch do not count."""

    def timed(call: Callable[[], object], times: int) -> float:
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / times / 1000
        begin = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - begin) / times

    found = {name: [timed(call, 1)] for name, call in calls.items()}
    times = {name: max(1, int(0.005 / seconds[0])) for name, seconds in found.items()}
    quick = {name: call for name, call in calls.items() if found[name][0] < SLOW}
    found |= {name: [] for name in quick}
    for _, (name, call) in itertools.product(range(rounds), quick.items()):
        found[name].append(timed(call, times[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def run(
    name: str, shape: Shape, rounds: int, device: str, quick: bool, only: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    benchmark = BENCHMARKS[name]
    operands = benchmark.operands(Draw(device), shape)
    assert operands[0] is not None
    print(f"\n{name} {shape} {str(operands[0].dtype).removeprefix('torch.')} on {device}", flush=True)
    runners = dict(contenders(benchmark, operands, quick, only))
    floor = benchmark.floor(*operands)
    calls = {("floor", "forward"): floor.call}
    calls |= {(who, way): call for who, c in runners.items() for way, call in c._asdict().items() if call is not None}
    seconds = measure(calls, rounds, device)
    least = seconds.pop(("floor", "forward"))
    floors = {"forward": least, "both": least * floor.both / floor.forward}
    rate = floor.forward / least / 1e9
    print(f"  floor: {1e3 * least:.3f} ms forward, {1e3 * floors['both']:.3f} ms both, {rate:.1f} GB/s")
    rows = [{"shape": shape, "name": "floor", "seconds": floors, "ratio": {"forward": 1.0, "both": 1.0}}]
    for who in runners:
        took = {way: seconds[who, way] for way in floors if (who, way) in seconds}
        ratio = {way: took[way] / floors[way] for way in took}
        rows.append({"shape": shape, "name": who, "seconds": took, "ratio": ratio})
        print(f"  {who:24}" + "".join(f"{way} {1e3 * took[way]:10.3f} ms {ratio[way]:8.2f} ×   " for way in took))
    return rows


def machine(device: str) -> str:
    name = platform.processor() or platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), name)
    packages = [k for k in ("torch", "numba", "triton", "jax") if importlib.util.find_spec(k)]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, {versions}, {datetime.date.today()}"


def rows_of(row: dict[str, Any]) -> int:
    """B T: the steps of a sweep over T, the batch of one over single steps."""
    return row["shape"][0] * row["shape"][1]


def picture(benchmark: str, swept: list[dict], rows: list[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["name"] for row in [*swept, *rows] if row["name"] != "floor"))
    colours = dict(zip(names, pyplot.get_cmap("tab10").colors, strict=False))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for column, (way, label) in enumerate(WAYS.items()):
        lines, bars = axes[:, column]
        for k, name in enumerate(names):
            mine = [row for row in swept if row["name"] == name and way in row["ratio"]]
            style = {"color": colours[name], "label": name}
            lines.plot([rows_of(r) for r in mine], [r["ratio"][way] for r in mine], "o-", markersize=3, **style)
            width = 0.8 / len(names)
            for row in (row for row in rows if row["name"] == name and way in row["ratio"]):
                x = shapes.index(row["shape"]) + (k - (len(names) - 1) / 2) * width
                bars.bar(x, row["ratio"][way], width, color=colours[name])
                bars.text(x, row["ratio"][way], f"{row['ratio'][way]:.3g}", ha="center", va="bottom", fontsize=7)
        lines.set(
            xlabel="B T", title=f"{label}, {BENCHMARKS[benchmark].sweep(0)}".replace(" 0,", " T,").replace("(0,", "(B,")
        )
        lines.set_xscale("log", base=2)
        bars.set_xticks(range(len(shapes)), map(str, shapes))
        for axis in (lines, bars):
            axis.set(yscale="log", ylabel="time / time to move the bytes")
            axis.axhline(1, color="black", linewidth=1, linestyle="--")
        bars.set_ylim(0.5, bars.get_ylim()[1] * 1.5)
    axes[0, 0].legend()
    figure.suptitle(f"{benchmark}: {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="our own backends alone, fewer lengths and runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    name, device, benchmark = options.name, options.device, BENCHMARKS[options.name]
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("run: no CUDA device")
    title = machine(device)
    print(f"{title}\nfloor: {benchmark.floor.__doc__}, of all that must be read and written")
    rounds = 5 if options.quick else 21
    lengths = range(benchmark.lengths[0], benchmark.lengths[1] + 1, 2)
    lengths = [k for k in lengths if not options.quick or k % 4 == 0]
    swept = [row for k in lengths for row in run(name, benchmark.sweep(2**k), rounds, device, options.quick)]
    rows = []
    for shape in benchmark.shapes:
        rows += [row for row in swept if row["shape"] == shape] or run(name, shape, rounds, device, options.quick)
    print()
    longest = 2 ** lengths[-1]
    names = dict.fromkeys(row["name"] for row in swept)
    growth = {who: {} for who in names}
    for who, way in itertools.product(names, WAYS):
        took = {rows_of(row): row["seconds"].get(way) for row in swept if row["name"] == who}
        if took.get(2**12) and took.get(longest) and longest > 2**12:
            growth[who][way] = took[longest] / took[2**12] / (longest / 2**12)
            print(f"time of a step at {longest} steps / at 2^12: {who} {way} {growth[who][way]:.3f}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device}.json"
    found = {"op": benchmark.op, "machine": title, "rows": swept + rows, f"step_at_{longest}_to_4096": growth}
    path.write_text(json.dumps(found, indent=1) + "\n")
    picture(name, swept, rows, title, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
