r"""The gates of RG-LRU, which make the input and the decay of a linear scan.

.. math:: a = e^{L \odot \sigma(z_r)}, \quad u = x \odot \sigma(z_i) \odot \max(\sqrt{1 - a^2}, m)

Source: De et al., "Griffin", arXiv:2402.19427, eq. (1) to (4); m is 1 at the first step of a sequence and 0 at others,
as in the released code.
"""

from typing import Any

import torch
from torch import Tensor

from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.fused import apply, differentiable, is_faster, kernels


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
    if least.requires_grad or not is_faster(x, i_gate, r_gate, log_decay, least):
        return plain(x, i_gate, r_gate, log_decay, least)
    return apply(_Gates, x, i_gate, r_gate, log_decay, least)


def plain(x: Tensor, i_gate: Tensor, r_gate: Tensor, log_decay: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same by torch's functions."""
    log_a = r_gate.sigmoid().to(log_decay.dtype) * log_decay
    square = -torch.expm1(2 * log_a)
    scale = apply(BoundedSqrt, square) if square.requires_grad else square.sqrt()
    # Not clamp(min=least): its derivative where both are equal is 1 until torch 2.14 and 1/2 from 2.15 on.
    return x * i_gate.sigmoid() * torch.where(scale >= least, scale, least), log_a.exp()


def _flat(x: Tensor) -> Tensor:
    return contiguous(x.reshape(-1, x.shape[-1]))


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, i_gate: Tensor, r_gate: Tensor, log_decay: Tensor, least: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, i_gate, r_gate, log_decay, least)
        operands = (_flat(value) for value in (x, i_gate, r_gate))
        u, a = kernels("rglru_gates").forward(
            *operands, contiguous(log_decay), contiguous(least.expand(*x.shape[:2], 1))
        )
        return u.view(x.shape), a.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, i_gate, r_gate, log_decay, least = ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass is differentiated
            operands = (x, i_gate, r_gate, log_decay)
            return *differentiable(lambda x, i, r, log: plain(x, i, r, log, least), operands, cotangents), None
        rows = (_flat(value) for value in (*cotangents, x, i_gate, r_gate))
        narrow = contiguous(log_decay), contiguous(least.expand(*x.shape[:2], 1))
        *by, dlog = kernels("rglru_gates").backward(*rows, *narrow)
        return *(gradient.view(x.shape) for gradient in by), dlog, None
