"""Compiled loops on a CPU that are no backend of an op, and take the place of a plain form in torch.

The function runs them inside an `autograd.Function`. Its first derivative has loops too; later ones are torch's.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame.context import exactly, preferred
from scanl.ops._frame.dispatch import in_forward_mode, transforming

MIN_NUMBERS = 1 << 14  # numbers; with fewer, torch's own functions take less time than to choose


def supported(*operands: Tensor) -> bool:
    """Return whether compiled loops can run in the place of a plain form, for these operands."""
    return (
        all(
            type(operand) in (Tensor, torch.nn.Parameter)
            and operand.device.type == "cpu"
            and operand.dtype in (torch.float32, torch.float64)
            and operand.dtype == operands[0].dtype
            for operand in operands
        )
        and not {"auto", "cpu"}.isdisjoint(preferred())
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not in_forward_mode()
        and not transforming()
        and importlib.util.find_spec("numba") is not None
    )


def is_faster(*operands: Tensor) -> bool:
    """Return whether compiled loops can run, and the first operand is large enough to gain from them.

    In an `exact` context the size does not count: torch's own functions give other bits.
    """
    if torch.compiler.is_compiling():  # the comparison would limit a number of steps that is left open
        return False
    return (operands[0].numel() >= MIN_NUMBERS or exactly()) and supported(*operands)


def kernels(name: str) -> Any:
    """Return the module of compiled loops of that name; numba is imported when they are first run."""
    return importlib.import_module(f"scanl.ops._cpu.{name}")


def differentiable(
    plain: Callable[..., Tensor | tuple[Tensor, ...]], operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of the plain form by its operands, which can be differentiated again.

    cotangents: of each result; None where the loss does not depend on it.
    """
    leaves = [operand if operand.requires_grad else operand.detach().requires_grad_() for operand in operands]
    results = plain(*leaves)
    results = (results,) if isinstance(results, Tensor) else results
    used, by = zip(*[(y, dy) for y, dy in zip(results, cotangents, strict=True) if dy is not None], strict=True)
    return list(torch.autograd.grad(used, leaves, by, create_graph=True, allow_unused=True))


class _EmptyContext:
    """Stands for the context of a call that is not differentiated."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""


def apply(function: type[torch.autograd.Function], *operands: Any) -> Any:
    """Return what `function.apply` returns; without gradients in a fifth of its time."""
    tensors = (tensor for tensor in operands if isinstance(tensor, Tensor))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return function.apply(*operands)
    return function.forward(_EmptyContext(), *operands)
