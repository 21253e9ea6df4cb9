r"""A gate times numbers.

.. math:: y = f(a) \odot b, \quad f(a) = a \, \sigma(a) \text{ or } a \, \sigma(2 \sqrt{2/\pi} \, (a + 0.044715 \, a^3))

The second f is the GELU by its approximation with tanh, since (1 + tanh u) / 2 = σ(2u).

Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. (5); Hendrycks and Gimpel, "Gaussian Error
Linear Units", arXiv:1606.08415, section 2.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError, unknown
from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.fused import apply, differentiable, is_faster, kernels

SLOPE = 2 * math.sqrt(2 / math.pi)
POLYNOMIALS = {"silu": (1.0, 0.0), "gelu_tanh": (SLOPE, 0.044715 * SLOPE)}  # p and q: f(a) = a σ(a (p + q a²))


def gated(a: Tensor, b: Tensor, activation: str = "silu") -> Tensor:
    """Return f(a) * b. a, b: of one shape.   activation: f, "silu" or "gelu_tanh".

    On a CPU, many float32 or float64 numbers take one pass over memory forwards and one backwards. Derivatives of every
    order are exact.

    >>> gated(torch.tensor([2.0]), torch.tensor([10.0]))  # 2 / (1 + e^-2) = 1.7616
    tensor([17.6159])
    """
    if activation not in POLYNOMIALS:
        raise ConfigError(f"gated: {unknown('activation', activation, list(POLYNOMIALS))}")
    if a.shape != b.shape or not is_faster(a, b):
        return plain(a, b, activation)
    return apply(_GatedUnit, a, b, activation)


def plain(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """Return the same by torch's functions."""
    return (F.silu(a) if activation == "silu" else F.gelu(a, approximate="tanh")) * b


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, activation: str) -> Any:
        ctx.save_for_backward(a, b)
        ctx.activation = activation
        return kernels("gated").forward(contiguous(a), contiguous(b), POLYNOMIALS[activation])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dy,), (a, b) = cotangents, ctx.saved_tensors
        if torch.is_grad_enabled():  # this pass is differentiated
            return *differentiable(lambda a, b: plain(a, b, ctx.activation), (a, b), [dy]), None
        operands = map(contiguous, (dy, a, b))
        return *kernels("gated").backward(*operands, POLYNOMIALS[ctx.activation]), None
