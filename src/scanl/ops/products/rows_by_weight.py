"""Products of rows and the weight of a linear layer, which is read once: of float32, or whole numbers of 8 or 4 bits.

The time of a few rows is the time in which the weight comes from memory. The columns of a tile are far apart, so that
each of a few streams through the weight is in order, which processors read ahead. Rows of the weight next to one
another were seen to come from memory at a third of the rate.

Many rows of float32 are turned first, into panels of sixteen: a vector then has a term of each row, so the sums of a
tile need not be summed further.

Beside whole numbers a row of x becomes whole numbers too, of 16 bits for a weight of 8 and of 13 for one of 4. Sums of
products of whole numbers have no rounding, so neither their order nor the other rows, the tile or the thread change a
bit of a result.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import numpy as np
import torch
from numba import types  # pyright: ignore[reportPrivateImportUsage]

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import pointer
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch, unset
from scanl.ops.products.matrices import transpose
from scanl.ops.products.micro_kernel import (
    BYTES,
    GROUP,
    by_panel,
    clear,
    columns_of_tile,
    floats_by_terms,
    numbers_by_terms,
    turn,
)

COLUMNS = columns_of_tile(types.float32, 1)  # of a tile: a weight of float32 has as many rows at least
NUMBER_COLUMNS = columns_of_tile(types.int8, 1)  # of a tile of whole numbers
TERMS = 4096  # terms of a sum of whole numbers, of which a lane of 32 bits has an eighth
MAX_INPUT = 32767  # largest whole number of x beside 8 bits: 127 · 32767 · TERMS / 8 < 2³¹
MAX_INPUT_BY_GROUPS = 4095  # the same beside 4 bits: a number is at most 8 · 127
HEIGHT = 16  # rows of a unit beside whole numbers: they stay in the first-level cache
MIN_UNIT_COLUMNS = 64  # columns of a unit, at least
PANEL = BYTES // 4  # rows of a panel: the lanes of a vector of float32
PANEL_ROWS = 9  # rows for which a panel takes less time than tiles of four, though its other rows are zero
PANEL_TERMS = 128  # terms summed in registers, and then added: rounding errors of long sums stay small

NAMES = "y y_row x x_row w w_row scale groups bias rows columns terms width blocks"  # slots of both kernels


@helper()
def division(columns, threads):
    """Return how many columns a unit has, and how many units the columns are."""
    blocks = max(1, min(columns // MIN_UNIT_COLUMNS, 4 * threads if threads > 1 else 1))
    width = (columns + 4 * blocks - 1) // (4 * blocks) * 4
    return width, (columns + width - 1) // width


def _float_tile(rows):
    """Build a function that writes the products of `rows` rows, four or one, and the columns of a tile of float32."""
    write_products = floats_by_terms(rows)

    @helper(forceinline=True)
    def tile(slots, first, r, column, apart, memory):
        """Write rows from r on, and columns from `column` on that are `apart`. first: 0.   memory: 0."""
        y, x, w = pointer(slots.y, np.float32), pointer(slots.x, np.float32), pointer(slots.w, np.float32)
        y_at, x_at, w_at = r * slots.y_row + column, r * slots.x_row, column * slots.w_row
        write_products(y, y_at, slots.y_row, apart, x, x_at, slots.x_row, w, w_at, apart * slots.w_row, slots.terms)

    return tile


def _number_tile(rows):
    """Build a function that writes the products of `rows` rows, four or one, and the columns of a tile of numbers."""
    add_products, wide = numbers_by_terms(rows), columns_of_tile(types.int8, rows)

    @helper(forceinline=True)
    def tile(slots, first, r, column, apart, memory):
        """Write rows from first + r on, and columns from `column` on that are `apart`.

        memory: addresses of the rows from `first` on as whole numbers, of their factors, and of the sums of a tile:
        counts of references to arrays take longer than a tile.
        """
        terms, w_row, group_row = slots.terms, apart * slots.w_row, apart * (slots.terms // GROUP)
        grouped, sums = slots.groups != 0, part(memory[2], 0, rows * wide, np.int64)
        clear(sums)
        w, w_at = part(slots.w, 0, slots.columns * slots.w_row, slots.dtype), column * slots.w_row
        numbers, factors = part(memory[0], r * terms, rows * terms, np.int16), part(memory[1], r, rows, np.float32)
        groups = part(slots.groups, 0, slots.columns * (terms // GROUP) if grouped else 0, np.int8)
        for k in range(0, terms, TERMS):
            count, at = min(TERMS, terms - k), w_at + (k // 2 if grouped else k)
            group_at = column * (terms // GROUP) + k // GROUP
            add_products(sums, numbers, k, terms, w, at, w_row, groups, group_at, group_row, count)
        for n in range(rows):
            for c in range(wide):
                at = column + c * apart
                total = np.float32(sums[n * wide + c]) * (factors[n] * part(slots.scale, at, 1, np.float32)[0])
                if slots.bias != 0:
                    total += part(slots.bias, at, 1, np.float32)[0]
                part(slots.y, (first + r + n) * slots.y_row + at, 1, np.float32)[0] = total

    return tile


def _tiles(tile, wide):
    """Build a function that writes the products of some rows and some tiles, by a function for each number of rows."""
    four, one = tile(4), tile(1)

    @helper()
    def tiles(slots, first, done, rows, begin, columns, tile, end, memory):
        """Write rows from first + done to first + rows, and the tiles from `tile` to `end` of `columns` columns.

        begin: the first of the columns.
        """
        for j in range(tile, end):
            column, apart = (begin + j, columns // wide) if j < columns // wide else (begin + columns - wide, 1)
            tiled = rows - (rows - done) % 4
            for r in range(done, tiled, 4):  # these rows of w stay in the first-level cache
                for half in range(2):
                    four(slots, first, r, column + half * (wide // 2) * apart, apart, memory)
            for r in range(tiled, rows):
                one(slots, first, r, column, apart, memory)

    return tiles


_float_tiles, _number_tiles = _tiles(_float_tile, COLUMNS), _tiles(_number_tile, NUMBER_COLUMNS)


@helper()
def panels_of(rows):
    """Return the number of panels for a number of rows."""
    return (rows + PANEL - PANEL_ROWS) // PANEL


@helper()
def to_panels(panels, x, x_row, rows, terms):
    """Turn rows of x into panels: panels (panels_of(rows), terms, PANEL), flat, of which missing rows are zero."""
    for panel in range(panels_of(rows)):
        first, start = panel * PANEL, panel * PANEL * terms
        count = min(PANEL, rows - first)
        turned = terms - terms % PANEL if count == PANEL else 0
        transpose(x, first * x_row, x_row, PANEL, turned, panels, start, PANEL)
        for k in range(turned, terms):
            for r in range(PANEL):
                panels[start + k * PANEL + r] = x[(first + r) * x_row + k] if r < count else np.float32(0)


@helper()
def _sum_up(sums, at, apart, panels, panel, w, w_at, w_row, terms):
    """Write the products of a panel and a tile's rows of w: sums (COLUMNS, PANEL), whose rows are `apart`."""
    for k in range(0, terms, PANEL_TERMS):
        a, b, count = w_at + k, (panel * terms + k) * PANEL, min(PANEL_TERMS, terms - k)
        by_panel(sums, at, apart, w, a, w_row, panels, b, count, np.float32(0 if k == 0 else 1))


