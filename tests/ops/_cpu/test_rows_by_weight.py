"""Products of a few rows by a weight: tiles, what is left of them, units that threads share, and strides."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from scanl.ops._cpu import _in_team, _rows_by_weight
from scanl.ops._recorded import Recorded, loops


def assert_product(y, x, w):
    """Each of the K terms is rounded, and so is each sum."""
    bound = x.shape[1] * torch.finfo(y.dtype).eps * (x.abs() @ w.abs().T)
    assert ((y - x.double() @ w.double().T).abs() <= bound).all()


@pytest.mark.parametrize("columns", [6, 7, 11, 35, 100])
def test_any_size_is_the_product(columns):
    """Rows lie apart, and what lies between them is not written."""
    for rows, terms, width in itertools.product((1, 2, 3, 4, 5, 8, 13, 16), (1, 7, 8, 40), (columns, 8, 48)):
        x, w = torch.randn(rows, terms + 3), torch.randn(columns, terms + 5)
        out = torch.full((rows, columns + 2), 9.0)
        units = -(-columns // width)
        slots = _in_team.product.pack(
            out=out, out_row=columns + 2, x=x, x_row=terms + 3, w=w, w_row=terms + 5, rows=rows, columns=columns,
            terms=terms, width=width,
        )  # fmt: skip
        _in_team.product.run(torch.float32, slots, units, rows * columns)
        assert (out[:, columns:] == 9).all()
        assert_product(out[:, :columns], x[:, :terms], w[:, :terms])


def test_threads_share_a_large_product():
    weight, x, threads = torch.randn(518, 256), torch.randn(3, 256), torch.get_num_threads()
    assert weight.numel() >= _in_team.LARGE
    assert loops.FEWEST == _rows_by_weight.COLUMNS
    kernel = Recorded(lambda x: F.linear(x, weight), x)
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(kernel(x))
    finally:
        torch.set_num_threads(threads)
    for y in results:
        assert_product(y, x, weight)
