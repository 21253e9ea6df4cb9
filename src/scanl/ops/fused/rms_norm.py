r"""Division by the root mean square.

.. math:: y = \frac{x}{\sqrt{\tfrac1D \sum_i x_i^2 + \epsilon}} \odot w

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. (4); with epsilon as in torch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.fused import apply, differentiable, is_faster, kernels


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, over the last axis, as `torch.nn.functional.rms_norm` does.

    x: (..., D).   weight: (D,); None for ones.   eps: None for the eps of x's dtype.

    On a CPU, many float32 or float64 numbers take one pass over memory forwards and one backwards; torch takes about
    twenty. Derivatives of every order are exact.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([5.0, 10.0]), 0.0)  # mean(x²) = 12.5; 15/√12.5, 40/√12.5
    tensor([[ 4.2426, 11.3137]])
    """
    operands = [x] if weight is None else [x, weight]
    if not (is_faster(*operands) and all(operand.shape == x.shape[-1:] for operand in operands[1:])):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return apply(_Norm, x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Any:
        rows = contiguous(x.reshape(-1, x.shape[-1]))
        w = x.new_ones(x.shape[-1]) if weight is None else contiguous(weight)
        y, r = kernels("rms_norm").forward(rows, w, eps)
        ctx.save_for_backward(x, weight, r)
        ctx.eps = eps
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dy,), (x, weight, r) = cotangents, ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass is differentiated
            operands = [x] if weight is None else [x, weight]
            gradients = differentiable(lambda x, *w: F.rms_norm(x, x.shape[-1:], *w, eps=ctx.eps), operands, [dy])
            return gradients[0], None if weight is None else gradients[1], None
        rows, cotangent = (contiguous(value.reshape(-1, x.shape[-1])) for value in (x, dy))
        w = x.new_ones(x.shape[-1]) if weight is None else contiguous(weight)
        dx, dw = kernels("rms_norm").backward(cotangent, rows, w, r)
        return dx.view(x.shape), None if weight is None else dw, None
