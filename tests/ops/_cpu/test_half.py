"""Half precision in kernels: every number is read, and float32 is rounded, as torch does it."""

import pytest
import torch

from scanl.ops import linear_scan
from scanl.ops.registry import HALF_DTYPES

every_half = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


@every_half
def test_every_number_is_read(dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[None, None]
    _, last = linear_scan(numbers, torch.zeros(1, dtype=dtype), backend="cpu")
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, numbers[:, 0].float(), rtol=0, atol=0, equal_nan=True)


@every_half
def test_float32_is_rounded_as_by_torch(dtype):
    """Halfway numbers and their neighbors, what overflows, subnormal numbers, infinities and NaN, of both signs."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    halfway = (halves[:-1] + halves[1:]) / 2
    near = torch.cat([halfway.view(torch.int32) + by for by in (-2, -1, 0, 1, 2)]).view(torch.float32)
    bits = torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int64).to(torch.int32)
    single = torch.cat([halves, near, bits.view(torch.float32)])[None]
    x, one = torch.zeros(1, 1, single.shape[1], dtype=dtype), torch.ones(1, dtype=dtype)
    y, _ = linear_scan(x, one, single, backend="cpu")
    torch.testing.assert_close(y[:, 0], single.to(dtype), rtol=0, atol=0, equal_nan=True)


@every_half
@pytest.mark.parametrize(("a_shape", "expected"), [((4,), 64), ((1,), 256)], ids=str)
def test_a_gradient_that_is_a_sum_is_rounded_once(dtype, a_shape, expected):
    """4,096 equal gradients of each channel: a sum in half precision would stop far below theirs."""
    x, a = torch.ones(1, 4096, 4, dtype=dtype), torch.zeros(a_shape, dtype=dtype, requires_grad=True)
    y, _ = linear_scan(x, a, torch.ones(1, 4), backend="cpu")
    (da,) = torch.autograd.grad(y, a, torch.full_like(y, 2.0**-6))
    torch.testing.assert_close(da, torch.full_like(a, expected), rtol=0, atol=0)
