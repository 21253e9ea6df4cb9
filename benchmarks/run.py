"""Time the backends of an op, as the registry has them, beside a memory floor and other libraries.

    python benchmarks/run.py linear_scan [--quick] [--device cpu|cuda]

Medians of interleaved runs in one process, as ratios to the floor: how long the machine takes to move the same bytes.
Prints tables; writes benchmarks/results/OP-DEVICE.json and .png.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from scanl.ops._op import REGISTRY, Op

RESULTS = Path(__file__).parent / "results"
WAYS = {"forward": "forward", "both": "forward + backward"}
SLOW = 1.0  # seconds from which a contender is timed once only


class Contender(NamedTuple):
    """Two calls without arguments, each returning y; one that is None is not timed."""

    forward: Callable[[], object]
    both: Callable[[], object] | None = None


class Peer(NamedTuple):
    make: Callable[..., Contender]
    devices: tuple[str, ...]


class Benchmark(NamedTuple):
    operands: Callable[..., tuple[Tensor, ...]]
    floor: Callable[..., Callable[[], object]]  # moves `forward` streams; the backward pass reads and writes the rest
    streams: tuple[int, int]  # as wide as the operands: forwards, and with the backward pass
    sweep: Callable[[int], tuple[int, ...]]
    shapes: tuple[tuple[int, ...], ...]
    peers: dict[str, Peer]


def scan_operands(shape: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return x, (0.9 + 0.1 * torch.rand(shape, generator=generator)).to(device), dy


def add(x: Tensor, a: Tensor, dy: Tensor) -> Callable[[], object]:
    """torch.add(x, a, out=y)"""
    y = torch.empty_like(x)
    return lambda: torch.add(x, a, out=y)


def in_torch(scan: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor, dy: Tensor) -> Contender:
    leaves = [value.detach().clone().requires_grad_() for value in (x, a)]

    def both() -> Tensor:
        y = scan(*leaves)
        torch.autograd.grad(y, leaves, dy)
        return y.detach()

    return Contender(torch.no_grad()(lambda: scan(x, a)), both)


def torch_associative(x: Tensor, a: Tensor, dy: Tensor) -> Contender:
    from torch._higher_order_ops.associative_scan import associative_scan

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    mode = "pointwise" if x.is_cuda else "generic"
    torch.compiler.reset()
    return in_torch(torch.compile(lambda x, a: associative_scan(join, (a, x), dim=1, combine_mode=mode)[1]), x, a, dy)


def in_jax(how: str) -> Callable[..., Contender]:
    def make(x: Tensor, a: Tensor, dy: Tensor) -> Contender:
        import jax

        def associative(x, a):
            return jax.lax.associative_scan(lambda f, g: (f[0] * g[0], g[0] * f[1] + g[1]), (a, x), axis=1)[1]

        def loop(x, a):
            def step(h, now):
                h = now[1] * h + now[0]
                return h, h

            steps = x.swapaxes(0, 1), a.swapaxes(0, 1)
            return jax.lax.scan(step, jax.numpy.zeros_like(x[:, 0]), steps)[1].swapaxes(0, 1)

        scan = {"associative": associative, "loop": loop}[how]
        arrays = [jax.numpy.asarray(value.numpy()) for value in (x, a, dy)]

        def gradients(x, a, dy):
            y, back = jax.vjp(scan, x, a)
            return y, back(dy)

        forward, both = jax.jit(scan), jax.jit(gradients)
        return Contender(
            lambda: jax.block_until_ready(forward(*arrays[:2])), lambda: jax.block_until_ready(both(*arrays))[0]
        )

    return make


BENCHMARKS = {
    "linear_scan": Benchmark(
        operands=scan_operands,
        floor=add,
        streams=(3, 8),  # x, a, y; then dy, a, y, dx, da
        sweep=lambda steps: (1, steps, 16),
        shapes=((8, 1024, 1024), (1, 16384, 1024), (8, 4096, 256), (1, 2**20, 16)),
        peers={
            "torch associative_scan": Peer(torch_associative, ("cpu", "cuda")),
            "jax associative_scan": Peer(in_jax("associative"), ("cpu",)),
            "jax scan": Peer(in_jax("loop"), ("cpu",)),
        },
    ),
}
LONGEST_LOOP = 2**12  # steps of the reference,
LARGEST_LOOP = 2**26  # and steps × elements of its backward pass, which takes time in proportion to them


def as_tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(numpy.asarray(value))


def contenders(op: Op, operands: tuple[Tensor, ...], quick: bool) -> Iterator[tuple[str, Contender]]:
    """Our backends, and the peers that are installed, all of which agree with the one that is chosen by itself."""
    device, elements, steps = operands[0].device.type, operands[0].numel(), operands[0].shape[1]
    able = dict(line.split(": ", 1) for line in op.explain(*operands[:-1]).splitlines())
    makers = {
        name: partial(in_torch, lambda *inputs, name=name: op(*inputs, backend=name)[0])
        for name, reasons in able.items()
        if reasons == "can run" and (name != "reference" or steps <= LONGEST_LOOP)
    }
    if not quick:
        makers |= {name: peer.make for name, peer in BENCHMARKS[op.name].peers.items() if device in peer.devices}
    right = op(*operands[:-1])[0]
    for name, make in makers.items():
        try:
            contender = make(*operands)
            if name == "reference" and steps * elements > LARGEST_LOOP:
                contender = contender._replace(both=None)
            for call in contender:
                if call is not None:
                    torch.testing.assert_close(as_tensor(call()).to(right), right, rtol=1e-3, atol=1e-3)
            yield name, contender
        except Exception as error:
            if name in able:
                raise
            print(f"  {name}: left out: {type(error).__name__}: {str(error).strip().splitlines()[0][:150]}")


def measure(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """The median seconds of each; short ones are repeated within a run, so that clock and launch do not count."""

    def timed(call: Callable[[], object], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    found = {name: [timed(call, 1)] for name, call in calls.items()}
    times = {name: max(1, int(0.005 / seconds[0])) for name, seconds in found.items()}
    quick = {name: call for name, call in calls.items() if found[name][0] < SLOW}
    found |= {name: [] for name in quick}
    for _, (name, call) in itertools.product(range(rounds), quick.items()):
        found[name].append(timed(call, times[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def run(op: Op, shape: tuple[int, ...], rounds: int, device: str, quick: bool) -> list[dict]:
    benchmark = BENCHMARKS[op.name]
    operands = benchmark.operands(shape, device)
    print(f"\n{op.name} {shape} float32 on {device}", flush=True)
    runners = dict(contenders(op, operands, quick))
    calls = {("floor", "forward"): benchmark.floor(*operands)}
    calls |= {(name, way): call for name, c in runners.items() for way, call in c._asdict().items() if call is not None}
    seconds = measure(calls, rounds, device)
    floor = seconds.pop(("floor", "forward"))
    size = benchmark.streams[0] * operands[0].nbytes
    floors = {"forward": floor, "both": floor * benchmark.streams[1] / benchmark.streams[0]}
    print(f"  floor: {1e3 * floor:.3f} ms forward, {1e3 * floors['both']:.3f} ms both, {size / floor / 1e9:.1f} GB/s")
    rows = [{"shape": shape, "name": "floor", "seconds": floors, "ratio": {"forward": 1.0, "both": 1.0}}]
    for name in runners:
        took = {way: seconds[name, way] for way in floors if (name, way) in seconds}
        ratio = {way: took[way] / floors[way] for way in took}
        rows.append({"shape": shape, "name": name, "seconds": took, "ratio": ratio})
        print(f"  {name:24}" + "".join(f"{way} {1e3 * took[way]:10.3f} ms {ratio[way]:8.2f} ×   " for way in took))
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


def picture(op: Op, swept: list[dict], rows: list[dict], title: str, path: Path) -> None:
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
            lines.plot([r["shape"][1] for r in mine], [r["ratio"][way] for r in mine], "o-", markersize=3, **style)
            width = 0.8 / len(names)
            for row in (row for row in rows if row["name"] == name and way in row["ratio"]):
                x = shapes.index(row["shape"]) + (k - (len(names) - 1) / 2) * width
                bars.bar(x, row["ratio"][way], width, color=colours[name])
                bars.text(x, row["ratio"][way], f"{row['ratio'][way]:.3g}", ha="center", va="bottom", fontsize=7)
        lines.set(xlabel="steps T", title=f"{label}, {BENCHMARKS[op.name].sweep(0)}".replace(" 0,", " T,"))
        lines.set_xscale("log", base=2)
        bars.set_xticks(range(len(shapes)), map(str, shapes))
        for axis in (lines, bars):
            axis.set(yscale="log", ylabel="time / time to move the bytes")
            axis.axhline(1, color="black", linewidth=1, linestyle="--")
        bars.set_ylim(0.5, bars.get_ylim()[1] * 1.5)
    axes[0, 0].legend()
    figure.suptitle(f"{op.name}, float32: {title}", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="our own backends alone, fewer lengths and runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    op, device = REGISTRY[options.op], options.device
    benchmark = BENCHMARKS[options.op]
    title = machine(device)
    forward, both = benchmark.streams
    print(f"{title}\nfloor: {benchmark.floor.__doc__}, which moves {forward} streams; both ways move {both}")
    if device == "cuda":
        source, target = torch.zeros(2, 2**28, device=device)
        seconds = measure({"copy": lambda: target.copy_(source)}, 21, device)
        print(f"copy: {2 * source.nbytes / seconds['copy'] / 1e9:.0f} GB/s")
    rounds = 5 if options.quick else 21
    lengths = range(12, 21, 4) if options.quick else range(10, 21, 2)
    swept = [row for k in lengths for row in run(op, benchmark.sweep(2**k), rounds, device, options.quick)]
    rows = []
    for shape in benchmark.shapes:
        rows += [row for row in swept if row["shape"] == shape] or run(op, shape, rounds, device, options.quick)
    print()
    names = dict.fromkeys(row["name"] for row in swept)
    growth = {name: {} for name in names}
    for name, way in itertools.product(names, WAYS):
        took = {row["shape"][1]: row["seconds"].get(way) for row in swept if row["name"] == name}
        if took.get(2**12) and took.get(2**20):
            growth[name][way] = took[2**20] / took[2**12] / 2**8
            print(f"time of a step at 2^20 steps / at 2^12: {name} {way} {growth[name][way]:.3f}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{op.name}-{device}.json"
    found = {
        "op": op.name,
        "machine": title,
        "dtype": "float32",
        "streams": dict(zip(WAYS, benchmark.streams, strict=True)),
    }
    path.write_text(json.dumps({**found, "rows": swept + rows, "step_at_2^20_to_2^12": growth}, indent=1) + "\n")
    picture(op, swept, rows, title, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
