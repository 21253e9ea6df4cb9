"""A context in which the steps of cells hold constant what enters a product with a parameter.

It serves learning rules that follow a unit through its own memory, and not through the other units (see
`learning.algorithms.eprop`).
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.mm,
    Tensor.mm,
    torch.bmm,
    Tensor.bmm,
    torch.einsum,
    F.linear,
}


class _EnteredContext(threading.local):
    depth = 0


_entered = _EnteredContext()


class products_hold_inputs:
    """A context in which, in a cell's step, the factor of a parameter in a matrix product has no gradient.

    The parameter itself has one. Only the reference backend honors it: enter `scanl.ops.backend("reference")` too.
    """

    def __enter__(self) -> None:
        _entered.depth += 1

    def __exit__(self, *error: object) -> None:
        _entered.depth -= 1


def holding(step: Callable[..., Any], parameters: Sequence[Tensor | None]) -> Callable[..., Any]:
    """Return the step as it runs in the present context.

    parameters: the operands of the cell that are the same at every step.
    """
    if not _entered.depth:
        return step
    memories = {value.untyped_storage().data_ptr() for value in parameters if value is not None}

    @functools.wraps(step)
    def held(*values: Any, **options: Any) -> Any:
        with _Holding(memories):
            return step(*values, **options)

    return held


class _Holding(TorchFunctionMode):
    def __init__(self, memories: set[int]) -> None:
        super().__init__()
        self._memories = memories

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            fixed = [isinstance(value, Tensor) and self._is_parameter(value) for value in args]
            if any(fixed):
                args = tuple(
                    value.detach() if isinstance(value, Tensor) and not is_fixed else value
                    for value, is_fixed in zip(args, fixed, strict=True)
                )
        return func(*args, **(kwargs or {}))

    def _is_parameter(self, value: Tensor) -> bool:
        """Return whether the value is a parameter of the cell or a view of one."""
        return value.untyped_storage().data_ptr() in self._memories
