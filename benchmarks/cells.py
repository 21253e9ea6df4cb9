"""Time cells on a CPU beside their own Python loop and beside torch's LSTM.

    python benchmarks/cells.py [--only NAME ...] [--rounds 7] [--batch 8] [--steps 1024] [--width 128]
        [--newton-steps 4096] [--newton-widths 8 16]

float32, forward and backward, medians of interleaved runs in one process. A ratio is the other's time over that of
scanl's `cpu` backend, so 4.0 means that scanl is four times as fast. The loop (`reference`) runs over an eighth of the
steps, and its time is multiplied by eight. `torch.nn.LSTM` has the same width. A multiplication: the LSTM's time is
first scaled by the cell's multiplications with recurrent matrices over those of the LSTM, 4 D². The LSTM also maps its
inputs, which a cell gets as operands. Then Newton's methods beside the kernel, for one sequence of 4,096 steps and
small states, with the weights that the layers start with, and their iterations. Writes benchmarks/results/cells.json,
with the load of the machine.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives import both, medians
from run import RESULTS, machine
from scanl.layers import build, names
from scanl.layers.ode._timed import TimedCell
from scanl.ops.registry import REGISTRY, Cell

SHARE = 8  # the loop runs over this part of the steps

names()  # imports all layers, which registers their cells


class Timed(NamedTuple):
    """How a cell is timed. axes: sizes besides D.   uses: how often a step multiplies with each matrix."""

    axes: Callable[[int], dict[str, int]] = lambda width: {}
    uses: int = 1
    without: tuple[str, ...] = ()  # optional operands


CELLS: dict[str, Timed] = {
    "cornn_cell": Timed(),
    "lem_cell": Timed(),
    "lipschitz_cell": Timed(without=("gate",)),
    "antisym_cell": Timed(without=("gate",)),
    "unicornn_cell": Timed(),
    "onlstm_cell": Timed(lambda width: {"N": width // 8}),
    "layernorm_lstm_cell": Timed(),
    "ltc_fused_cell": Timed(uses=6),
    "ctrnn_cell": Timed(uses=6),
    "ornn_cell": Timed(),
    "slstm": Timed(lambda width: {"H": 4, "K": width // 4}),
    "ligru": Timed(),
    "sru": Timed(),
    "indrnn": Timed(),
}
SOLVED = {
    "gru": "newton",
    "cornn_cell": "newton",
    "lem_cell": "newton",
    "antisym_cell": "newton",
    "unicornn_cell": "quasi_newton",
    "indrnn": "quasi_newton",
}
POSITIVE = ("dt", "rate", "c")


def cell_of(name: str) -> Cell:
    cell = REGISTRY[name]
    assert isinstance(cell, Cell)
    return cell


def draw(name: str, batch: int, steps: int, width: int) -> dict[str, Tensor]:
    """Return operands at which a cell neither grows nor dies: small matrices, short steps."""
    generator, cell = torch.Generator().manual_seed(0), cell_of(name)
    sizes = {"B": batch, "T": steps, "D": width, **CELLS[name].axes(width)}
    found = {}
    for operand in cell.operands:
        if operand.name in CELLS[name].without:
            continue
        shape = [int(axis) if axis.isdigit() else sizes[axis] for axis in operand.choices[0]]
        value = torch.randn(shape, generator=generator)
        timed = "T" in operand.choices[0]
        found[operand.name] = value.abs() / 16 if operand.name in POSITIVE else value if timed else value / 16
    return found


def multiplications(name: str, operands: Mapping[str, Tensor]) -> int:
    """Return how many numbers of recurrent matrices a step multiplies with, for one sequence."""
    axes = {operand.name: operand.choices[0] for operand in cell_of(name).operands}
    matrices = [
        value.numel()
        for operand, value in operands.items()
        if "B" not in axes[operand] and value.ndim > 1 and not any(axis.isdigit() for axis in axes[operand][-2:])
    ]
    return CELLS[name].uses * sum(matrices)


def lstm(batch: int, steps: int, width: int) -> Callable[[], object]:
    """Return the forward and backward pass of torch's LSTM, down to its input and its weights."""
    layer = torch.nn.LSTM(width, width, batch_first=True)
    x, dy = torch.randn(batch, steps, width, requires_grad=True), torch.randn(batch, steps, width)
    return lambda: torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], dy)


