"""Functions that generated kernels of cells call: steps of sequences, products with matrices, functions of one element.

Triton has no tanh, expm1 and log1p that its interpreter could run too. These are exact to a few roundings in float32
and in float64.
"""

import triton
import triton.language as tl

from scanl.ops._triton._rows import sigmoid

__all__ = ["expm1", "largest", "log1p", "log_sigmoid", "product", "sequences_of", "sigmoid", "smallest", "tanh"]


@triton.jit
def sequences_of(i_n, p_offsets, length, sequences):
    """Return for each sequence its row of the batch, its first step, and its number of steps; 0 past the last one."""
    there = i_n < sequences
    if p_offsets is not None:
        begin = tl.load(p_offsets + i_n, mask=there, other=0).to(tl.int64)
        end = tl.load(p_offsets + i_n + 1, mask=there, other=0).to(tl.int64)
        return i_n * 0, begin, (end - begin).to(tl.int32)
    else:
        return i_n, i_n * 0, tl.where(there, length, 0).to(tl.int32)


@triton.jit
def product(a, w):
    """Return a (rows, terms) times w (terms, columns).

    A program has one row on a device, and then w lies spread over the registers of all threads, each number once. The
    `tl.dot` of many rows in float32 needs copies of w in registers, and spills kilobytes at 128 columns.
    """
    return tl.sum(tl.expand_dims(a, 2) * tl.expand_dims(w, 0), 1)


@triton.jit
def _larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def largest(x):
    """Return the largest of each row; NaN if there is one."""
    return tl.reduce(x, 1, _larger, keep_dims=True)


@triton.jit
def smallest(x):
    """Return the smallest of each row; NaN if there is one."""
    return tl.reduce(x, 1, _smaller, keep_dims=True)


@triton.jit
def _tanh_of_small(x):
    """Return tanh x for |x| < 0.5: x less a small part, by seven terms of Lambert's continued fraction."""
    s = x * x
    correction = s * (45045.0 + s * (2772.0 + s * 27.0)) / (135135.0 + s * (62370.0 + s * (3150.0 + s * 28.0)))
    return x - x * correction


@triton.jit
def tanh(x):
    e = tl.exp(tl.abs(x) * -2.0)
    large = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(tl.abs(x) < 0.5, _tanh_of_small(x), tl.where(x < 0.0, -large, large))


@triton.jit
def expm1(x):
    """Return e^x - 1 = 2 t / (1 - t), t = tanh(x / 2), which does not cancel for small x."""
    t = _tanh_of_small(x * 0.5)
    return tl.where(tl.abs(x) < 1.0, 2.0 * t / (1.0 - t), tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """Return log(1 + x), corrected for the rounding of 1 + x."""
    u = 1.0 + x
    result = tl.log(u) - ((u - 1.0) - x) / u
    return tl.where((u <= 0.0) | (u == float("inf")), tl.log(u), result)


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - log1p(tl.exp(-tl.abs(x)))
