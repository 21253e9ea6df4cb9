"""Keep NaN and infinities out of the outputs of earlier steps, in forms that compute many steps at once.

A masked product multiplies masked numbers by zero, and zero times NaN is NaN. A transform over time mixes all steps.
So these forms replace numbers that are not finite by zeros. Afterwards they multiply every output from the first such
step on by NaN, and every earlier output by 1. Multiplying by 1 changes no bit of a finite number. Multiplying by NaN
also makes the gradient through that output NaN.
"""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter


def suspected(*values: Tensor | None) -> bool:
    """Return whether a number may be NaN or infinite; False only if every number is known to be finite.

    It costs one sum per tensor: a finite sum has finite terms. If a sum of finite terms overflows, the answer is True
    as well. On a GPU, where reading the sum would synchronise, and while tracing, the answer is always True.
    """
    for value in values:
        if value is None:
            continue
        if value.device.type != "cpu" or not readable(value):
            return True
        if not bool(value.detach().sum().isfinite()):
            return True
    return False


def readable(*values: Tensor) -> bool:
    """Return whether numbers can be read, to choose a computation by them; not while tracing, nor under torch.func."""
    kinds = (Tensor, Parameter)
    return not torch.compiler.is_compiling() and not any(
        type(value) not in kinds or value.device.type == "meta" or is_functorch_wrapped_tensor(value)
        for value in values
    )


def faulty(x: Tensor, *, decay: bool = False) -> Tensor:
    """Return a mask of numbers that are not finite. In a log decay, -inf is allowed: it forgets everything."""
    if not decay:
        return ~x.isfinite()
    return ~((x.real < torch.inf) & x.imag.isfinite()) if x.is_complex() else ~(x < torch.inf)


def replaced(x: Tensor, *, decay: bool = False) -> Tensor:
    """Replace faulty numbers by zero."""
    return torch.where(faulty(x, decay=decay), 0, x)


def since(fault: Tensor, axis: int) -> Tensor:
    """Return 1 before the first fault along an axis and NaN from there on, as float32."""
    size = fault.shape[axis]
    steps = torch.arange(size, device=fault.device).view(-1, *(1,) * (fault.ndim - 1 - axis % fault.ndim))
    first = torch.where(fault.any(axis, keepdim=True), fault.to(torch.uint8).argmax(axis, keepdim=True), size)
    return torch.where(steps < first, 1.0, torch.nan)
