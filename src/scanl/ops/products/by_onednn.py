"""Large products of rows by a weight, by oneDNN, where torch has a slower library for them.

torch multiplies matrices of float32 by MKL. On processors of AMD that has no code for AVX-512: it does half of the
operations in a second that oneDNN does, which torch has too, for convolutions and for `nn.LSTM`.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from scanl.ops._frame.context import context

MIN_WORK = 1 << 21  # products of two numbers; with fewer, to start a program takes longer than it saves
MIN_SIDE = 8  # terms and columns of a weight


@functools.cache
def _is_faster() -> bool:
    """Return whether oneDNN is faster on this processor, and this torch has it."""
    from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    wide = get_host_cpu_name().startswith("znver") and get_host_cpu_features().get("avx512f", False)
    return bool(wide) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_able(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `linear` takes ordinary tensors, and is faster for many rows."""
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1] or min(weight.shape) < MIN_SIDE:
        return False
    same = x.dtype == weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)
    return same and _is_faster() and not torch.is_autocast_enabled("cpu")


def _times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + bias for x (M, K) and W (N, K)."""
    return torch.ops.mkldnn._linear_pointwise.default(_dense(x), _dense(weight), bias, "none", [], "")


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows or columns follow one another: for others oneDNN takes a thousand times as long."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _rows_by_rows() -> Any:
    """Return the module of a product for which oneDNN turns one of the matrices, and so takes a quarter longer."""
    return importlib.import_module("scanl.ops.products.rows_by_rows")


def add_transposed(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += aᵀ b for total ([G,] N, K), a ([G,] M, N) and b ([G,] M, K), all on one device."""
    rows, (terms, columns) = a.shape[-2], total.shape[-2:]
    able = total.is_cpu and total.dtype == torch.float32 and min(terms, columns) >= MIN_SIDE and _is_faster()
    if able and rows * terms * columns >= MIN_WORK and total.is_contiguous():
        for one, left, right in [(total, a, b)] if total.ndim == 2 else zip(total, a, b, strict=True):
            _rows_by_rows().add_product(one, left, right)
    elif total.ndim == 2:
        total.addmm_(a.t(), b)
    else:
        total.baddbmm_(a.mT, b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _times(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        if context.of_states and isinstance(weight, torch.nn.Parameter):
            of_weight = False
        if torch.is_grad_enabled():  # the gradient will be differentiated
            dx, dw = dy @ weight if of_x else None, dy.mT @ x if of_weight else None
        else:
            dx = _times(dy, weight.t()) if of_x else None
            dw = _rows_by_rows().product(dy, x) if of_weight else None
        return dx, dw, dy.sum(0) if of_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias for x (..., K), as `F.linear` does."""
    rows = x.reshape(-1, x.shape[-1])
    learned = any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if learned and torch.is_grad_enabled():
        y: Any = _Linear.apply(rows, weight, bias)
    else:
        y = _times(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])
