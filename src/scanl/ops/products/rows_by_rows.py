"""The product aᵀ b of two matrices with many rows: the gradient of a weight.

Both are read as they lie. Some rows at a time are copied to where they stay in a cache: all columns of a that a unit of
work has, and a panel of columns of b. Each tile of the result has its sums in registers, and is added to what the rows
before gave.
"""

import functools
from typing import Any

from torch import Tensor

from scanl.ops._recurrent.products import by_panels, by_rows, outer_tile, pack_rows, tile_rows
from scanl.ops._recurrent.slots import COMMON_SLOTS, read_slots, taken_units
from scanl.ops._recurrent.writer import DECLARATIONS, LANES, CodeValue, Function

WIDTHS = [4, 2, 1]  # vectors of a panel
STEPS = 128  # rows that are summed in registers: a panel of them is two thirds of the first-level cache
BLOCK = 256  # rows of the result of a unit of work
GAP = BLOCK // LANES + 1  # vectors between two rows of a copy: at a power of two they would meet in the cache
SLOTS = "a b out rows columns steps a_row b_row fresh"


def _source() -> str:
    """Write the kernel: out (rows, columns) = aᵀ b of a (steps, rows) and b (steps, columns); += if `fresh` is 0."""
    code = Function("kernel", "slots")
    panel = CodeValue(code.variable(f"[{STEPS * WIDTHS[0] * LANES} x float], align 64"), "ptr", code)
    copy = CodeValue(code.variable(f"[{STEPS * GAP * LANES} x float], align 64"), "ptr", code)
    at = read_slots(code, SLOTS.split(), {"a", "b", "out"}, code.index(COMMON_SLOTS))
    with taken_units(code) as unit:
        first = unit * BLOCK
        rows = code.least(at["rows"] - first, BLOCK)
        with code.loop(0, at["steps"], STEPS) as done:
            a, b = code.at(at["a"], done * at["a_row"]), code.at(at["b"], done * at["b_row"])
            steps = code.least(at["steps"] - done, STEPS)
            code.call(f"pack_rows_{GAP}", a, copy, steps, first, at["rows"], 0, at["a_row"])
            fresh = code.choose(done.equals(0), at["fresh"], 0)

            def write(wide: int, column: CodeValue) -> None:
                code.call(f"pack_rows_{wide}", b, panel, steps, column, at["columns"], 0, at["b_row"])

                def tile(count: int, row: CodeValue) -> None:
                    out = code.at(at["out"], (first + row) * at["columns"], column)
                    code.call(
                        f"outer_{count}_{wide}", code.at(copy, row), panel, out, 0, GAP * LANES, 0, wide * LANES, 1,
                        steps, at["columns"], at["columns"] - column, fresh,
                    )  # fmt: skip

                by_rows(code, rows, tile_rows(wide), tile)

            by_panels(code, at["columns"], WIDTHS, write)
    texts = [DECLARATIONS, pack_rows(GAP)]
    for wide in WIDTHS:
        texts += [pack_rows(wide), *(outer_tile(rows, wide) for rows in range(1, tile_rows(wide) + 1))]
    return "\n".join([*texts, code.finished().replace("define internal void @kernel", "define void @kernel")])


@functools.cache
def _native() -> Any:
    from scanl.ops._compiler.machine_code import NativeKernel
    from scanl.ops._compiler.print_llvm import KernelSource

    return NativeKernel(KernelSource(_source(), frozenset()))


def _rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def add_product(total: Tensor, a: Tensor, b: Tensor, *, fresh: bool = False) -> None:
    """Compute total += aᵀ b for total (N, K), contiguous, a (M, N) and b (M, K), of float32; total = aᵀ b if fresh."""
    a, b = _rows(a), _rows(b)
    blocks = -(-a.shape[1] // BLOCK)
    packed = [a.data_ptr(), b.data_ptr(), total.data_ptr(), a.shape[1], b.shape[1], len(a), a.stride(0), b.stride(0)]
    _native().prepared([*packed, int(fresh)], blocks, a.numel() * b.shape[1])()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ b."""
    total = a.new_empty(a.shape[1], b.shape[1])
    add_product(total, a, b, fresh=True)
    return total
