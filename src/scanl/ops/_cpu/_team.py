"""Run kernels on several threads.

Each thread takes units of work from a common counter until none is left. So results do not depend on the number of
threads, and a busy core delays little.

The threads belong to torch's OpenMP runtime. After a torch operation they spin for milliseconds, waiting for the next
one; a second thread pool would compete with them for the cores (`_pool.py` has one for pieces of microseconds, between
which torch has no work). A forked child has none of these threads, and starting
them there hangs, so it runs on one thread. If torch's runtime is not GNU-compatible, Python threads are used instead.
"""

import ctypes
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_name
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._threads import threads

CORES = os.cpu_count() or 1
MIN_SHARED_ELEMENTS = 1 << 15  # with fewer elements, waking other threads costs more than the work


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def _take(typingctx, pointer):
    """Add one to the counter at `pointer` atomically; return its old value."""

    def codegen(context, builder, signature, args):
        address = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", address, ir.IntType(64)(1), "monotonic")

    return types.int64(types.voidptr), codegen


@helper()
def scratch(size, dtype):
    """Return zeros aligned to a cache line: a vector that crosses two lines takes twice as long."""
    memory = np.zeros(size + 64, dtype)
    start = -memory.ctypes.data % 64 // memory.itemsize
    return memory[start : start + size]


@helper()
def unset(size, dtype):
    """Return memory as `scratch` does, with any numbers."""
    memory = np.empty(size + 64, dtype)
    start = -memory.ctypes.data % 64 // memory.itemsize
    return memory[start : start + size]


@helper(forceinline=True)
def take(counter):
    """Take the next unit of work from the common counter at this address."""
    return _take(_pointer(counter))  # pyright: ignore[reportCallIssue]


# Processors for which LLVM halves its vectors to avoid a lower clock, although 512-bit vectors do not lower it
_KEEP_CLOCK = {"sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "znver4", "znver5"}


def widen_vectors(function: ir.Function) -> None:
    """Let a function use 512-bit vectors: a third faster if arithmetic is the bottleneck."""
    if get_host_cpu_name() in _KEEP_CLOCK:
        for attribute in ('"prefer-vector-width"="512"', '"min-legal-vector-width"="512"'):
            set.add(function.attributes, attribute)  # the class's own `add` accepts only attributes without values


def run(call: Callable, address: int, packed: list[int], units: int, work: int) -> None:
    """Run a kernel, which gets the counter's address, `units`, then the packed numbers."""
    counter = ctypes.c_int64(0)
    arguments = (ctypes.c_int64 * (len(packed) + 2))(ctypes.addressof(counter), units, *packed)
    _run(call, address, arguments, 1 if work < MIN_SHARED_ELEMENTS else min(threads(), units))


def _run(call: Callable, address: int, arguments: ctypes.Array, workers: int) -> None:
    if workers == 1:
        call(arguments)
    else:
        _start(call, address, arguments, workers)


class PreparedCall:
    """A kernel whose numbers stay from call to call. One thread may call it at a time.

    A kernel that takes microseconds takes as long to be given its numbers.
    """

    def __init__(self, call: Callable, address: int, packed: Sequence[int], units: int = 1, work: int = 0) -> None:
        """work: about how many numbers it touches."""
        self._call, self._address, self._counter = call, address, ctypes.c_int64(0)
        self._arguments = (ctypes.c_int64 * (len(packed) + 2))(ctypes.addressof(self._counter), units, *packed)
        self._workers = 1 if work < MIN_SHARED_ELEMENTS else units

    def put(self, first: int, numbers: Sequence[int]) -> None:
        """Set the numbers from number `first` on."""
        self._arguments[first + 2 : first + 2 + len(numbers)] = numbers

    def __call__(self) -> None:
        self._counter.value = 0
        workers = 1 if self._workers == 1 else min(threads(), self._workers)
        _run(self._call, self._address, self._arguments, workers)


def _start(call: Callable, address: int, packed: ctypes.Array, workers: int) -> None:
    parallel = openmp()
    if parallel is not None:
        parallel(address, ctypes.addressof(packed), workers, 0)
        return
    others = [_threads().submit(call, packed) for _ in range(workers - 1)]
    call(packed)
    for other in others:
        other.result()


@functools.cache
def openmp():
    """Return GOMP_parallel(function, data, threads, flags) of the runtime that torch is linked with, or None."""
    for library in pathlib.Path(torch._C.__file__).parent.joinpath("lib").glob("libtorch_cpu.*"):
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix="scanl")
