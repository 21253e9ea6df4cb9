"""Reversed time and packed sequences for a backend that supports neither: flip time, run sequences one by one."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame import trees
from scanl.ops._frame.declaration import Operand
from scanl.ops.offsets import offsets


def evaluate(
    who: str,
    run: Callable[..., tuple[Tensor, Any]],
    operands: Sequence[Operand],
    values: Sequence[Any],
    y_shape: Sequence[int],
    *,
    reverse: bool,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Return the results of `run` for these operands; the state is the last operand."""
    if cu_seqlens is not None:
        return _one_by_one(who, run, operands, values, y_shape, cu_seqlens, reverse=reverse, **options)
    if not reverse:
        return run(*values, **options)
    ndim = values[0].ndim
    turned = []
    for operand, value in zip(operands[:-1], values[:-1], strict=True):
        axis = None if value is None else operand.time_axis(value, ndim)
        turned.append(value if value is None or axis is None else value.flip(axis))
    y, state = run(*turned, values[-1], **options)
    return y.flip(1), state


def _one_by_one(
    who: str,
    run: Callable[..., tuple[Tensor, Any]],
    operands: Sequence[Operand],
    values: Sequence[Any],
    y_shape: Sequence[int],
    cu_seqlens: Tensor,
    **more: Any,
) -> tuple[Tensor, Any]:
    first, state = values[0], values[-1]

    def alone(n: int, start: int, end: int) -> tuple[Tensor, Any]:
        cut = []
        for operand, value in zip(operands[:-1], values[:-1], strict=True):
            axis = None if value is None else operand.time_axis(value, first.ndim)
            cut.append(value if value is None or axis is None else value.narrow(axis, start, end - start))
        shape = (y_shape[0], end - start, *y_shape[2:])
        return evaluate(who, run, operands, [*cut, trees.rows(state, n, n + 1)], shape, cu_seqlens=None, **more)

    bounds = enumerate(itertools.pairwise(offsets(cu_seqlens, first.shape[1], who)))
    parts = [alone(n, start, end) for n, (start, end) in bounds]
    if not parts:
        none = trees.rows(alone(0, 0, 0)[1], 0, 0) if state is None else trees.copied(state)
        return first.new_zeros(y_shape), none
    return torch.cat([y for y, _ in parts], 1), trees.joined([last for _, last in parts])
