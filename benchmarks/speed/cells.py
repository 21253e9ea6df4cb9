"""Time cells on a CPU beside their own Python loop, torch's LSTM and Newton's method.

    python benchmarks/speed/cells.py [NAME ...] [--batch 8] [--steps 1024] [--width 128]

float32, forward and backward. A ratio is the other's time over that of the `cpu` backend. The loop (`reference`) runs
over an eighth of the steps, and its time is multiplied by eight. `torch.nn.LSTM` has the same width. It also maps its
inputs, which a cell gets as operands. multiplications: those of the cell with recurrent matrices over those of the
LSTM, 4 D². Newton's methods have one sequence of 4,096 steps, small states, and the weights that the layers start with.
The rows are in benchmarks/results/cells.csv.
"""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.layers import build, names
from scanl.layers.ode._timed import TimedCell
from scanl.ops.registry import REGISTRY, Cell

sys.path.append(str(Path(__file__).parents[1]))
from harness import Contender, Results, Took, in_torch, of_module, parse, parser, race

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


def compare(results: Results, name: str, batch: int, steps: int, width: int, rounds: int) -> None:
    """Time the kernel, the loop and the LSTM, unless this machine has."""
    key = {"name": name, "shape": str((batch, steps, width))}
    if results.timed(**key):
        return
    cell, operands = cell_of(name), draw(name, batch, steps, width)
    timed = {operand.name for operand in cell.operands if "T" in operand.choices[0]}
    part = math.ceil(steps / SHARE)
    short = {key: value[:, :part] if key in timed else value for key, value in operands.items()}

    def backward(given: Mapping[str, Tensor], backend: str) -> Contender:
        run = in_torch(lambda *a: cell(**dict(zip(given, a, strict=True)), backend=backend)[0], [*given.values()])
        return run._replace(forward=None)

    with torch.no_grad():
        actual, expected = (cell(**short, backend=backend)[0] for backend in ("cpu", "reference"))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    lstm = of_module(torch.nn.LSTM(width, width, batch_first=True), torch.randn(batch, steps, width))
    programs = {"cpu": backward(operands, "cpu"), "reference": backward(short, "reference")}
    took = race({**programs, "torch.nn.LSTM": lstm._replace(forward=None)}, rounds)
    took["reference", "both"] = Took(*(value * steps / part for value in took["reference", "both"]))
    results.record(took, "cpu", **key, multiplications=multiplications(name, operands) / (4 * width**2))


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


def solve(results: Results, name: str, steps: int, width: int, rounds: int) -> None:
    """Time Newton's method beside the kernel, unless this machine has, and add its iterations and largest error."""
    key = {"name": f"{name}, {SOLVED[name]}", "shape": str((1, steps, width))}
    if results.timed(**key):
        return
    cell, (operands, options) = cell_of(name), as_started(name, steps, width)

    def newton(*values: Tensor) -> Tensor:
        given = dict(zip(operands, values, strict=True))
        return cell.solve(SOLVED[name], *[given.get(key) for key in cell.names], **options)[0]

    def kernel(*values: Tensor) -> Tensor:
        return cell(**dict(zip(operands, values, strict=True)), **options, backend="cpu")[0]

    with torch.no_grad():
        solved = cell.solve(SOLVED[name], *[operands.get(key) for key in cell.names], **options)
        expected = kernel(*operands.values())
    error = ((solved[0] - expected).abs().max() / expected.abs().max()).item()
    programs = {who: in_torch(call, [*operands.values()]) for who, call in (("cpu", kernel), ("newton", newton))}
    took = race({who: each._replace(forward=None) for who, each in programs.items()}, rounds)
    results.record(took, "cpu", **key, iterations=solved.convergence.iterations, error=error)


def main() -> None:
    made = parser(__doc__, dict.fromkeys([*CELLS, *SOLVED]), rounds=7, threads=2)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--steps", type=int, default=1024)
    made.add_argument("--width", type=int, default=128)
    options = parse(made)
    sizes = (2, 9, 8) if options.quick else (options.batch, options.steps, options.width)
    results = Results("cells", options)
    for name in options.names:
        if name in CELLS:
            compare(results, name, *sizes, options.rounds)
        for width in () if name not in SOLVED else (4,) if options.quick else (8, 16):
            solve(results, name, 9 if options.quick else 4096, width, options.rounds)


if __name__ == "__main__":
    main()
