"""Products of a few rows by a weight: tiles, what is left of them, units that threads share, and strides."""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from scanl.ops._compiler import schedule
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops.products import in_team, rows_by_weight

COVERS = ["ops/products/in_team", "ops/products/micro_kernel"]


def assert_product(y, x, w):
    """Each of the K terms is rounded, and so is each sum."""
    bound = x.shape[1] * torch.finfo(y.dtype).eps * (x.abs() @ w.abs().T)
    assert ((y - x.double() @ w.double().T).abs() <= bound).all()


@pytest.mark.parametrize("columns", [8, 11, 35, 96, 100, 197])
def test_any_size_is_the_product(columns):
    """Rows lie apart, and what lies between them is not written."""
    for rows, terms, width in itertools.product((1, 3, 4, 6, 9, 16, 17, 21, 25), (1, 7, 16, 150), (columns, 8, 48)):
        x, w = torch.randn(rows, terms + 3), torch.randn(columns, terms + 5)
        out = torch.full((rows, columns + 2), 9.0)
        units = -(-columns // width)
        slots = rows_by_weight.product.pack(
            y=out, y_row=columns + 2, x=x, x_row=terms + 3, w=w, w_row=terms + 5, scale=None, groups=None, bias=None,
            rows=rows, columns=columns, terms=terms, width=width, blocks=units,
        )  # fmt: skip
        rows_by_weight.product.run(torch.float32, slots, units, rows * columns)
        assert (out[:, columns:] == 9).all()
        assert_product(out[:, :columns], x[:, :terms], w[:, :terms])


@pytest.mark.parametrize("rows", [3, 16, 21])
def test_threads_share_a_large_product(rows):
    """The bits are those of one thread, also where several callers want the same helpers."""
    weight, x, threads = torch.randn(518, 256), torch.randn(rows, 256), torch.get_num_threads()
    assert weight.numel() * (rows + in_team.READING) >= in_team.LARGE_PRODUCT
    assert schedule.MIN_COLUMNS >= rows_by_weight.COLUMNS
    kernel = RecordedFunction(lambda x: F.linear(x, weight), x)
    try:
        torch.set_num_threads(1)
        y = kernel(x)
        torch.set_num_threads(2)
        with ThreadPoolExecutor(3) as callers:
            others = list(callers.map(kernel, [x] * 60))
    finally:
        torch.set_num_threads(threads)
    assert_product(y, x, weight)
    assert all(torch.equal(other, y) for other in others)


def test_pairs_of_matrices_are_products():
    """Of a weight as a linear layer has it, and of one with columns side by side, for a head each."""
    x, weight, columns, added = (torch.randn(3, *size) for size in ((5, 32), (40, 32), (32, 48), (1, 40)))
    kernel = RecordedFunction(lambda x: (torch.baddbmm(added, x, weight.mT), x @ columns, x[1] @ columns[1]), x)
    assert {"times", "times_rows"} <= kernel._called
    for y, w in zip(kernel(x), (weight, columns.mT, columns[1].mT), strict=True):
        given, offset = x if y.ndim == 3 else x[1], added if w is weight else 0
        bound = (32 + 1) * torch.finfo(y.dtype).eps * (given.abs() @ w.abs().mT + abs(offset))
        assert ((y - given.double() @ w.double().mT - offset).abs() <= bound).all()
