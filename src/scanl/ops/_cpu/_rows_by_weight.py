"""Products of a few rows and the weight of a linear layer, which is read once.

The time of a row is the time in which the weight comes from memory. With several rows, tiles of four rows and three
columns keep twelve sums in registers, which do not wait for one another; a row alone takes six columns at a time. The
columns of a tile are far apart, so that each of six streams through the weight is in order.
"""

# pyright: reportCallIssue=false
# numba's conversions of a number have no types that pyright knows.

import numpy as np

from scanl.ops._cpu._helper import helper

COLUMNS = 6  # of a tile: rows of the weight, which has as many at least
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


@helper(**_SUMS)
def multiply(out, out_row, x, x_row, w, w_row, rows, columns, terms):
    """Compute out = x wᵀ for pointers to out (rows, columns), x (rows, terms) and w (columns, terms).

    The numbers of a row are adjacent; `_row` is the stride of the rows. All are float32; `columns` is COLUMNS or more.
    """
    tiled, sixth = rows - rows % 4, columns // COLUMNS
    for j in range(sixth + (columns % COLUMNS > 0)):
        first, apart = (j, sixth) if j < sixth else (columns - COLUMNS, 1)  # the last tile overlaps others
        for i in range(0, tiled, 4):  # these rows of w stay in the first-level cache
            for column in (first, first + 3 * apart):
                place, row = i * out_row + column, column * w_row
                _four_by_three(out, place, out_row, apart, x, i * x_row, x_row, w, row, apart * w_row, terms)
        for i in range(tiled, rows):
            _one_by_six(out, i * out_row + first, apart, x, i * x_row, w, first * w_row, apart * w_row, terms)
