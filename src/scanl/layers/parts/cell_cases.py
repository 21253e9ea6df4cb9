"""Arguments of a cell for the tests, valid and wrong, made from its declaration."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame.declaration import full_shape
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import Cell
from scanl.ops.registry import OpSample

Change = Callable[[Tensor], Tensor]
ERROR_PATTERN = re.compile(
    r"(\w+) (?:has shape (?P<shape>\([\d, ]*\))|has (?P<axis>\w+)=(?P<size>\d+)|is missing), expected"
)


def cases(
    cell: Cell, sizes: str, *messages: str, options: Sequence[Mapping[str, Any]] = ({},), **changes: Change
) -> None:
    """Declare the samples and the errors of a cell.

    sizes: of the axes, "D=3 K=2". An optional operand of which an axis has no size is absent.
    messages: of the errors, such as "w has shape (2, 3), expected (D, D)": the named operand has this shape.
    options: for each of them there are two samples, a batch, and packed sequences without optional operands.
    changes: what makes an operand from normal numbers, by its name.
    """
    known = {axis: int(size) for axis, size in (pair.split("=") for pair in sizes.split())}

    def samples() -> Iterator[OpSample]:
        for chosen in options:
            draw = Draws()

            def drawn(batch: int, steps: int, rows: int, draw: Draws = draw) -> dict[str, Tensor]:
                shapes = _shapes(cell, {**known, "B": batch, "T": steps}, rows)
                if rows != batch:
                    shapes = {one.name: shapes[one.name] for one in cell.operands if not one.optional}
                return {name: changes.get(name, Tensor.clone)(draw(*shape)) for name, shape in shapes.items()}

            yield OpSample(drawn(2, 4, 2), chosen)
            yield OpSample(drawn(1, 5, 3), {**chosen, "cu_seqlens": torch.tensor([0, 2, 2, 5])})

    def errors() -> Iterator[tuple[OpSample, str]]:
        for message in messages:
            mistake = ERROR_PATTERN.match(message)
            assert mistake is not None, message
            name, (shape, axis, size) = mistake[1], mistake.group("shape", "axis", "size")
            shapes = _shapes(cell, {**known, "B": 2, "T": 5, **({axis: int(size)} if axis else {})}, 2)
            optional = {one.name for one in cell.operands if one.optional} | {cell.state}
            operands = {key: torch.zeros(shapes[key]) for key in shapes if key == name or key not in optional}
            if shape is not None:
                operands[name] = torch.zeros(ast.literal_eval(shape))
            elif size is None:
                del operands[name]
            yield OpSample(operands), message

    cell.samples(samples)
    cell.errors(errors)


def _shapes(cell: Cell, sizes: Mapping[str, int], rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the operands. rows: of the state."""
    shapes: dict[str, tuple[int, ...]] = {}
    for operand in cell.operands:
        axes = operand.choices[0]
        if operand.name == cell.state:
            sizes = {**sizes, **{axis: derive(sizes) for axis, derive in cell.derived.items()}, "B": rows}
        if not operand.optional or all(axis in sizes or axis.isdigit() for axis in axes):
            shapes[operand.name] = full_shape(axes, sizes)
    return shapes