@helper()
def _move(y, y_row, first, columns, rows, sums, at):
    """Write sums (columns, PANEL), of which `rows` are of rows of x, to these columns of y."""
    if rows == PANEL:
        turn(y, first, y_row, sums, at, columns)
    else:
        for r in range(rows):
            for c in range(columns):
                y[first + r * y_row + c] = sums[at + c * PANEL + r]


@kernel(NAMES)
def product(slots):
    """Multiply by a weight of float32."""
    rows, terms, w_row, y_row = slots.rows, slots.terms, slots.w_row, slots.y_row
    x, w = part(slots.x, 0, rows * slots.x_row, np.float32), part(slots.w, 0, slots.columns * w_row, np.float32)
    y, turned, square = part(slots.y, 0, rows * y_row, np.float32), min(rows, panels_of(rows) * PANEL), PANEL * PANEL
    size, made = panels_of(rows) * PANEL * terms, False
    memory = unset(size + (turned and COLUMNS * square), np.float32)
    panels, sums = memory[:size], memory[size:]
    for unit in units(slots):  # a unit is `width` columns; the last may begin early, where too few are left for a tile
        if not made:
            to_panels(panels, x, slots.x_row, rows, terms)
            made = True
        begin = min(unit * slots.width, max(0, slots.columns - COLUMNS))
        columns = min(slots.width, slots.columns - begin)
        share, tiles = columns // COLUMNS, (columns + COLUMNS - 1) // COLUMNS
        for strip in range(0, tiles, PANEL):
            for i in range(0, turned, PANEL):  # these rows of w stay in the cache
                count, end = min(PANEL, rows - i), min(strip + PANEL, share)
                for j in range(strip, end):
                    at, row = (j - strip) * PANEL, (begin + j) * w_row
                    _sum_up(sums, at, square, panels, i // PANEL, w, row, share * w_row, terms)
                for c in range(COLUMNS):  # whole cache lines at a time
                    _move(y, y_row, i * y_row + begin + strip + c * share, end - strip, count, sums, c * square)
                if strip + PANEL >= tiles > share:
                    last = begin + columns - COLUMNS  # this tile overlaps others
                    _sum_up(sums, 0, PANEL, panels, i // PANEL, w, last * w_row, w_row, terms)
                    _move(y, y_row, i * y_row + last, COLUMNS, count, sums, 0)
            end = min(strip + PANEL, tiles)
            _float_tiles(slots, 0, turned, rows, begin, columns, strip, end, 0)


@helper(error_model="numpy")
def _to_numbers(out, first, x, bits, limit):
    """Write x as whole numbers of at most `limit`; return the factor that makes x of them, NaN if x is not finite.

    bits: the same memory as whole numbers, which are in the order of the absolute values but for the sign.
    """
    largest = np.int32(0)
    for k in range(x.size):
        largest = max(largest, np.int32(bits[k] & np.int32(0x7FFFFFFF)))
    peak = np.int32(largest).view(np.float32)
    by = np.float32(limit) / peak
    if not peak < np.inf:
        return np.float32(np.nan)
    if not by < np.inf:  # all are 0, or next to it
        fill(out, first, x.size, 0)
        return np.float32(0)
    for k in range(x.size):
        out[first + k] = np.int16(np.rint(x[k] * by))
    return peak / np.float32(limit)


@kernel(NAMES)
def quantized_product(slots):
    """Multiply by a weight of numbers of 8 bits, int8, or of 4, whose pairs are uint8."""
    rows, columns, terms, grouped = slots.rows, slots.columns, slots.terms, slots.groups != 0
    numbers, factors = scratch(min(rows, HEIGHT) * terms, np.int16), scratch(HEIGHT, np.float32)
    totals, ready, limit = scratch(8, np.int64), -1, MAX_INPUT_BY_GROUPS if grouped else MAX_INPUT
    for unit in units(slots):  # a unit is HEIGHT rows and `width` columns
        first, begin = unit // slots.blocks * HEIGHT, unit % slots.blocks * slots.width
        count, wide = min(HEIGHT, rows - first), min(slots.width, columns - begin)
        if ready != first:
            for r in range(count):
                at = (first + r) * slots.x_row
                x, bits = part(slots.x, at, terms, np.float32), part(slots.x, at, terms, np.int32)
                factors[r] = _to_numbers(numbers, r * terms, x, bits, limit)
            ready = first
        tiles = (wide + NUMBER_COLUMNS - 1) // NUMBER_COLUMNS
        memory = (numbers.ctypes.data, factors.ctypes.data, totals.ctypes.data)
        _number_tiles(slots, first, 0, count, begin, wide, 0, tiles, memory)


def multiply(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x Wᵀ + bias for x (M, K), float32; W is as `quantized_linear.pack` returns it. All are contiguous."""
    (rows, terms), columns = x.shape, packed.shape[0]
    y = empty((rows, columns), x.dtype)
    width, blocks = division.py_func(columns, torch.get_num_threads())
    slots = quantized_product.pack(
        y=y, y_row=columns, x=x, x_row=terms, w=packed, w_row=packed.shape[1], scale=scale, groups=groups, bias=bias,
        rows=rows, columns=columns, terms=terms, width=width, blocks=blocks,
    )  # fmt: skip
    kind = torch.int8 if groups is None else torch.uint8
    quantized_product.run(kind, slots, -(-rows // HEIGHT) * blocks, rows * columns * terms)
    return y
