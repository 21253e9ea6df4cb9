"""Every op on a GPU, beside flash-linear-attention, mamba-ssm, FlashAttention and what the device itself can do.

    python benchmarks/gpu.py [NAME ...] [--rounds 21] [--first] [--longest 0.2]

The benchmarks, shapes and peers are those of beside.py, in bfloat16, medians of interleaved runs by CUDA events; peers
that are not installed are left out by name, and so are those with a call longer than `--longest` seconds: torch's
associative_scan takes 1.3 s on an H100. Prints for each shape how many times as long each peer takes as scanl, and as
moving the bytes once takes. Writes benchmarks/results/gpu.json after each shape, and a picture at the end. Most of a
first run goes into compiling: a memory has about 26 configurations of its kernels. `--first` takes one of each kernel.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from beside import BENCHMARKS, Contender
from run import RESULTS, WAYS, machine, measure, run

OURS = "triton"


def ceilings(rounds: int) -> dict[str, float]:
    """GB/s of a copy, and TFLOP/s of a product of matrices."""
    source, target = torch.zeros(2, 2**29, dtype=torch.bfloat16, device="cuda")
    size = 8192
    calls = {"copy": lambda: target.copy_(source)}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        a, b = torch.randn(2, size, size, device="cuda").to(dtype)
        calls[name] = lambda a=a, b=b: a @ b
    took = measure(calls, rounds, "cuda")
    rates = {name: 2 * size**3 / took[name] / 1e12 for name in ("bfloat16", "float32")}
    return {"copy GB/s": 2 * source.nbytes / took["copy"] / 1e9, **{f"{name} TFLOP/s": r for name, r in rates.items()}}


def within(seconds: float, make: Callable[..., Contender]) -> Callable[..., Contender]:
    """Return a maker of the same contender that raises TimeoutError if the contender's second call takes longer."""

    def made(*operands: torch.Tensor | None) -> Contender:
        contender = make(*operands)
        contender.forward()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        contender.forward()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        if took > seconds:
            raise TimeoutError(f"a call takes {took:.2f} s, expected at most {seconds:g} s; --longest sets it")
        return contender

    return made


def first_configurations() -> None:
    """Let each kernel compile and run the configuration that it would measure first."""
    from triton.runtime.autotuner import Autotuner

    every = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *flags: every(self, *flags)[:1]


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the rows of one shape: the time of each contender over ours, and ours over the floor's."""
    ours = next((row for row in rows if row["name"] == OURS), None)
    if ours is None:
        return []
    others = [row for row in rows if row["name"] not in (OURS, "floor")]
    found = [
        {"beside": row["name"], **{way: row["seconds"][way] / ours["seconds"][way] for way in row["seconds"]}}
        for row in others
    ]
    return [*found, {"beside": "floor", **{way: 1 / ratio for way, ratio in ours["ratio"].items()}}]


def picture(found: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{entry['name']} {entry['shape']}: {row['beside']}", row) for entry in found for row in entry["times_as_long"]
    ]
    figure, axis = pyplot.subplots(figsize=(11, 0.3 * len(bars) + 1.5), layout="constrained")
    for way, shift, colour in (("forward", 0.2, "tab:blue"), ("both", -0.2, "tab:orange")):
        mine = [(-i + shift, row[way]) for i, (_, row) in enumerate(bars) if way in row]
        drawn = axis.barh(*zip(*mine, strict=True), 0.36, color=colour, label=WAYS[way]) if mine else None
        if drawn is not None:
            axis.bar_label(drawn, [f"{ratio:.3g} ×" for _, ratio in mine], padding=3, fontsize=6)
    axis.set_yticks([-i for i in range(len(bars))], [label for label, _ in bars], fontsize=6)
    axis.set(xscale="log", xlabel="time of the other / time of scanl")
    axis.axvline(1, color="black", linewidth=1, linestyle="--")
    axis.margins(x=0.15, y=0.01)
    axis.legend(loc="lower right")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--longest", type=float, default=0.2, metavar="SECONDS", help="leave out slower peers")
    parser.add_argument("--first", action="store_true", help="one configuration of each kernel, not the fastest of all")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    if not torch.cuda.is_available():
        sys.exit("gpu: no CUDA device; python benchmarks/run.py NAME --quick times the backends of a CPU")
    title = machine("cuda")
    print(title)
    limits = ceilings(options.rounds)
    print(", ".join(f"{name} {rate:.0f}" for name, rate in limits.items()))
    if options.first:
        first_configurations()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "gpu.json"
    found = []
    for name in options.names or BENCHMARKS:
        peers = BENCHMARKS[name].peers
        peers |= {who: peer._replace(make=within(options.longest, peer.make)) for who, peer in peers.items()}
        for shape in BENCHMARKS[name].shapes:
            rows = run(name, shape, options.rounds, "cuda", quick=False, only=(OURS,))
            entry = {"name": name, "shape": shape, "times_as_long": ratios(rows), "rows": rows}
            for row in entry["times_as_long"]:
                ways = "   ".join(f"{WAYS[way]} {row[way]:6.2f} ×" for way in WAYS if way in row)
                print(f"  {row['beside']:28} takes {ways} as long as scanl")
            found.append(entry)
            path.write_text(json.dumps({"machine": title, "ceilings": limits, "benchmarks": found}, indent=1) + "\n")
            torch.cuda.empty_cache()
    picture(found, title, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