def compare(name: str, rounds: int, batch: int, steps: int, width: int) -> dict[str, float]:
    """Return the seconds of the kernel, of the loop and of the LSTM, and the cell's multiplications over the LSTM's."""
    cell, operands = cell_of(name), draw(name, batch, steps, width)
    timed = {operand.name for operand in cell.operands if "T" in operand.choices[0]}
    part = math.ceil(steps / SHARE)
    short = {key: value[:, :part] if key in timed else value for key, value in operands.items()}

    def run(given: Mapping[str, Tensor], backend: str) -> Callable[[], object]:
        return both(lambda *a: cell(**dict(zip(given, a, strict=True)), backend=backend)[0], tuple(given.values()))

    with torch.no_grad():
        found, expected = (cell(**short, backend=backend)[0] for backend in ("cpu", "reference"))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    calls = {
        "cpu": run(operands, "cpu"),
        "reference": run(short, "reference"),
        "torch.nn.LSTM": lstm(batch, steps, width),
    }
    took = medians(calls, rounds)
    took["reference"] *= steps / part
    return {**took, "multiplications": multiplications(name, operands) / (4 * width**2)}


def draw_uniform(rows: int, columns: int) -> Tensor:
    """Return the weights that `torch.nn.GRU` starts with."""
    return torch.empty(rows, columns).uniform_(-1, 1) / math.sqrt(columns)


def as_started(name: str, steps: int, width: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the operands and options of one long sequence, from a layer that has just been built."""
    torch.manual_seed(0)
    x = torch.randn(1, steps, width)
    if name == "gru":
        given, u = draw_uniform(3 * width, width), draw_uniform(3 * width, width)
        return {"x": (x @ given.T).unflatten(-1, (3, -1)), "u": u.view(3, width, width)}, {}
    if name == "indrnn":
        return {"x": x, "w": torch.rand(width)}, {"activation": "tanh"}
    layer = build(name.removesuffix("_cell"), width)
    assert isinstance(layer, TimedCell)
    with torch.no_grad():
        operands = zip(cell_of(name).names, layer.operands(x, torch.ones(1, steps, 1)), strict=False)
    return {key: value for key, value in operands if value is not None}, dict(layer.options())


def solve(name: str, rounds: int, steps: int, width: int) -> dict[str, float]:
    """Return the iterations of Newton's method, its largest error, and the seconds beside those of the kernel."""
    cell, (operands, options) = cell_of(name), as_started(name, steps, width)

    def newton(*values: Tensor) -> Tensor:
        given = dict(zip(operands, values, strict=True))
        return cell.solve(SOLVED[name], *[given.get(key) for key in cell.names], **options)[0]

    def kernel(*values: Tensor) -> Tensor:
        return cell(**dict(zip(operands, values, strict=True)), **options, backend="cpu")[0]

    with torch.no_grad():
        solved = cell.solve(SOLVED[name], *[operands.get(key) for key in cell.names], **options)
        expected = kernel(*operands.values())
    values = tuple(operands.values())
    took = medians({"newton": both(newton, values), "cpu": both(kernel, values)}, rounds)
    error = ((solved[0] - expected).abs().max() / expected.abs().max()).item()
    return {**took, "iterations": solved.convergence.iterations, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CELLS], default=[*CELLS], help="some of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--newton-steps", type=int, default=4096)
    parser.add_argument("--newton-widths", type=int, nargs="*", default=[8, 16])
    options = parser.parse_args()
    title, rows = machine("cpu"), {}
    print(f"{title}\n(B, T, D) = ({options.batch}, {options.steps}, {options.width})")
    print(f"{'':20} {'ms':>8} {'loop':>8} {'LSTM':>8} {'multiplication':>15} {'load':>6}")
    for name in options.only:
        row = compare(name, options.rounds, options.batch, options.steps, options.width)
        rows[name] = {**row, "load": os.getloadavg()[0]}
        loop, beside = (row[other] / row["cpu"] for other in ("reference", "torch.nn.LSTM"))
        each = f"{beside * row['multiplications']:13.2f} ×" if row["multiplications"] else f"{'-':>13}  "
        print(
            f"{name:20} {1e3 * row['cpu']:8.1f} {loop:6.1f} × {beside:6.2f} × {each} {os.getloadavg()[0]:6.1f}",
            flush=True,
        )
    solved = {}
    print(f"(B, T) = (1, {options.newton_steps})")
    print(f"{'':20} {'D':>4} {'iterations':>10} {'error':>8} {'ms':>8} {'kernel':>10}")
    for name in SOLVED:
        for width in options.newton_widths:
            row = solve(name, options.rounds, options.newton_steps, width)
            solved[f"{name}, D={width}"] = {**row, "load": os.getloadavg()[0]}
            print(
                f"{name:20} {width:4} {row['iterations']:10} {row['error']:8.0e} {1e3 * row['newton']:8.1f} "
                f"{1e3 * row['cpu']:7.1f} ms",
                flush=True,
            )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "cells.json"
    sizes = [options.batch, options.steps, options.width]
    path.write_text(
        json.dumps({"machine": title, "dtype": "float32", "sizes": sizes, "seconds": rows, "newton": solved}, indent=1)
        + "\n"
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
