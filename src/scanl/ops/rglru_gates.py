r"""The gates of RG-LRU, which make the input and the decay of a linear scan.

.. math:: a = e^{L \odot \sigma(z_r)}, \quad u = x \odot \sigma(z_i) \odot \max(\sqrt{1 - a^2}, m)

Source: De et al., "Griffin", arXiv:2402.19427, eq. (1) to (4); m is 1 at the first step of a sequence and 0 at others,
as in the released code.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from scanl.ops._cpu._memory import laid_out
from scanl.ops._frame.dispatch import fused

LEAST = 1 << 14  # numbers; with fewer, torch's own functions take less time than to choose


class BoundedSqrt(torch.autograd.Function):
    """Square root with its derivative clipped at 1000. The true derivative is infinite at 0, where a = 1."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Tensor:
        (grad,), (x,) = grad_outputs, ctx.saved_tensors
        return grad / (4 * x).clamp(min=1e-6).sqrt()


def rglru_gates(x: Tensor, i_gate: Tensor, r_gate: Tensor, log_decay: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and a, (B, T, D).

    x: input, i_gate, r_gate: z_i and z_r before the sigmoid, (B, T, D).   log_decay: L <= 0, (D,), natural.
    least: m, (B, T, 1).   On a CPU, many float32 or float64 numbers take one pass over memory forwards and one
    backwards.

    >>> zero, one = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    >>> u, a = rglru_gates(4 * one, zero, zero, torch.tensor([-1.0]), zero)  # e^-.5; 4 · .5 · √(1 - e^-1)
    >>> round(a.item(), 4), round(u.item(), 4)
    (0.6065, 1.5901)
    """
    full, narrow = (x, i_gate, r_gate), (log_decay, least)
    same = all(each.dtype == x.dtype for each in (*full, *narrow)) and not least.requires_grad
    if x.numel() < LEAST or not (same and all(fused(each) for each in (*full, *narrow))):
        return plain(x, i_gate, r_gate, log_decay, least)
    return _Gates.apply(x, i_gate, r_gate, log_decay, least)


def plain(x: Tensor, i_gate: Tensor, r_gate: Tensor, log_decay: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same by torch's functions."""
    log_a = r_gate.sigmoid().to(log_decay.dtype) * log_decay
    square = -torch.expm1(2 * log_a)
    scale = BoundedSqrt.apply(square) if square.requires_grad else square.sqrt()
    return x * i_gate.sigmoid() * scale.clamp(min=least), log_a.exp()


def _kernels() -> Any:
    return importlib.import_module("scanl.ops._cpu.rglru_gates")


def _flat(x: Tensor) -> Tensor:
    return laid_out(x.reshape(-1, x.shape[-1]))


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, i_gate: Tensor, r_gate: Tensor, log_decay: Tensor, least: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, i_gate, r_gate, log_decay, least)
        given = (_flat(each) for each in (x, i_gate, r_gate))
        u, a = _kernels().forward(*given, laid_out(log_decay), laid_out(least.expand(*x.shape[:2], 1)))
        return u.view(x.shape), a.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        *operands, least = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this pass is wanted
            leaves = [each if each.requires_grad else each.detach().requires_grad_() for each in operands]
            results = plain(leaves[0], leaves[1], leaves[2], leaves[3], least)
            return *torch.autograd.grad(results, leaves, cotangents, create_graph=True), None
        x, log_decay = operands[0], operands[3]
        given = (_flat(each) for each in (*cotangents, *operands[:3]))
        *by, dlog = _kernels().backward(*given, laid_out(log_decay), laid_out(least.expand(*x.shape[:2], 1)))
        return *(each.view(x.shape) for each in by), dlog, None
