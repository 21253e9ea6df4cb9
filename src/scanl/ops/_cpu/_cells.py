"""What the kernels of cells share: where the sequences lie, and how they are divided."""

import itertools

import numpy as np
import torch
from numba import njit

from scanl.ops._cpu._team import CORES
from scanl.ops.offsets import offsets

NARROW = 32  # channels under which splitting them over cores would share cache lines
WIDEST = 2048  # channels whose rows still fit the first-level cache
ROWS = 8  # sequences that share each load of a matrix
FLUSH = 256  # steps summed before they are added to the rest, so that long sums stay exact


def sequences(first: torch.Tensor, cu_seqlens: torch.Tensor | None, name: str) -> np.ndarray:
    """Of each sequence its row of the batch, its first step and one past its last, as (N, 3)."""
    batch, steps = first.shape[:2]
    if cu_seqlens is None:
        return np.array([(b, 0, steps) for b in range(batch)], np.int64).reshape(batch, 3)
    bounds = offsets(cu_seqlens, steps, name)
    return np.array([(0, *ends) for ends in itertools.pairwise(bounds)], np.int64).reshape(-1, 3)


def blocks(count: int, width: int) -> tuple[int, int]:
    """How many blocks of how many channels, so that `count` sequences give every core something to do."""
    size = -(-width * min(CORES, max(count, 1)) // CORES)
    size = max(1, min(-(-size // NARROW) * NARROW, WIDEST, width))
    return -(-width // size), size


def groups(count: int) -> tuple[int, int]:
    """How many groups of how many sequences, so that every core has one if there are so many."""
    size = max(1, min(ROWS, -(-count // CORES)))
    return -(-count // size), size


def rows(value: torch.Tensor) -> torch.Tensor:
    """The same values with their last axis contiguous."""
    return value if value.ndim and value.stride(-1) == 1 else value.contiguous()


def before(y: torch.Tensor, state: torch.Tensor, ranges: np.ndarray, reverse: bool) -> torch.Tensor:
    """What stood before every step of y: the step before it, at the start of a sequence its state."""
    shifted = torch.empty_like(y, memory_format=torch.contiguous_format)
    if reverse:
        shifted[:, :-1] = y[:, 1:]
    else:
        shifted[:, 1:] = y[:, :-1]
    found = torch.from_numpy(ranges)
    some = found[:, 2] > found[:, 1]
    start = found[:, 2] - 1 if reverse else found[:, 1]
    shifted[found[some, 0], start[some]] = state[some]
    return shifted


@njit(forceinline=True)
def piece(ranges, unit, count, size, width):
    """A unit of work as its sequence, its row of the batch, its bounds in time, its first channel and how many."""
    n, channel = unit // count, unit % count * size
    return n, ranges[3 * n], ranges[3 * n + 1], ranges[3 * n + 2], channel, min(size, width - channel)


@njit(forceinline=True)
def longest(ranges, first, count):
    """The steps of the longest of `count` sequences from the first on."""
    steps = 0
    for n in range(first, first + count):
        steps = max(steps, ranges[3 * n + 2] - ranges[3 * n + 1])
    return steps


@njit(forceinline=True)
def row_at(ranges, n, i, steps, reverse):
    """Where the i-th step of sequence n lies among all rows (B T); -1 when it has ended."""
    begin, end = ranges[3 * n + 1], ranges[3 * n + 2]
    if i >= end - begin:
        return -1
    return ranges[3 * n] * steps + (end - 1 - i if reverse else begin + i)


@njit(forceinline=True)
def copy(source, target):
    """A loop that becomes one move of memory; numba's assignment of slices is many times slower for short ones."""
    for i in range(target.size):
        target[i] = source[i]
