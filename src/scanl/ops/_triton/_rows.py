"""Rows (batch, step) of channels as the kernels of vectors walk along them: where they lie, and the pieces of time."""

import math

import triton
import triton.language as tl
from torch import Tensor

from scanl.ops._triton.linear_scan import Ranges, range_of, ranges_of

PROGRAMS = 512  # to fill a GPU

place = range_of  # of a range: first row, steps, (for linear_scan,) the carries before it and after it


@triton.jit
def sigmoid(x):
    small = tl.exp2(tl.abs(x) * -1.4426950408889634)
    return tl.where(x > 0, 1.0, small) / (1.0 + small)


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x of (B, T, ...), and how far from one row (b, t) to the next: a copy only where these are not evenly apart."""
    batch, steps, *features = x.shape
    strides = x.stride()
    apart = strides[1] if steps > 1 else strides[0]
    even = batch == 1 or steps == 1 or strides[0] == steps * apart
    dense = all(strides[2 + i] == math.prod(features[i + 1 :]) or features[i] == 1 for i in range(len(features)))
    return (x, apart) if even and dense else (x.contiguous(), math.prod(features))


def ranges(x: Tensor, cu_seqlens: Tensor | None, columns: int, shortest: int) -> Ranges:
    """Whole sequences; pieces of time, of a multiple of `shortest`, where programs would be fewer than a quarter."""
    batch, length = x.shape[:2]
    size = max(triton.cdiv(batch * length * columns, PROGRAMS * shortest), 1) * shortest
    return ranges_of(x, True, length, cu_seqlens, 0 if 4 * size > length else size)
