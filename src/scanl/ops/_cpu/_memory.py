"""Reuse of memory for large results.

A fresh allocation of many megabytes is mapped, zeroed page by page by the operating system, and unmapped when freed.
The first write to it was measured to take three to eight times as long as the scan that fills it. So this module keeps
the memory blocks of the latest results. The next result of the same size takes a block whose tensor has died.

A weak reference tells that a tensor died. It is checked only when a block is needed. No Python code runs at the death
itself, because a user's interrupt during such code would be lost.
"""

import math
import mmap
import sys
import threading
import weakref

import numpy as np
import torch

MIN_BYTES = 1 << 20  # bytes; the C library reuses smaller allocations itself
MAX_BYTES = 1 << 29  # bytes kept here, in use or idle; older blocks are freed with their tensors

_blocks: dict[int, tuple[mmap.mmap, weakref.ref]] = {}  # each with the view that a tensor owns, the latest last
_lock = threading.RLock()  # reentrant: a signal handler may call `empty` on the same thread


def _take(size: int) -> mmap.mmap:
    with _lock:
        for key, (block, lease) in reversed(list(_blocks.items())):
            idle = len(block) == size and lease() is None
            if idle and _blocks.pop(key, None) is not None:  # otherwise a signal handler has just taken it
                return block
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _remember(block: mmap.mmap, lease: np.ndarray) -> None:
    if len(block) > MAX_BYTES:
        return
    with _lock:
        _blocks[id(block)] = block, weakref.ref(lease)
        total = sum(len(other) for other, _ in list(_blocks.values()))
        for key in list(_blocks):
            if total <= MAX_BYTES:
                return
            total -= len(_blocks.pop(key, (b"",))[0])


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor. A large one may reuse the memory of an earlier result."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_BYTES or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype)
    block = _take(-(-size // MIN_BYTES) * MIN_BYTES)
    lease = np.frombuffer(block, np.uint8, size)
    _remember(block, lease)
    return torch.from_numpy(lease).view(dtype).view(shape)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x as kernels read it: contiguous, and negated or conjugated where torch has put that off."""
    return x.resolve_conj().resolve_neg().contiguous()
