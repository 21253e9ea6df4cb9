"""Products of matrices inside a kernel: tiles, and what is left of them."""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

import pytest
import torch
from numba import njit

from scanl.ops.products import matrices


@njit
def _multiply(out, h, w, count):
    n, width = h.size // count, out.size // count
    matrices.add_part_products(out, 0, width, width, h, 0, n, n, w, 0, False, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("count", "n", "width"), [(1, 1, 1), (3, 7, 16), (5, 33, 40), (8, 65, 19), (2, 0, 8), (6, 40, 50), (1, 3, 150)]
)
def test_product_of_rows(count, n, width, dtype):
    out, h, w = (torch.randn(shape, dtype=dtype) for shape in ((count, width), (count, n), (n, width)))
    expected = out.double() + h.double() @ w.double()
    _multiply(out.view(-1).numpy(), h.view(-1).numpy(), w.view(-1).numpy(), count)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=20 * torch.finfo(dtype).eps * (1 + n**0.5))
