"""Run a kernel from within another one, on the threads of a team.

A recorded step is one kernel, and runs on one thread. Its large products are kernels of their own: while one runs, the
other threads take units of it.

`team` is a pointer to whole numbers: how many threads there are, the address of OpenMP's function that starts them (0
for none), and the addresses of the kernels.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import ctypes
import functools

import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from scanl.ops._cpu import quantized_linear
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._pointers import address, at, pointer
from scanl.ops._cpu._rows_by_weight import COLUMNS, PANEL, multiply, panels_of, to_panels
from scanl.ops._cpu._slots import units
from scanl.ops._cpu._team import array, openmp, threads
from scanl.ops._cpu.quantized_linear import ROWS, division

THREADS, START, FIRST = range(3)  # what `team` has, the address of the first kernel last
LARGE = 1 << 17  # numbers of a weight: with fewer, to start threads takes longer than they save
_ADDRESS, _NUMBER = ir.IntType(8).as_pointer(), ir.IntType(32)


@intrinsic
def _call(typingctx, function, argument):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], _ADDRESS)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _start(typingctx, start, function, argument, threads):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS, _ADDRESS, _NUMBER, _NUMBER])
        builder.call(
            builder.inttoptr(args[0], kind.as_pointer()),
            [
                builder.inttoptr(args[1], _ADDRESS), builder.inttoptr(args[2], _ADDRESS),
                builder.trunc(args[3], _NUMBER), _NUMBER(0),
            ],
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@helper()
def _run(team, number, slots, count, work):
    """Run kernel `number`. slots: its slots, and one more number, the counter of units.   count: of the units."""
    begin = np.int64(slots.ctypes.data)
    slots[0], slots[1], slots[slots.size - 1] = begin + 8 * (slots.size - 1), count, 0
    workers = min(team[THREADS], count) if work >= LARGE else 1
    if workers > 1:
        _start(team[START], team[FIRST + number], begin, workers)
    else:
        _call(team[FIRST + number], begin)


@kernel("out out_row x x_row panels w w_row rows columns terms width")
def product(slots):
    out, x, w = pointer(slots.out, np.float32), pointer(slots.x, np.float32), pointer(slots.w, np.float32)
    panels = array(slots.panels, panels_of(slots.rows) * PANEL * slots.terms, np.float32)
    for unit in units(slots):  # a unit is `width` columns; the last may begin early, where too few are left for a tile
        first = min(unit * slots.width, max(0, slots.columns - COLUMNS))
        columns = min(slots.width, slots.columns - first)
        w_first = at(w, first * slots.w_row)
        target, rows, terms = at(out, first), slots.rows, slots.terms
        multiply(target, slots.out_row, x, slots.x_row, panels, w_first, slots.w_row, rows, columns, terms)


@helper()
def times(team, out, out_row, x, x_row, w, w_row, rows, columns, terms):
    """Compute out = x wᵀ, as `multiply` of _rows_by_weight.py does."""
    width, blocks = division(columns, team[THREADS])
    size = panels_of(rows) * PANEL * terms
    memory = np.empty(24 + size // 2, np.int64)  # the slots, and the panels from a cache line on: of one life
    slots, begin = memory[:14], memory.ctypes.data
    line = begin + 14 * 8 + -(begin + 14 * 8) % 64
    panels = array(line, size, np.float32)
    to_panels(panels, x, x_row, rows, terms)
    slots[2], slots[3], slots[4], slots[5], slots[6] = address(out), out_row, address(x), x_row, line
    slots[7], slots[8], slots[9], slots[10] = address(w), w_row, rows, columns
    slots[11], slots[12] = terms, width
    _run(team, 0, slots, blocks, columns * terms)


@helper()
def times_quantized(team, y, y_row, x, x_row, packed, scale, groups, bias, rows, columns, terms):
    """Compute y = x Wᵀ + bias, as `multiply` of quantized_linear.py does. groups, bias: addresses, 0 for none."""
    width, blocks = division(columns, team[THREADS])
    slots = np.empty(16, np.int64)  # as its kernel has them
    slots[2], slots[3], slots[4], slots[5] = address(x), x_row, address(packed), address(scale)
    slots[6], slots[7], slots[8], slots[9] = groups, bias, address(y), y_row
    slots[10], slots[11], slots[12], slots[13], slots[14] = rows, columns, terms, width, blocks
    count = (rows + ROWS - 1) // ROWS * blocks
    _run(team, 1, slots, count, columns * terms)


KERNELS = (product, quantized_linear.product)  # by their numbers


@functools.cache
def _teams(workers: int, used: frozenset[int]) -> np.ndarray:
    start = openmp()
    addresses = [callee.address(torch.float32) if n in used else 0 for n, callee in enumerate(KERNELS)]
    if start is None:
        return np.array([1, 0, *addresses])
    return np.array([workers, ctypes.cast(start, ctypes.c_void_p).value, *addresses])


def team(units: int, used: frozenset[int]) -> int:
    """Return the address that `team` points to. Where the calling kernel has several units, each has one thread.

    used: numbers of the kernels that are called; they are compiled when a team first has them.
    """
    return _teams(1 if units > 1 else threads(), used).ctypes.data
