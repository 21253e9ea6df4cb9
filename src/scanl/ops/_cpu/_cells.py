"""Helpers for the kernels of recurrent cells: row ranges of sequences, and division of the work over cores."""

import functools
import heapq
import itertools
from typing import NamedTuple

import numpy as np
import torch

from scanl.ops._cpu._flat import from_pointer
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._pointers import at, pointer, separate
from scanl.ops._cpu._slots import itemsize
from scanl.ops._cpu._team import CORES
from scanl.ops._cpu._threads import threads
from scanl.ops.offsets import offsets
from scanl.ops.products.matrices import BYTES, add_part_products

MIN_BLOCK_CHANNELS = 32  # least channels of a block: in narrower blocks, several cores would write to one cache line
MAX_WIDTH = 2048  # most channels of a block, so that its rows fit the first-level cache
ROWS = 8  # sequences that are processed with each load of a matrix


def sequences(first: torch.Tensor, cu_seqlens: torch.Tensor | None, name: str) -> np.ndarray:
    """Return (N, 3): for each sequence its batch row, its first step and the step after its last."""
    batch, steps = first.shape[:2]
    if cu_seqlens is None:
        return np.array([(b, 0, steps) for b in range(batch)], np.int64).reshape(batch, 3)
    bounds = offsets(cu_seqlens, steps, name)
    return np.array([(0, *ends) for ends in itertools.pairwise(bounds)], np.int64).reshape(-1, 3)


class Lanes(NamedTuple):
    """Sequences in lanes, each of which is read from one end to the other: a product has a row of each lane.

    pieces: (P, 4), of each sequence that has steps its number, batch row, first step and the step after its last, lane
    by lane.   begins: (L+1,), the first piece of each lane.
    """

    pieces: np.ndarray
    begins: np.ndarray


def lanes(first: torch.Tensor, cu_seqlens: torch.Tensor | None, name: str, most: int) -> Lanes:
    """Return the sequences of a call. Packed ones lie in at most `most` lanes of about equal lengths."""
    batch, steps = first.shape[:2]
    if cu_seqlens is None:
        pieces = np.array([(b, b, 0, steps) for b in range(batch)] if steps else [], np.int64).reshape(-1, 4)
        return Lanes(pieces, np.arange(len(pieces) + 1))
    return _packed(offsets(cu_seqlens, steps, name), most)


@functools.lru_cache(16)
def _packed(offsets: tuple[int, ...], most: int) -> Lanes:
    bounds = np.array(offsets, np.int64)
    lengths = bounds[1:] - bounds[:-1]
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    shortest = [(0, lane) for lane in range(min(most, len(order)))]  # a heap: steps of a lane, and its number
    members: list[list[int]] = [[] for _ in shortest]
    for n, count in zip(order.tolist(), lengths[order].tolist(), strict=True):
        total, lane = shortest[0]
        heapq.heapreplace(shortest, (total + count, lane))
        members[lane].append(n)
    numbers = np.array([n for lane in members for n in lane], np.int64)
    pieces = np.stack([numbers, np.zeros_like(numbers), bounds[numbers], bounds[numbers + 1]], 1)
    return Lanes(pieces, np.cumsum([0, *map(len, members)]))


