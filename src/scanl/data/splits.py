"""The training, validation and test parts of series: each series cut by time, or whole series dealt out."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scanl.data.series import Series
from scanl.errors import DataError

TRAINING, VALIDATION, TEST = range(3)
PARTS = ("training", "validation", "test")

Piece = tuple[int, int, int]  # number of a series, its first row in the part, and the row after the last


def by_time(each: Sequence[Series], validation: float, test: float) -> list[list[Piece]]:
    """Return the pieces of the three parts: each series begins with training, and then come validation and test."""
    parts: list[list[Piece]] = [[], [], []]
    for i, one in enumerate(each):
        last = len(one) - round(test * len(one))
        first = last - round(validation * len(one))
        for part, (begin, end) in enumerate(((0, first), (first, last), (last, len(one)))):
            parts[part].append((i, begin, end))
    return parts


def by_series(
    each: Sequence[Series], validation: float, test: float, path: Path, groups: Sequence[int] | None = None
) -> list[list[Piece]]:
    """Return the pieces of the three parts: whole series, dealt out in the order of the digests of their names.

    groups: of each series; every group is dealt out by itself. None: all are one.   path: of the table, for the
    message. Raises DataError when a part has no series.
    """
    groups = groups or [0] * len(each)
    order = sorted(range(len(each)), key=lambda i: hashlib.sha256(each[i].name.encode()).digest())
    order.sort(key=lambda i: groups[i])
    fractions = np.array([1 - validation - test, validation, test])
    dealt = np.zeros(3)
    parts: list[list[Piece]] = [[], [], []]
    for rank, i in enumerate(order):  # the part that lacks most of its share, in parts of it, is dealt the next one
        new = rank == 0 or groups[i] != groups[order[rank - 1]]
        part = TRAINING if new else int((rank + 1 - dealt / fractions).argmax())
        dealt[part] += 1
        parts[part].append((i, 0, len(each[i])))
    if not all(parts):
        raise DataError(
            f"table: {path} has {len(each)} series, expected more because a part of the split by series has "
            "none; give more series or larger --validation and --test"
        )
    return parts
