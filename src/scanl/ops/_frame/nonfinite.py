"""Keep NaN and infinities from earlier steps, in forms that compute many steps at once.

A masked product multiplies what it masks by zero, and zero times NaN is NaN. A transform over time mixes all steps. So
such a form is computed with zeros for the numbers that are not finite. Afterwards every output from the first such step
on is multiplied by NaN, and every earlier one by one. The product leaves finite numbers as they are, to the bit, and
makes NaN of a gradient that comes through a NaN.
"""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter


def suspected(*values: Tensor | None) -> bool:
    """Whether a number may be NaN or infinite. The answer is False only if every number is known to be finite.

    It costs one sum for each tensor: a finite sum has finite terms. A sum of finite terms may overflow; then the answer
    is True as well. It is True without a look on a GPU, which would have to be waited for, and while tracing.
    """
    for value in values:
        if value is None:
            continue
        if torch.compiler.is_compiling() or value.device.type != "cpu" or _unreadable(value):
            return True
        if not bool(value.detach().sum().isfinite()):
            return True
    return False


def _unreadable(value: Tensor) -> bool:
    """Traced, or one of the tensors that torch.func hands around."""
    return type(value) not in (Tensor, Parameter) or is_functorch_wrapped_tensor(value)


def faulty(x: Tensor, *, decay: bool = False) -> Tensor:
    """Where it is not finite; a log decay may be -inf, which forgets everything and is no fault."""
    if not decay:
        return ~x.isfinite()
    return ~((x.real < torch.inf) & x.imag.isfinite()) if x.is_complex() else ~(x < torch.inf)


def replaced(x: Tensor, *, decay: bool = False) -> Tensor:
    """Zero in place of what is faulty."""
    return torch.where(faulty(x, decay=decay), 0, x)


def since(fault: Tensor, axis: int) -> Tensor:
    """One before the first fault along an axis, NaN from there on, as float32."""
    size = fault.shape[axis]
    steps = torch.arange(size, device=fault.device).view(-1, *(1,) * (fault.ndim - 1 - axis % fault.ndim))
    first = torch.where(fault.any(axis, keepdim=True), fault.to(torch.uint8).argmax(axis, keepdim=True), size)
    return torch.where(steps < first, 1.0, torch.nan)
