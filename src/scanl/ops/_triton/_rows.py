"""Rows (batch, step) of channels for the kernels with a vector state: their addresses, and pieces of time."""

import math

import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._triton.linear_scan import Ranges, range_of, ranges_of

PROGRAMS = 512  # enough to fill a GPU

place = range_of  # returns first row and steps of a range, (for linear_scan,) and the carries before and after it


@triton.jit
def sigmoid(x):
    small = tl.exp2(tl.abs(x) * -1.4426950408889634)
    return tl.where(x > 0, 1.0, small) / (1.0 + small)


def rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x of (B, T, ...) and the stride between its rows (b, t). Copy x only if that stride is not constant."""
    batch, steps, *features = x.shape
    strides = x.stride()
    apart = strides[1] if steps > 1 else strides[0]
    even = batch == 1 or steps == 1 or strides[0] == steps * apart
    dense = all(strides[2 + i] == math.prod(features[i + 1 :]) or features[i] == 1 for i in range(len(features)))
    return (x, apart) if even and dense else (x.contiguous(), math.prod(features))


def ranges(x: Tensor, cu_seqlens: Tensor | None, columns: int, shortest: int) -> Ranges:
    """Return whole sequences, or pieces of a multiple of `shortest` steps if programs are fewer than PROGRAMS / 4."""
    batch, length = x.shape[:2]
    size = max(triton.cdiv(batch * length * columns, PROGRAMS * shortest), 1) * shortest
    return ranges_of(x, True, cu_seqlens, 0 if 4 * size > length else size)