def blocks(count: int, width: int) -> tuple[int, int]:
    """Return the number of channel blocks and their width, so that `count` sequences give work to every core."""
    size = -(-width * min(CORES, max(count, 1)) // CORES)
    size = max(1, min(-(-size // MIN_BLOCK_CHANNELS) * MIN_BLOCK_CHANNELS, MAX_WIDTH, width))
    return -(-width // size), size


def groups(count: int) -> tuple[int, int]:
    """Return the number of groups and the sequences in each, with a group for every core if there are enough."""
    size = max(1, min(ROWS, -(-count // threads())))
    return -(-count // size), size


def in_panels(matrix: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a matrix (..., n, width) in the order in which a product reads them, from end to end.

    A panel is a vector of each of the n rows. The panels follow one another, then the rest of all rows.
    """
    *groups, n, width = matrix.shape
    lanes = BYTES // matrix.itemsize
    full = width - width % lanes
    ordered = matrix.new_empty(*groups, n * width)
    panels = ordered[..., : n * full].unflatten(-1, (full // lanes, n, lanes))
    panels.copy_(matrix[..., :full].unflatten(-1, (full // lanes, lanes)).transpose(-2, -3))
    ordered[..., n * full :].unflatten(-1, (n, width - full)).copy_(matrix[..., full:])
    return ordered


def rows(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a contiguous last axis."""
    return value if value.ndim and value.stride(-1) == 1 else value.contiguous()


@helper(forceinline=True)
def piece(ranges, unit, count, size, width):
    """Return a unit's sequence, batch row, first step, end step, first channel and number of channels."""
    n, channel = unit // count, unit % count * size
    return n, ranges[3 * n], ranges[3 * n + 1], ranges[3 * n + 2], channel, min(size, width - channel)


@helper(forceinline=True)
def length(ranges, n):
    """Return the number of steps of sequence n."""
    return ranges[3 * n + 2] - ranges[3 * n + 1]


@helper(forceinline=True)
def longest(ranges, first, count):
    """Return the length of the longest of `count` sequences, starting with sequence `first`."""
    steps = 0
    for n in range(first, first + count):
        steps = max(steps, length(ranges, n))
    return steps


@helper(forceinline=True)
def row_at(ranges, n, i, steps, reverse):
    """Return the index, among all B·T rows, of the i-th step of sequence n; -1 after its end."""
    begin, end = ranges[3 * n + 1], ranges[3 * n + 2]
    if i >= end - begin:
        return -1
    return ranges[3 * n] * steps + (end - 1 - i if reverse else begin + i)


@helper(forceinline=True)
def lane_steps(pieces, begins, first, count):
    """Return the steps of the longest of `count` lanes, starting with lane `first`."""
    most = 0
    for lane in range(first, first + count):
        steps = 0
        for piece in range(begins[lane], begins[lane + 1]):
            steps += pieces[4 * piece + 3] - pieces[4 * piece + 2]
        most = max(most, steps)
    return most


@helper(forceinline=True)
def rewind(cursors, r, begins, lane):
    """Set the cursor of member r before the first step of a lane. A cursor has the piece, its steps left, and the row.

    The row is the index, among all B·T rows, of the present step; -1 after the end of the lane.
    """
    cursors[3 * r], cursors[3 * r + 1], cursors[3 * r + 2] = begins[lane] - 1, 0, -1


@helper(forceinline=True)
def advance(cursors, r, pieces, end, steps, reverse):
    """Move the cursor of member r by one step. Return whether a sequence begins. end: the end of the lane's pieces."""
    if cursors[3 * r + 1] > 0:
        cursors[3 * r + 1] -= 1
        cursors[3 * r + 2] += 1 - 2 * reverse
        return False
    piece = cursors[3 * r] + 1
    if piece >= end:
        cursors[3 * r + 2] = -1
        return False
    batch, begin, stop = pieces[4 * piece + 1], pieces[4 * piece + 2], pieces[4 * piece + 3]
    cursors[3 * r], cursors[3 * r + 1] = piece, stop - begin - 1
    cursors[3 * r + 2] = batch * steps + (stop - 1 if reverse else begin)
    return True


@helper(forceinline=True)
def sequence_of(cursors, r, pieces):
    """Return the number of the sequence of the present step of member r."""
    return pieces[4 * cursors[3 * r]]


@helper(forceinline=True, error_model="numpy")
def of_step(operand, row, steps, dtype):
    """Return the pointer to a row of an operand (B, T, E), by the row's index among all B·T."""
    b = row // steps
    place = b * operand.batch + (row - b * steps) * operand.time
    return pointer(operand.at + itemsize(dtype) * place, dtype)


@helper(forceinline=True, error_model="numpy")
def in_window(row, steps, begin, window):
    """Return the index of a row in a window: the rows of `window` steps from step `begin` on."""
    b = row // steps
    return b * window + row - b * steps - begin


@helper(forceinline=True)
def entering(cursors, r, pieces, row, reverse, state, numbers, history, pitch):
    """Return the pointer to the state before the present step of member r, in a backward pass; as `state_before`."""
    if cursors[3 * r + 1] == 0:
        return at(state, pieces[4 * cursors[3 * r]] * numbers)
    return at(history, (row - 1 + 2 * reverse) * pitch)


@helper(forceinline=True)
def state_before(ranges, n, i, row, reverse, state, numbers, history, pitch):
    """Return the pointer to the state before a row, at the i-th step of the backward pass of sequence n.

    state: the states (N, whole) that enter.   history: the state after each row, `pitch` elements apart.
    """
    if i == length(ranges, n) - 1:
        return at(state, n * numbers)
    return at(history, (row - 1 + 2 * reverse) * pitch)


@helper(forceinline=True)
def apart(width, dtype):
    """Return a width of at least this for rows in scratch memory: an odd number of cache lines.

    Rows that are a power of two apart would compete for the same few places of the first-level cache.
    """
    lanes = 64 // itemsize(dtype)
    return ((width + lanes - 1) // lanes | 1) * lanes


@helper()
def copy(source, target, count):
    """Copy `count` elements between pointers. The loop compiles to one memory move."""
    separate()
    for i in range(count):
        target[i] = source[i]


@helper()
def clear(target, count):
    """Set `count` elements to zero."""
    for i in range(count):
        target[i] = 0


@helper()
def add_up(total, recent, count):
    """Add partial sums to sums, and set them to zero."""
    separate()
    for i in range(count):
        total[i] += recent[i]
        recent[i] = 0


@helper()
def multiply(out, out_row, width, h, h_row, n, w, panels, count):
    """Compute out += h w for `count` rows: out (count, width), h (count, n), w (n, width), by pointer and row stride.

    panels: whether w is as `in_panels` returns it. It is a function of its own, so that a kernel with several products
    has its code once.
    """
    add_part_products(
        from_pointer(out, count * out_row), 0, out_row, width, from_pointer(h, count * h_row), 0, h_row, n,
        from_pointer(w, n * width), 0, panels, count,
    )  # fmt: skip
