r"""Free responses of discrete systems whose matrix is a diagonal plus one of rank one.

.. math:: s_{j+1} = a \odot s_j - l \, (2\,\mathrm{Re}\, r \cdot s_j), \quad K_j = 2\,\mathrm{Re}\, c \cdot s_j

Source: for S4 by the bilinear rule, Gu, Goel and Ré, arXiv:2111.00396, appendix C.2; there two such factors make a
step. Differs: both are one, since (I - X)^{-1} (I + X) = 2 (I - X)^{-1} - I.

A step costs O(N) for N modes, and no table of N × T numbers is made. So for many steps the recurrence is cheaper than
powers of dense matrices. It runs in float64, because the error of an angle grows with the power.
"""

from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame.fused import differentiable, kernels


def low_rank_response(system: Tensor, begin: Tensor, steps: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run each channel's system from each of R states, and drive it by x from the first of them.

    system: a, l, r, c as (4, D, N), complex128.   begin: s_0, (R, D, N), complex128.   x: (B, T, D) real, T = steps.
    Returns K (R, D, steps), float64; s_steps (R, D, N); and Σ_j s_{T-1-j} x_j from the first start, (B, D, N): the
    state after the steps x, if the first start is what an input of 1 writes. The last two are complex128.
    """
    return _Response.apply(system, begin, steps, x)


def reference(system: Tensor, begin: Tensor, steps: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the same as a loop in torch, which can be differentiated to every order."""
    a, low, right, c = system
    s, kernel = begin, []
    driven = x.new_zeros(x.shape[0], *begin.shape[1:], dtype=begin.dtype)
    for t in range(steps):
        kernel.append(2 * (c * s).real.sum(-1))
        driven = driven + s[0] * x[:, steps - 1 - t, :, None]
        s = a * s - low * (2 * (right * s).real.sum(-1, keepdim=True))
    return torch.stack(kernel, -1), s, driven


class _Response(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor, begin: Tensor, steps: int, x: Tensor) -> Any:
        ctx.save_for_backward(system, begin, x)
        ctx.steps = steps
        ctx.set_materialize_grads(False)  # most losses do not read the last state, whose gradient costs more than all
        return kernels("low_rank_response").forward(system, begin, steps, x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        system, begin, x = ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass is differentiated
            gradients = differentiable(
                lambda system, begin, x: reference(system, begin, ctx.steps, x), (system, begin, x), cotangents
            )
            return gradients[0], gradients[1], None, gradients[2]
        kernel, end, driven = cotangents
        if kernel is None:
            kernel = system.real.new_zeros(len(begin), system.shape[1], ctx.steps)
        end = torch.zeros_like(begin) if end is None else end
        loops = kernels("low_rank_response")
        to_system, to_begin, to_x = loops.backward(kernel, end, driven, system, begin, ctx.steps, x)
        return to_system, to_begin, None, to_x
