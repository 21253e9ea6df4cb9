r"""Division by the root mean square.

.. math:: y = \frac{x}{\sqrt{\tfrac1D \sum_i x_i^2 + \epsilon}} \odot w

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. (4); with epsilon as in torch.
"""

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._cpu._memory import laid_out
from scanl.ops._frame.dispatch import fused

LEAST = 1 << 14  # numbers; with fewer, torch's own function takes less time than to choose


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, over the last axis, as `torch.nn.functional.rms_norm` does.

    x: (..., D).   weight: (D,); None for ones.   eps: None for the eps of x's dtype.

    On a CPU, many float32 or float64 numbers take one pass over memory forwards and one backwards; torch takes about
    twenty. Derivatives of every order are exact.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([5.0, 10.0]), 0.0)  # mean(x²) = 12.5; 15/√12.5, 40/√12.5
    tensor([[ 4.2426, 11.3137]])
    """
    same = weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:] and type(weight) in _OWN)
    if not (same and x.numel() >= LEAST and fused(x)):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _Norm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


_OWN = (Tensor, torch.nn.Parameter)


def _kernels() -> Any:
    return importlib.import_module("scanl.ops._cpu.rms_norm")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Any:
        rows = laid_out(x.reshape(-1, x.shape[-1]))
        w = x.new_ones(x.shape[-1]) if weight is None else laid_out(weight)
        y, r = _kernels().forward(rows, w, eps)
        ctx.save_for_backward(x, weight, r)
        ctx.eps = eps
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dy,), (x, weight, r) = cotangents, ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this pass is wanted
            leaves = [x if x.requires_grad else x.detach().requires_grad_()]
            if weight is not None:
                leaves.append(weight if weight.requires_grad else weight.detach().requires_grad_())
            y = F.rms_norm(leaves[0], x.shape[-1:], *leaves[1:], eps=ctx.eps)
            found = torch.autograd.grad(y, leaves, dy, create_graph=True)
            return found[0], found[1] if weight is not None else None, None
        rows, cotangent = (laid_out(each.reshape(-1, x.shape[-1])) for each in (x, dy))
        w = x.new_ones(x.shape[-1]) if weight is None else laid_out(weight)
        dx, dw = _kernels().backward(cotangent, rows, w, r)
        return dx.view(x.shape), None if weight is None else dw, None
