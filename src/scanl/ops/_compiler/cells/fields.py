"""States of several variables: the step has a NamedTuple, and loops and kernels have one tensor with all its fields.

Fields with the same axes are stacked along an axis of their own, `B 2 D` for two. Others are joined end to end along
one axis, which the declaration gets under the name `JOINED_STATE`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError

JOINED_STATE = "STATE"
Shape = tuple[str, ...]


class CellFields:
    """The fields of a state. kind: the NamedTuple.   axes: for every field its axes, B first."""

    def __init__(self, kind: Callable[..., Any], axes: Mapping[str, Shape]):
        self.kind, self.names, self.axes = kind, tuple(axes), tuple(axes.values())
        self.stacked = len(set(self.axes)) == 1
        self.parts = () if self.stacked else tuple(axes[1:] for axes in self.axes)

    def declared(self) -> str:
        """Return the axes of the one tensor."""
        return " ".join(["B", str(len(self.names)), *self.axes[0][1:]] if self.stacked else ["B", JOINED_STATE])

    def derived(self) -> dict[str, Callable[[Mapping[str, Any]], int]]:
        """Return how the size of the axis `JOINED_STATE` follows from the others."""
        return {JOINED_STATE: lambda sizes: sum(prod(shape(axes, sizes)) for axes in self.parts)} if self.parts else {}

    def pack(self, state: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(state), 1) if self.stacked else torch.cat([value.flatten(1) for value in state], 1)

    def unpack(self, packed: Tensor, sizes: Mapping[str, Any]) -> Any:
        if self.stacked:
            return self.kind(*packed.unbind(1))
        shapes = [shape(axes, sizes) for axes in self.parts]
        joined = packed.split([prod(shape) for shape in shapes], 1)
        return self.kind(*[value.reshape(value.shape[0], *size) for value, size in zip(joined, shapes, strict=True)])

    def check(self, who: str, state: Any, rows: Any, sizes: Mapping[str, Any]) -> None:
        """Raise ShapeError unless the state has these fields for `rows` sequences."""
        if not isinstance(state, tuple) or getattr(state, "_fields", None) != self.names:
            kind = getattr(self.kind, "__name__", "NamedTuple")
            raise ShapeError(
                f"{who} is a {type(state).__name__}, expected a {kind} with the fields {', '.join(self.names)}"
            )
        for name, axes, value in zip(self.names, self.axes, state, strict=True):
            expected = (rows, *shape(axes[1:], sizes))
            if not isinstance(value, Tensor):
                raise ShapeError(f"{who}.{name} is a {type(value).__name__}, expected a tensor of shape {expected}")
            if tuple(value.shape) != expected:
                raise ShapeError(
                    f"{who}.{name} has shape {tuple(value.shape)}, expected ({', '.join(axes)}) = {expected}"
                )


def shape(axes: Sequence[str], sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)


def fields(step: Callable[..., Any], declaration: str) -> tuple[str, CellFields | None]:
    """Return the declaration with one tensor as its state, and the fields of the state; None for a plain tensor.

    Raises ConfigError if the step's state is not annotated with a NamedTuple of the declared fields.
    """
    operands, output = declaration.split("->")
    pairs = (operand.split(":") for operand in operands.split(","))
    declared = {key.strip(): axes.strip() for key, axes in pairs}
    axes = {key.partition(".")[2]: tuple(value.split()) for key, value in declared.items() if "." in key}
    if not axes:
        return declaration, None
    *others, last = dict.fromkeys(key.partition(".")[0] for key in declared)
    kind = inspect.get_annotations(step, eval_str=True).get(last)
    if getattr(kind, "_fields", None) != tuple(axes) or any(f"{last}.{key}" not in declared for key in axes):
        raise ConfigError(
            f"{step.__name__}: the annotation of {last} is {getattr(kind, '__name__', kind)}, expected a NamedTuple "
            f"with the fields {', '.join(axes)} because of the declaration"
        )
    known = {axis for key in others for axis in declared[key].split()}
    for key, of in axes.items():
        for axis in of:
            if axis not in known and not axis.isdigit():
                raise ConfigError(
                    f"{step.__name__}: {last}.{key} has the axis {axis}, expected one that another operand has, too"
                )
    assert kind is not None
    state_fields = CellFields(kind, axes)
    return (
        f"{', '.join(f'{key}: {declared[key]}' for key in others)}, {last}: {state_fields.declared()} -> {output}",
        state_fields,
    )
