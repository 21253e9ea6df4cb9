"""Products of a few rows and the weight of a linear layer, which is read once.

The time of a row is the time in which the weight comes from memory. A row alone takes six columns at a time; tiles of
four rows and three columns keep twelve sums in registers, which do not wait for one another. Many rows are turned
first, into panels of sixteen: a vector then has a term of each row, so the sums of a tile need not be summed further.
The columns of a tile are far apart, so that each of six streams through the weight is in order.
"""

# pyright: reportCallIssue=false
# numba's conversions of a number have no types that pyright knows.

import numpy as np

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._pointers import address
from scanl.ops._cpu._product import BYTES, NEXT, tile, transpose
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._team import array, scratch

COLUMNS = 6  # of a tile: rows of the weight, which has as many at least
TERMS = 128  # terms summed in registers, and then added: rounding errors of long sums stay small
PANEL = BYTES // 4  # rows of a panel: the lanes of a vector of float32
PANEL_ROWS = 9  # rows for which a panel takes less time than tiles of four, though its other rows are zero
_SUMS = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}  # many partial sums, in vectors


@helper(**_SUMS)
def _four_by_three(out, at, out_row, apart, x, x_at, x_row, w, w_at, w_row, terms):
    """Write the products of four rows of x and three rows of w."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = np.float32(0)
    for k in range(terms):
        a, b, c = w[w_at + k], w[w_at + w_row + k], w[w_at + 2 * w_row + k]
        factor = x[x_at + k]
        a0 += factor * a
        b0 += factor * b
        c0 += factor * c
        factor = x[x_at + x_row + k]
        a1 += factor * a
        b1 += factor * b
        c1 += factor * c
        factor = x[x_at + 2 * x_row + k]
        a2 += factor * a
        b2 += factor * b
        c2 += factor * c
        factor = x[x_at + 3 * x_row + k]
        a3 += factor * a
        b3 += factor * b
        c3 += factor * c
    for row, a, b, c in ((0, a0, b0, c0), (1, a1, b1, c1), (2, a2, b2, c2), (3, a3, b3, c3)):
        out[at + row * out_row] = a
        out[at + row * out_row + apart] = b
        out[at + row * out_row + 2 * apart] = c


@helper(**_SUMS)
def _one_by_six(out, at, apart, x, x_at, w, w_at, w_row, terms):
    """Write the products of a row of x and six rows of w."""
    y0 = y1 = y2 = y3 = y4 = y5 = np.float32(0)
    for k in range(terms):
        factor = x[x_at + k]
        y0 += factor * w[w_at + k]
        y1 += factor * w[w_at + w_row + k]
        y2 += factor * w[w_at + 2 * w_row + k]
        y3 += factor * w[w_at + 3 * w_row + k]
        y4 += factor * w[w_at + 4 * w_row + k]
        y5 += factor * w[w_at + 5 * w_row + k]
    for column, y in enumerate((y0, y1, y2, y3, y4, y5)):
        out[at + column * apart] = y


_six_by_panel = tile(COLUMNS, 1)  # a panel is its second factor, whose rows are the vectors


@helper()
def panels_of(rows):
    """Return the number of panels for a number of rows."""
    return (rows + PANEL - PANEL_ROWS) // PANEL


@helper()
def to_panels(panels, x, x_row, rows, terms):
    """Turn rows of x into panels: panels (panels_of(rows), terms, PANEL), flat, of which missing rows are zero."""
    source = array(address(x), rows * x_row, np.float32)
    for panel in range(panels_of(rows)):
        first, start = panel * PANEL, panel * PANEL * terms
        count = min(PANEL, rows - first)
        turned = terms - terms % PANEL if count == PANEL else 0
        transpose(source, first * x_row, x_row, PANEL, turned, panels, start, PANEL)
        for k in range(turned, terms):
            for r in range(PANEL):
                panels[start + k * PANEL + r] = x[(first + r) * x_row + k] if r < count else np.float32(0)


@helper()
def _sum_up(sums, at, apart, panels, panel, w, w_at, w_row, terms):
    """Write the products of a panel and six rows of w: sums (COLUMNS, PANEL), whose rows are `apart`."""
    for c in range(COLUMNS):
        fill(sums, at + c * apart, PANEL, 0)
    for k in range(0, terms, TERMS):
        a, b, count = w_at + k, panel * PANEL * terms + k * PANEL, min(TERMS, terms - k)
        _six_by_panel(sums, at, apart, w, a, w_row, NEXT, panels, b, PANEL, 0, count, np.float32(1))


@helper()
def _write(out, out_row, first, columns, rows, sums, at):
    """Write sums (columns, PANEL), of which `rows` are of rows of x, to these columns of out."""
    if columns == PANEL and rows == PANEL:
        transpose(sums, at, PANEL, PANEL, PANEL, out, first, out_row)
    else:
        for r in range(rows):
            for c in range(columns):
                out[first + r * out_row + c] = sums[at + c * PANEL + r]


@helper(**_SUMS)
def multiply(out, out_row, x, x_row, panels, w, w_row, rows, columns, terms):
    """Compute out = x wᵀ for pointers to out (rows, columns), x (rows, terms) and w (columns, terms).

    The numbers of a row are adjacent; `_row` is the stride of the rows. All are float32; `columns` is COLUMNS or more.
    panels: the array that `to_panels` makes of x.
    """
    turned, sixth, square = min(rows, panels_of(rows) * PANEL), columns // COLUMNS, PANEL * PANEL
    tiled, tiles = rows - (rows - turned) % 4, sixth + (columns % COLUMNS > 0)
    target, weight = array(address(out), rows * out_row, np.float32), array(address(w), columns * w_row, np.float32)
    sums = scratch(COLUMNS * square if turned else 0, np.float32)
    for strip in range(0, tiles, PANEL):
        for i in range(0, turned, PANEL):  # these rows of w stay in the cache
            count, end = min(PANEL, rows - i), min(strip + PANEL, sixth)
            for j in range(strip, end):
                at = (j - strip) * PANEL
                _sum_up(sums, at, square, panels, i // PANEL, weight, j * w_row, sixth * w_row, terms)
            for c in range(COLUMNS):  # whole cache lines at a time
                _write(target, out_row, i * out_row + strip + c * sixth, end - strip, count, sums, c * square)
            if strip + PANEL >= tiles > sixth:
                last = columns - COLUMNS  # this tile overlaps others
                _sum_up(sums, 0, PANEL, panels, i // PANEL, weight, last * w_row, w_row, terms)
                _write(target, out_row, i * out_row + last, COLUMNS, count, sums, 0)
        for j in range(strip, min(strip + PANEL, tiles)):
            first, apart = (j, sixth) if j < sixth else (columns - COLUMNS, 1)
            for i in range(turned, tiled, 4):  # so do these, in the first-level cache
                for column in (first, first + 3 * apart):
                    place, row = i * out_row + column, column * w_row
                    _four_by_three(out, place, out_row, apart, x, i * x_row, x_row, w, row, apart * w_row, terms)
            for i in range(tiled, rows):
                _one_by_six(out, i * out_row + first, apart, x, i * x_row, w, first * w_row, apart * w_row, terms)
