"""Blocks of columns of a matrix state, for the kernels of all matrix memories.

The columns of S are independent: each block of WIDTH columns is a recurrence of its own. Its rows are WIDTH apart in
scratch memory that fits the first-level cache. A unit of work is one sequence, one head of q and k, and one part of the
heads of v that use it. If there are too few heads, a unit is a part of the columns of one head.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._team import CORES
from scanl.ops.offsets import offsets

WIDTH = 64  # columns of a block; constant, so that the compiler knows that rows in scratch do not overlap
CHUNK = 16  # steps whose states the backward pass holds at a time


class Work(NamedTuple):
    """How the work of a matrix memory is divided into units."""

    ranges: np.ndarray  # for each sequence: first row, end row
    head_parts: int  # parts of the heads of v that use one head of q and k
    column_parts: int  # parts of the columns of a head
    units: int
    slots: dict[str, int]  # the kernels' slots for this division


class Unit(NamedTuple):
    """A unit of work: some heads and some blocks of their columns, for one sequence."""

    share: int  # index among the units that use one head of q and k
    n: int  # the sequence
    shared_head: int
    start: int  # the row of its first step
    direction: int  # 1 or -1: from a step's row to the next step's
    steps: int
    head: int  # the first of `heads`
    heads: int
    column: int  # the first of `columns` blocks
    columns: int


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
    """Sum the results of all parts of a head."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


@helper(forceinline=True)
def share(index, parts, count):
    """Divide range(count) into `parts`; return the start and the end of one part."""
    return count * index // parts, count * (index + 1) // parts


@helper(forceinline=True)
def unit_of(unit, slots, ranges):
    parts = slots.head_parts * slots.column_parts
    index, group = unit % parts, unit // parts
    n, shared_head = group // slots.shared, group % slots.shared
    begin, end = ranges[2 * n], ranges[2 * n + 1]
    start, direction = (end - 1, -1) if slots.reverse else (begin, 1)
    heads = slots.heads // slots.shared
    low, high = share(index // slots.column_parts, slots.head_parts, heads)
    begin_block, end_block = share(index % slots.column_parts, slots.column_parts, -(-slots.values // WIDTH))
    head = shared_head * heads + low
    return Unit(
        index, n, shared_head, start, direction, end - begin, head, high - low, begin_block, end_block - begin_block
    )


@helper(forceinline=True)
def load(matrix, start, rows, width, size, scratch):
    """Copy `size` columns of a matrix of row length `width`, from index `start` on, into scratch."""
    for i in range(rows):
        for j in range(size):
            scratch[i * WIDTH + j] = matrix[start + i * width + j]


@helper(forceinline=True)
def store(scratch, rows, width, size, matrix, start):
    for i in range(rows):
        for j in range(size):
            matrix[start + i * width + j] = scratch[i * WIDTH + j]
