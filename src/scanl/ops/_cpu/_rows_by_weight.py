"""Products of a few rows and the weight of a linear layer, which is read once, in its order.

The time of a row is the time in which the weight comes from memory. With several rows, tiles of four rows and two
columns keep eight sums in registers, which do not wait for one another; a row alone takes four columns at a time.
"""

# pyright: reportCallIssue=false
# numba's conversions of a number have no types that pyright knows.

import numpy as np

from scanl.ops._cpu._helper import helper

_SUMS = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}  # many partial sums, in vectors


@helper(**_SUMS)
def _four_by_two(out, at, out_row, x, x_at, x_row, w, w_at, w_row, terms):
    """Write the products of four rows of x and two rows of w."""
    y0 = y1 = y2 = y3 = z0 = z1 = z2 = z3 = np.float32(0)
    first, second, third, fourth = x_at, x_at + x_row, x_at + 2 * x_row, x_at + 3 * x_row
    for k in range(terms):
        y, z = np.float32(w[w_at + k]), np.float32(w[w_at + w_row + k])
        y0 += x[first + k] * y
        z0 += x[first + k] * z
        y1 += x[second + k] * y
        z1 += x[second + k] * z
        y2 += x[third + k] * y
        z2 += x[third + k] * z
        y3 += x[fourth + k] * y
        z3 += x[fourth + k] * z
    for row, y, z in ((0, y0, z0), (1, y1, z1), (2, y2, z2), (3, y3, z3)):
        out[at + row * out_row] = y
        out[at + row * out_row + 1] = z


@helper(**_SUMS)
def _one_by_four(out, at, x, x_at, w, w_at, w_row, terms):
    """Write the products of a row of x and four rows of w."""
    y0 = y1 = y2 = y3 = np.float32(0)
    second, third, fourth = w_at + w_row, w_at + 2 * w_row, w_at + 3 * w_row
    for k in range(terms):
        factor = x[x_at + k]
        y0 += factor * np.float32(w[w_at + k])
        y1 += factor * np.float32(w[second + k])
        y2 += factor * np.float32(w[third + k])
        y3 += factor * np.float32(w[fourth + k])
    out[at], out[at + 1], out[at + 2], out[at + 3] = y0, y1, y2, y3


@helper(**_SUMS)
def multiply(out, out_row, x, x_row, w, w_row, rows, columns, terms):
    """Compute out = x wᵀ for pointers to out (rows, columns), x (rows, terms) and w (columns, terms).

    The numbers of a row are adjacent; `_row` is the stride of the rows. out and x are float32, w is that or int8.
    """
    tiled, even = rows - rows % 4, columns - columns % 4
    for j in range(0, even, 4):  # these rows of w stay in the first-level cache
        for i in range(0, tiled, 4):
            for side in range(j, j + 4, 2):
                _four_by_two(out, i * out_row + side, out_row, x, i * x_row, x_row, w, side * w_row, w_row, terms)
        for i in range(tiled, rows):
            _one_by_four(out, i * out_row + j, x, i * x_row, w, j * w_row, w_row, terms)
    for j in range(even, columns):
        for i in range(rows):
            total = np.float32(0)
            for k in range(terms):
                total += x[i * x_row + k] * np.float32(w[j * w_row + k])
            out[i * out_row + j] = total
