"""What torch.compile need not trace: functions whose result follows from shapes, dtypes and devices."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Mark a function of constants: torch.compile runs it, once, and does not trace it.

    This is what `torch.compiler.assume_constant_result` does. To call that would import the compiler, for two seconds.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def static_kinds(values: Iterable[Any], options: Iterable[Any]) -> tuple | None:
    """Return the shape, dtype and device of each tensor, and None for None.

    The result is None where the compiler does not know all of these, and the options, as constants: a size or an option
    may stand for any number. It is None too for a value that is no tensor, and where torch.export runs the code itself.
    """
    if not torch.compiler.is_dynamo_compiling():
        return None
    from torch.fx.experimental.symbolic_shapes import has_static_value

    for option in options:
        if isinstance(option, int | float):
            if not has_static_value(option):
                return None
        elif not (option is None or isinstance(option, str)):
            return None
    kinds = []
    for value in values:
        if value is None:
            kinds.append(None)
            continue
        if not isinstance(value, Tensor):
            return None
        shape = value.shape
        for size in shape:
            if not has_static_value(size):
                return None
        kinds.append((shape, value.dtype, value.device))
    return tuple(kinds)


def imitation(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape, dtype and device that has no values and no memory."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)
