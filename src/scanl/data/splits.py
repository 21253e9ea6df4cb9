"""The training, validation and test parts of series: each series cut by time, or whole series dealt out."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.series.series import Series
from scanl.errors import DataError

TRAINING, VALIDATION, TEST = range(3)
PARTS = ("training", "validation", "test")

Piece = tuple[int, int, int]  # number of a series, its first row in the part, and the row after the last


def by_time(series: Sequence[Series], validation: float, test: float) -> list[list[Piece]]:
    """Return the pieces of the three splits: each series is cut into training, validation and test, in this order."""
    parts: list[list[Piece]] = [[], [], []]
    for i, member in enumerate(series):
        last = len(member) - round(test * len(member))
        first = last - round(validation * len(member))
        for split, (begin, end) in enumerate(((0, first), (first, last), (last, len(member)))):
            parts[split].append((i, begin, end))
    return parts


def by_series(
    series: Sequence[Series], validation: float, test: float, path: Path, groups: Sequence[int] | None = None
) -> list[list[Piece]]:
    """Return the pieces of the three parts: whole series, dealt out in the order of the digests of their names.

    groups: a group number for each series; every group is split by itself. None: one group.   path: the table, for
    the message. Raises DataError when a split of which there should be a fraction has no series.
    """
    groups = groups or [0] * len(series)
    order = sorted(range(len(series)), key=lambda i: hashlib.sha256(series[i].name.encode()).digest())
    order.sort(key=lambda i: groups[i])
    fractions = np.array([1 - validation - test, validation, test])
    dealt = np.zeros(3)
    parts: list[list[Piece]] = [[], [], []]
    for rank, i in enumerate(order):  # give the series to the split furthest below its share, relative to the share
        new = rank == 0 or groups[i] != groups[order[rank - 1]]
        filled = np.divide(dealt, fractions, out=np.full(3, np.inf), where=fractions > 0)
        split = TRAINING if new else int((rank + 1 - filled).argmax())
        dealt[split] += 1
        parts[split].append((i, 0, len(series[i])))
    if not all(part or not fraction for part, fraction in zip(parts, fractions, strict=True)):
        raise DataError(
            f"table: {path} has {len(series)} series, expected more because a part of the split by series has "
            "none; give more series, larger --validation and --test, or 0 for both"
        )
    return parts


def sampled(count: int, limit: int) -> NDArray[np.intp]:
    """Return `limit` of the numbers from 0 to `count` - 1, in order; all if there are no more.

    One is drawn from each of `limit` equal stretches, always the same. So they are in step with no season: each hour of
    the day is among them about as often as the others.
    """
    if count <= limit:
        return np.arange(count)
    edges = np.arange(limit + 1) * count // limit
    return edges[:-1] + np.random.default_rng(0).integers(np.diff(edges))
