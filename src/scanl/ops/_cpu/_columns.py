"""Blocks of columns of a matrix state: what the kernels of all matrix memories share.

The columns of S never meet: each block of WIDTH of them is a recurrence of its own, whose rows lie WIDTH apart in
scratch that fits the first-level cache. A unit of work is one sequence, one shared head of queries and keys, and one
part of what reads them: of its heads, or, where there are too few, of the columns of one head.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._team import CORES
from scanl.ops.offsets import offsets

WIDTH = 64  # columns: constant, so that rows in scratch are known not to overlap
CHUNK = 16  # steps whose states the backward pass holds at a time


class Work(NamedTuple):
    """How the operands of a matrix memory are divided."""

    ranges: np.ndarray  # of each sequence: first row, end row
    head_parts: int  # parts of the heads of a shared head
    column_parts: int  # parts of the columns of a head
    units: int
    slots: dict[str, int]  # that say so to the kernels


def divide(v: torch.Tensor, shared: int, state: torch.Tensor, reverse: bool, cu_seqlens: torch.Tensor | None) -> Work:
    bounds = None if cu_seqlens is None else offsets(cu_seqlens, v.shape[1], "cu_seqlens")
    return _divide(tuple(v.shape), shared, state.shape[-2], reverse, bounds)


@functools.lru_cache(512)
def _divide(shape: tuple[int, ...], shared: int, keys: int, reverse: bool, cut: tuple[int, ...] | None) -> Work:
    batch, steps, heads, values = shape
    bounds = np.arange(batch + 1) * steps if cut is None else np.array(cut)
    ranges = np.stack([bounds[:-1], bounds[1:]], 1).astype(np.int64)
    groups = max(1, len(ranges) * shared)
    head_parts = min(heads // max(1, shared), -(-CORES // groups))
    column_parts = min(-(-values // WIDTH), -(-CORES // max(1, groups * head_parts)))
    longest = int((ranges[:, 1] - ranges[:, 0]).max(initial=0))
    units = len(ranges) * shared * head_parts * column_parts
    slots = {
        "ranges": ranges.ctypes.data, "sequences": len(ranges), "shared": shared, "heads": heads, "keys": keys,
        "values": values, "head_parts": head_parts, "column_parts": column_parts, "rows": batch * steps,
        "longest": longest, "reverse": int(reverse),
    }  # fmt: skip
    return Work(ranges, head_parts, column_parts, units, slots)


def summed(parts: torch.Tensor) -> torch.Tensor:
    """What the parts of a head have each found, added up."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


@njit(forceinline=True)
def share(part, parts, count):
    """The range of `count` things that falls to one of `parts`."""
    return count * part // parts, count * (part + 1) // parts


@njit(forceinline=True)
def load(matrix, start, rows, width, size, scratch):
    """`size` columns of a matrix `width` wide, whose first element is at `start`, into scratch."""
    for i in range(rows):
        for j in range(size):
            scratch[i * WIDTH + j] = matrix[start + i * width + j]


@njit(forceinline=True)
def store(scratch, rows, width, size, matrix, start):
    for i in range(rows):
        for j in range(size):
            matrix[start + i * width + j] = scratch[i * WIDTH + j]
