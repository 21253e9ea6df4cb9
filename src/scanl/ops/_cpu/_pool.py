"""Threads that help a kernel with pieces of its work, each of a few microseconds.

OpenMP's threads must all arrive at the end of a piece, also one that the system has not let run: on a busy machine each
piece may then take milliseconds. Here a thread that has not begun is not waited for; those that are there take the
units. A thread without work looks for some SPINS times, then it sleeps, in a read of a pipe, until there is work again.

A piece is open as long as the thread that has it takes units. Other threads join it by a compare and exchange of the
state, which has the number of the piece: no thread joins a piece that is over.
"""

import ctypes
import functools
import os
import platform
import sys
import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from scanl.ops._cpu._kernel import kernel

# What a pool has, in places of a cache line each where threads write: the state, whether a kernel has the pool, how
# many threads sleep; the piece: its function, the argument, and how many threads may join; the pipe, and the addresses
# of functions of C.
STATE, OWNER, ASLEEP, FUNCTION, ARGUMENT, HELPERS = 0, 8, 16, 24, 25, 26
READ_END, WRITE_END, READ, WRITE, YIELD = 32, 33, 34, 35, 36
WORDS = 40
JOINED, OPEN, PIECE = (
    0x7FFF,
    0x8000,
    0x10000,
)  # parts of the state: threads in the piece, whether it is open, its number
SPINS = 4096  # about 0.1 ms
SPINS_OF_OWNER = 1024  # before other threads of the processor may run: one that has a unit may wait for it
FAILURES = 16  # reads of the pipe without a byte, such as signals make, before a thread ends
_WORD, _BYTE, _NUMBER = ir.IntType(64), ir.IntType(8).as_pointer(), ir.IntType(32)
_ON_ARM = platform.machine() in ("aarch64", "arm64")


class _Words:
    """The words of a pool, for code that an intrinsic generates."""

    def __init__(self, builder: Any, address: Any) -> None:
        self.builder, self._first = builder, builder.inttoptr(address, _WORD.as_pointer())

    def at(self, place: int) -> Any:
        return self.builder.gep(self._first, [_WORD(place)])

    def read(self, place: int) -> Any:
        return self.builder.load_atomic(self.at(place), "acquire", 8)

    def change(self, operation: str, place: int, value: int) -> Any:
        """Change a word, and return what it was."""
        return self.builder.atomic_rmw(operation, self.at(place), _WORD(value), "acq_rel")

    def run_piece(self) -> None:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE]).as_pointer()
        function, argument = (self.builder.load(self.at(place)) for place in (FUNCTION, ARGUMENT))
        self.builder.call(self.builder.inttoptr(function, kind), [self.builder.inttoptr(argument, _BYTE)])

    def call(self, place: int, *arguments: Any) -> Any:
        """Call a function of C, which returns a word."""
        kind = ir.FunctionType(_WORD, [value.type for value in arguments])
        return self.builder.call(self.builder.inttoptr(self.builder.load(self.at(place)), kind.as_pointer()), arguments)

    def file(self, place: int) -> Any:
        return self.builder.trunc(self.builder.load(self.at(place)), _NUMBER)

    def wait(self) -> None:
        """Let the processor wait some cycles."""
        name, arguments = ("llvm.aarch64.hint", [_NUMBER(1)]) if _ON_ARM else ("llvm.x86.sse2.pause", [])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)


