"""Whether this thread computes exactly: results then have bits that do not depend on how a call was cut or batched."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES
from scanl.ops._frame.dispatch import in_forward_mode, transforming

_NUMBERS = {*HALF_DTYPES, *FLOATING, *COMPLEX}


class _Thread(threading.local):
    depth = 0  # open contexts


thread = _Thread()


def exactly() -> bool:
    """Return whether an `exact` context is open in this thread. What is traced does not ask: it is as without."""
    return not torch.compiler.is_compiling() and thread.depth > 0


def late(owner: Any, name: str, **options: Any) -> Callable[..., Any]:
    """Return a function that looks up `owner.name` at each call: a context replaces functions of torch."""
    return lambda *args: getattr(owner, name)(*args, **options)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Return a b. torch has other code for complex numbers at the end of a row; products of their parts have one."""
    if not (exactly() and a.is_complex() and b.is_complex()):
        return a * b
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def over(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b; the remark on `times` holds here too."""
    return times(a, b.reciprocal()) if exactly() and b.is_complex() else a / b


_TENSORS = {Tensor, torch.nn.Parameter}


def plain(*operands: Any) -> bool:
    """Return whether the operands are ordinary tensors of numbers on a CPU, and nothing traces the call."""
    for operand in operands:
        if type(operand) not in _TENSORS or not operand.is_cpu or operand.dtype not in _NUMBERS:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or in_forward_mode()
        or transforming()
    )
