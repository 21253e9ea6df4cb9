"""Run a kernel from within another one, on the threads of a team.

A recorded step is one kernel, and runs on one thread. Its large products are kernels of their own: while one runs, the
other threads take units of it.

`team` is a pointer to whole numbers: how many threads there are, the address of the pool that the others belong to (0
for none), and the addresses of the kernels.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import functools

import numpy as np
import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._pointers import pointer
from scanl.ops._cpu._pool import pool, share
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import packer, part
from scanl.ops._cpu._threads import threads
from scanl.ops.products.matrices import add_part_products
from scanl.ops.products.rows_by_weight import HEIGHT, division, product, quantized_product

THREADS, POOL, FIRST = range(3)  # what `team` has, the address of the first kernel last
LARGE_PRODUCT = 1 << 19  # numbers of a weight, times its rows and READING: to share fewer takes longer than it saves
READING = 3  # rows whose products take as long as the weight takes to come from memory
_ADDRESS = ir.IntType(8).as_pointer()


@intrinsic
def _call(typingctx, function, argument):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_ADDRESS])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], _ADDRESS)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@helper()
def _run(team, kind, slots, work):
    """Run the kernel for a kind of weight. slots: from `packer` of its slots.   work: see LARGE_PRODUCT."""
    begin, count = slots.address, slots[1]
    workers = min(team[THREADS], count) if work >= LARGE_PRODUCT else 1
    if workers > 1:
        share(team[POOL], team[FIRST + kind], begin, workers - 1)
    else:
        _call(team[FIRST + kind], begin)


_pack = packer(product.slots)


@kernel("team y y_row x x_row w w_row rows columns terms")
def times(slots):
    """Compute y = x wᵀ for y (rows, columns), x (rows, terms) and w (columns, terms).

    The numbers of a row are adjacent; `_row` is the stride of the rows. All are float32; `columns` is COLUMNS or more.
    """
    team, columns, terms = pointer(slots.team, np.int64), slots.columns, slots.terms
    width, blocks = division(columns, team[THREADS])
    packed = _pack(
        units=blocks, y=slots.y, y_row=slots.y_row, x=slots.x, x_row=slots.x_row, w=slots.w, w_row=slots.w_row, scale=0,
        groups=0, bias=0, rows=slots.rows, columns=columns, terms=terms, width=width, blocks=blocks,
    )  # fmt: skip
    _run(team, 0, packed, columns * terms * (slots.rows + READING))


@kernel("team y y_row x x_row packed scale groups bias rows columns terms")
def times_quantized(slots):
    """Compute y = x Wᵀ + bias, as `multiply` of rows_by_weight.py does. groups, bias: addresses, 0 for none."""
    team, columns, terms = pointer(slots.team, np.int64), slots.columns, slots.terms
    width, blocks = division(columns, team[THREADS])
    grouped = slots.groups != 0
    packed = _pack(
        units=(slots.rows + HEIGHT - 1) // HEIGHT * blocks, y=slots.y, y_row=slots.y_row, x=slots.x, x_row=slots.x_row,
        w=slots.packed, w_row=terms // 2 if grouped else terms, scale=slots.scale, groups=slots.groups, bias=slots.bias,
        rows=slots.rows, columns=columns, terms=terms, width=width, blocks=blocks,
    )  # fmt: skip
    _run(team, 2 if grouped else 1, packed, columns * terms * (slots.rows + READING))


@kernel("team y y_row x x_row w rows columns terms")
def times_rows(slots):
    """Compute y = x w for y (rows, columns), x (rows, terms) and w (terms, columns), whose rows follow one another."""
    rows, columns, terms, y_row, x_row = slots.rows, slots.columns, slots.terms, slots.y_row, slots.x_row
    y, x = part(slots.y, 0, rows * y_row, np.float32), part(slots.x, 0, rows * x_row, np.float32)
    for r in range(rows):
        fill(y, r * y_row, columns, np.float32(0))
    add_part_products(
        y, 0, y_row, columns, x, 0, x_row, terms, part(slots.w, 0, terms * columns, np.float32), 0, 0, rows
    )


# The kernels of each kind of weight, and those that recorded kernels call, in the order in which a team has their
# addresses.
KERNELS = {
    "float32": (product, torch.float32),
    "int8": (quantized_product, torch.int8),
    "int4": (quantized_product, torch.uint8),
    "times": (times, torch.float32),
    "times_quantized": (times_quantized, torch.float32),
    "times_rows": (times_rows, torch.float32),
}


@functools.cache
def _teams(workers: int, used: frozenset[str]) -> np.ndarray:
    shared = pool(workers - 1) if workers > 1 else 0
    addresses = [callee.address(dtype) if name in used else 0 for name, (callee, dtype) in KERNELS.items()]
    return np.array([workers if shared else 1, shared, *addresses])


def team(units: int, used: frozenset[str]) -> int:
    """Return the address that `team` points to. Where the calling kernel has several units, each has one thread.

    used: names of the kernels that are called; they are compiled when a team first has them.
    """
    return _address(1 if units > 1 else threads(), used)


@functools.cache
def _address(workers: int, used: frozenset[str]) -> int:
    return _teams(workers, used).ctypes.data
