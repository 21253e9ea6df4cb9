"""Memory for large results, used again.

A fresh allocation of many megabytes is mapped, zeroed by the kernel page by page, and unmapped when freed; writing
it for the first time was seen to take three to eight times as long as the scan that fills it. So the blocks of the
latest results are remembered here, and the next result of a size takes one whose tensor has died.

That it died is seen from a weak reference when a block is looked for: nothing of Python's runs at the death itself,
where an interrupt of the user would be lost.
"""

import math
import mmap
import sys
import threading
import weakref

import numpy as np
import torch

LEAST = 1 << 20  # bytes; the C library itself keeps what is smaller
KEPT = 1 << 29  # bytes that are remembered, in use or idle; older blocks end with their tensors

_blocks: dict[int, tuple[mmap.mmap, weakref.ref]] = {}  # each with the view that a tensor owns, the latest last
_lock = threading.RLock()  # a signal's handler may come back here on the same thread


def _take(size: int) -> mmap.mmap:
    with _lock:
        for key, (block, lease) in reversed(list(_blocks.items())):
            idle = len(block) == size and lease() is None
            if idle and _blocks.pop(key, None) is not None:  # else a signal's handler has just taken it
                return block
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _remember(block: mmap.mmap, lease: np.ndarray) -> None:
    if len(block) > KEPT:
        return
    with _lock:
        _blocks[id(block)] = block, weakref.ref(lease)
        held = sum(len(other) for other, _ in list(_blocks.values()))
        for key in list(_blocks):
            if held <= KEPT:
                return
            held -= len(_blocks.pop(key, (b"",))[0])


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor; a large one may lie in memory that an earlier result has left."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype)
    block = _take(-(-size // LEAST) * LEAST)
    lease = np.frombuffer(block, np.uint8, size)
    _remember(block, lease)
    return torch.from_numpy(lease).view(dtype).view(shape)
