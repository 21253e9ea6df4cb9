"""States of several tensors: a NamedTuple that may contain tuples; or one tensor. All tensors are batch first."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.errors import ShapeError


def check(name: str, value: Any, form: Any, device: torch.device, because: str) -> None:
    """Check that a state has the given form. Raises ShapeError.

    name: the op and the argument, for the message: "long_convolution: state".   form: a state of this form on the meta
    device.   device: the device of the tensors.   because: what determines the form, for the message.
    """
    if isinstance(form, Tensor):
        if not isinstance(value, Tensor):
            raise ShapeError(f"{name} is a {type(value).__name__}, expected a tensor of shape {tuple(form.shape)}")
        if value.shape != form.shape:
            shape, expected = tuple(value.shape), tuple(form.shape)
            raise ShapeError(f"{name} has shape {shape}, expected {expected} because of {because}")
        if value.device != device:
            raise ShapeError(f"{name} is on {value.device}, expected {device} because of {because}")
        if _kind(value) != _kind(form) and not (form.is_complex() and value.is_floating_point()):
            dtype = str(value.dtype).removeprefix("torch.")
            raise ShapeError(f"{name} is {dtype}, expected {_kind(form)} because of {because}")
    elif type(value) is not type(form):
        raise ShapeError(f"{name} is a {type(value).__name__}, expected a {type(form).__name__}")
    elif len(value) != len(form):
        raise ShapeError(f"{name} holds {len(value)} tensors, expected {len(form)} because of {because}")
    else:
        fields = getattr(form, "_fields", None)
        for i, (item, expected) in enumerate(zip(value, form, strict=True)):
            check(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item, expected, device, because)


def _kind(value: Tensor) -> str:
    if value.is_complex():
        return "complex numbers"
    return "real numbers" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")


def key(value: Any) -> tuple:
    """Return a hashable key of a state's form: states with equal keys have the same form."""
    return type(value), *(
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in pytree.tree_leaves(value)
    )


def cast(value: Any, form: Any) -> Any:
    """Cast a state to the dtypes of the form; a tensor whose dtype is right is returned as it is."""
    return pytree.tree_map(lambda leaf, like: leaf if leaf.dtype is like.dtype else leaf.to(like.dtype), value, form)


def rows(value: Any, start: int, end: int) -> Any:
    """Return the batch rows from start to end; None for None."""
    return pytree.tree_map(lambda leaf: None if leaf is None else leaf[start:end], value)


def joined(values: list[Any]) -> Any:
    """Concatenate the batch rows of several states."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *values)


def copied(value: Any) -> Any:
    return pytree.tree_map(torch.clone, value)
