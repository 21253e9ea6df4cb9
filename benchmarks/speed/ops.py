"""Time the backends of an op, as the registry has them, beside a memory floor and other libraries.

    python benchmarks/speed/ops.py linear_scan [--quick] [--device cpu|cuda]

NAME is an op, or one use of it; speed/peers.py has their operands, shapes and peers. Ratios are to the floor: the time
that the machine takes to move the same bytes. The rows are in benchmarks/results/ops.csv; a picture of the sweep over
lengths is beside them. speed/gpu.py times all ops on a GPU. `--quick` takes our own backends alone, and few lengths.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scanl.ops import registry

sys.path.append(str(Path(__file__).parents[1]))
from harness import WAYS, Contender, Panel, Results, Row, Took, machine, parse, parser, picture, race
from speed.peers import BENCHMARKS, Benchmark, Draw, Operands, Shape, contender

HALF = 0.02  # of the norm, that bfloat16 may differ by
LONGEST_LOOP = 2**12  # steps of the reference,
LARGEST_LOOP = 2**26  # and steps × elements of its backward pass, which takes time in proportion to them


def as_tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))


def agree(actual: object, expected: Tensor) -> None:
    """Raise AssertionError where an output is not the expected one, up to rounding."""
    if expected.dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(as_tensor(actual).to(expected), expected, rtol=1e-3, atol=1e-3)
        return
    actual, expected = as_tensor(actual).to(expected.device).float(), expected.float()
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < HALF, f"differs by {error:.3g} of the output's norm"


def contenders(
    benchmark: Benchmark, operands: Operands, quick: bool, only: Sequence[str] | None = None
) -> Iterator[tuple[str, Contender]]:
    """Yield our backends, or `only` those, and the peers that are installed.

    What computes the same agrees with the backend that `auto` chooses.
    """
    op, inputs, dy = registry.get(benchmark.op), operands[:-1], operands[-1]
    assert dy is not None
    device, elements, steps = dy.device.type, dy.numel(), dy.shape[1]
    able = dict(line.split(": ", 1) for line in op.explain(*inputs, **benchmark.options).splitlines())
    makers = {
        name: partial(contender, lambda *leaves, name=name: op(*leaves, **benchmark.options, backend=name)[0])
        for name, reasons in able.items()
        if reasons == "can run" and (name != "reference" or steps <= LONGEST_LOOP) and (not only or name in only)
    }
    peers = {} if quick else {name: peer for name, peer in benchmark.peers.items() if device in peer.devices}
    makers |= {name: peer.make for name, peer in peers.items()}
    with torch.no_grad():
        expected = op(*inputs, **benchmark.options)[0]
    for name, make in makers.items():
        try:
            each = make(*operands)
            if not benchmark.backward or (name == "reference" and steps * elements > LARGEST_LOOP):
                each = each._replace(both=None)
            for call in each:
                if call is not None and (name not in peers or peers[name].same):
                    agree(call(), expected)
            yield name, each
        except Exception as error:
            if name in able and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"  {name}: left out: {type(error).__name__}: {str(error).strip().splitlines()[0][:150]}")


def run(
    results: Results, name: str, shape: Shape, options: argparse.Namespace, only: Sequence[str] | None = None,
    base: str = "floor",
) -> list[Row]:  # fmt: skip
    """Time one shape, unless this machine has, and return its rows. Ratios are to the program `base`."""
    key = {"name": name, "shape": str(shape)}
    if results.timed(**key):
        return results.of(**key, machine=machine(options.device))
    benchmark = BENCHMARKS[name]
    operands = benchmark.operands(Draw(options.device), shape)
    assert operands[0] is not None
    floor = benchmark.floor(*operands)
    programs = {"floor": Contender(floor.call), **dict(contenders(benchmark, operands, options.quick, only))}
    took = race(programs, options.rounds, options.device)
    more = floor.both / floor.forward
    if benchmark.backward:
        took["floor", "both"] = Took(*(more * value for value in took["floor", "forward"]))
    return results.record(took, base, **key, dtype=str(operands[0].dtype).removeprefix("torch."))


def draw(results: Results, name: str, rows: Sequence[Row]) -> None:
    """Draw the time over that of the floor against B T: the steps of a sweep over T, the batch of one over steps."""
    panels = []
    for way, title in WAYS.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["way"] == way and row.get("ratio"):
                batch, steps, *_ = map(int, row["shape"].strip("()").split(", "))
                lines.setdefault(row["program"], []).append((batch * steps, float(row["ratio"])))
        panels.append(Panel(title, "B T", "time / time to move the bytes", lines, log="xy"))
    picture(results.folder / f"{name}-{results.device}.png", panels, title=f"{name}, {machine(results.device)}")


def main() -> None:
    options = parse(parser(__doc__, BENCHMARKS, rounds=21, threads=None, devices=("cpu", "cuda")))
    results = Results("ops", options)
    for name in options.names:
        benchmark = BENCHMARKS[name]
        print(f"{name}; floor: {benchmark.floor.__doc__}, of all that must be read and written")
        first, last = benchmark.lengths
        lengths = [k for k in range(first, last + 1, 2) if not options.quick or k == first]
        swept = [row for k in lengths for row in run(results, name, benchmark.sweep(2**k), options)]
        for shape in () if options.quick else benchmark.shapes:
            run(results, name, shape, options)
        draw(results, name, swept)


if __name__ == "__main__":
    main()
