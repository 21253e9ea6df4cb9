"""Memory for large results, used again.

A fresh allocation of many megabytes is mapped, zeroed by the kernel page by page, and unmapped when freed; writing
it for the first time was seen to take three to eight times as long as the scan that fills it. So blocks come back
here when their tensor dies, and the next result of that size takes one.
"""

import math
import mmap
import sys
import threading

import numpy as np
import torch

LEAST = 1 << 20  # bytes; the C library itself keeps what is smaller
KEPT = 1 << 29  # bytes that may lie idle

_idle: dict[int, list[mmap.mmap]] = {}
_idle_bytes = 0
_lock = threading.RLock()  # a collection inside the lock may free a block on the same thread


class _Lease(np.ndarray):
    """The view that a tensor owns; its end gives the block back."""

    block: mmap.mmap | None = None

    def __del__(self):
        if self.block is not None:
            _give_back(self.block)


def _give_back(block: mmap.mmap) -> None:
    global _idle_bytes
    with _lock:
        if _idle_bytes + len(block) <= KEPT:
            _idle.setdefault(len(block), []).append(block)
            _idle_bytes += len(block)


def _take(size: int) -> mmap.mmap:
    global _idle_bytes
    with _lock:
        blocks = _idle.get(size)
        if blocks:
            _idle_bytes -= size
            return blocks.pop()
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor; a large one may lie in memory that an earlier result has left."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype)
    block = _take(-(-size // LEAST) * LEAST)
    lease = np.frombuffer(block, np.uint8, size).view(_Lease)
    lease.block = block
    return torch.from_numpy(lease).view(dtype).view(shape)