@intrinsic
def share(typingctx, pool, function, argument, helpers):
    """Run a function that takes units, on this thread and at most so many of the pool."""

    def codegen(context, builder, signature, args):
        words, i = _Words(builder, args[0]), builder
        taken = i.extract_value(i.cmpxchg(words.at(OWNER), _WORD(0), _WORD(1), "acq_rel", "monotonic"), 1)
        with i.if_else(taken) as (owning, alone):
            with owning:
                i.store(args[1], words.at(FUNCTION))
                i.store(args[2], words.at(ARGUMENT))
                i.store(args[3], words.at(HELPERS))
                opened = i.or_(i.add(words.read(STATE), _WORD(PIECE)), _WORD(OPEN))
                i.store_atomic(opened, words.at(STATE), "seq_cst", 8)
                with i.if_then(i.icmp_signed(">", words.read(ASLEEP), _WORD(0))):
                    asleep = words.change("xchg", ASLEEP, 0)
                    woken = words.call(WRITE, words.file(WRITE_END), i.bitcast(words.at(STATE), _BYTE), asleep)
                    woken = i.select(i.icmp_signed(">", woken, _WORD(0)), woken, _WORD(0))
                    i.atomic_rmw("add", words.at(ASLEEP), i.sub(asleep, woken), "acq_rel")
                words.run_piece()
                words.change("and", STATE, ~OPEN)
                look, wait, end = (i.append_basic_block(name) for name in ("look", "wait", "end"))
                before = i.block
                i.branch(look)
                i.position_at_end(look)
                spins = i.phi(_WORD)
                spins.add_incoming(_WORD(1), before)
                here = i.and_(words.read(STATE), _WORD(JOINED))
                i.cbranch(i.icmp_signed("!=", here, _WORD(0)), wait, end)
                i.position_at_end(wait)
                words.wait()
                with i.if_then(i.icmp_signed("==", i.urem(spins, _WORD(SPINS_OF_OWNER)), _WORD(0))):
                    words.call(YIELD)
                spins.add_incoming(i.add(spins, _WORD(1)), i.block)
                i.branch(look)
                i.position_at_end(end)
                i.store_atomic(_WORD(0), words.at(OWNER), "release", 8)
            with alone:
                kind = ir.FunctionType(ir.VoidType(), [_BYTE]).as_pointer()
                i.call(i.inttoptr(args[1], kind), [i.inttoptr(args[2], _BYTE)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def _join(typingctx, pool, last):
    """Take part in the piece, unless it is number `last` or over. Return the number of the piece, or `last`."""

    def codegen(context, builder, signature, args):
        words, i = _Words(builder, args[0]), builder
        state = words.read(STATE)
        number = i.lshr(state, _WORD(16))
        is_open = i.icmp_signed("!=", i.and_(state, _WORD(OPEN)), _WORD(0))
        free = i.icmp_signed("<", i.and_(state, _WORD(JOINED)), i.load(words.at(HELPERS)))
        result = cgutils.alloca_once_value(i, args[1])
        with i.if_then(i.and_(i.and_(is_open, free), i.icmp_signed("!=", number, args[1]))):
            more = i.add(state, _WORD(1))
            joined = i.extract_value(i.cmpxchg(words.at(STATE), state, more, "acq_rel", "monotonic"), 1)
            with i.if_then(joined):
                words.run_piece()
                words.change("sub", STATE, 1)
                i.store(number, result)
        words.wait()
        return i.load(result)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _sleep(typingctx, pool):
    """Wait for a byte from the pipe; return how many came."""

    def codegen(context, builder, signature, args):
        words, i = _Words(builder, args[0]), builder
        byte = cgutils.alloca_once(i, ir.IntType(8))
        words.change("add", ASLEEP, 1)
        return words.call(READ, words.file(READ_END), byte, _WORD(1))

    return types.int64(types.int64), codegen


@kernel("pool")
def _work(slots):
    """Take part in one piece after another."""
    last, spins, failures = -1, 0, 0
    while failures < FAILURES:
        joined = _join(slots.pool, last)  # pyright: ignore[reportCallIssue]
        spins = spins + 1 if joined == last else 0
        last = joined
        if spins > SPINS:
            failures = 0 if _sleep(slots.pool) == 1 else failures + 1  # pyright: ignore[reportCallIssue]
            spins = 0


class _Pool:
    """Threads, and what they and kernels have in common. They live as long as the process."""

    def __init__(self) -> None:
        memory = np.zeros(WORDS + 8, np.int64)
        start = -memory.ctypes.data % 64 // 8
        self.words, self._threads, self._lock = memory[start : start + WORDS], 0, threading.Lock()
        library: Any = ctypes.CDLL(None)
        self.words[READ_END], self.words[WRITE_END] = os.pipe()
        for place, function in ((READ, library.read), (WRITE, library.write), (YIELD, library.sched_yield)):
            self.words[place] = ctypes.cast(function, ctypes.c_void_p).value or 0

    def grow(self, threads: int) -> None:
        """Let there be as many threads."""
        with self._lock:
            while self._threads < threads:
                work = _work.alone(torch.float32, _work.pack(pool=self.words.ctypes.data))
                threading.Thread(target=work, name="scanl helper", daemon=True).start()
                self._threads += 1


@functools.cache
def _pool() -> _Pool:
    return _Pool()


def pool(helpers: int) -> int:
    """Return the address of a pool with so many threads beside the caller's; 0 where there can be none."""
    if sys.platform == "win32":
        return 0
    shared = _pool()
    shared.grow(helpers)
    return shared.words.ctypes.data
