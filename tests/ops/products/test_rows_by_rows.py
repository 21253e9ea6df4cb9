"""aᵀ b of matrices with many rows is the product, for sizes past each block, and for parts of wider matrices."""

import pytest
import torch

from scanl.ops.products import rows_by_rows


@pytest.mark.parametrize(("steps", "rows", "columns"), [(1, 1, 1), (129, 7, 17), (300, 261, 100), (256, 24, 64)])
def test_it_is_the_product(steps, rows, columns):
    wide = torch.randn(steps, rows + columns + 3)
    a, b = wide[:, 1 : rows + 1], wide[:, rows + 2 : rows + 2 + columns]
    total = torch.randn(rows, columns)
    expected = total.double() + a.double().T @ b.double()
    bound = (steps + 1) * torch.finfo(torch.float32).eps * (a.abs().T @ b.abs() + total.abs())
    assert ((rows_by_rows.product(a, b) - (expected - total.double())).abs() <= bound).all()
    rows_by_rows.add_product(total, a, b)
    assert ((total - expected).abs() <= bound).all()
