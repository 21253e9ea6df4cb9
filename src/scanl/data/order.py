"""The order in which training reads pieces of data: a pure function of (seed, step), so resuming replays nothing."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def shuffled(
    seed: int, total: int, pieces: int, step: int, size: int, rank: int = 0, world: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each row that process `rank` of `world` reads at a step, an offset below `total` and a piece.

    Each epoch reads every piece once, in an order of its own, and has one offset. Rows are counted over the processes:
    these are rows rank*size to (rank+1)*size of the batch of world*size rows that one process would read.
    """
    epochs, places = np.divmod((step * world + rank) * size + np.arange(size), pieces)
    offsets, numbers = np.empty((2, size), np.int64)
    for epoch_number in np.unique(epochs):
        offset, order = epoch(seed, int(epoch_number), total, pieces)
        here = epochs == epoch_number
        offsets[here], numbers[here] = offset, order[places[here]]
    return offsets, numbers


@lru_cache(maxsize=4)
def epoch(seed: int, number: int, total: int, pieces: int) -> tuple[int, NDArray[np.int64]]:
    """Return the offset of an epoch, and its order of the pieces."""
    random = np.random.default_rng((seed, number))
    return int(random.integers(total)), random.permutation(pieces)
