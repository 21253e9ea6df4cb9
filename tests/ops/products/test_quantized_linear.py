"""Products by whole numbers: against products by the weight that they stand for, and the same bits in any company."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.ops import backend
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops.products import rows_by_weight as kernels
from scanl.ops.products.quantized_linear import PackedWeight, pack, quantized_linear, unpacked

MOST = {8: kernels.MAX_INPUT, 4: kernels.MAX_INPUT_BY_GROUPS}
EPS = torch.finfo(torch.float32).eps


def draw(columns: int, terms: int, bits: int) -> tuple[PackedWeight, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, terms, generator=generator) * torch.rand(columns, 1, generator=generator)
    return pack(weight, bits), torch.randn(columns, generator=generator)


def rounding(x: Tensor, weight: Tensor, bits: int) -> Tensor:
    """What the rounding of x, to whole numbers, can change of each result."""
    step = x.abs().amax(-1, keepdim=True) / MOST[bits]
    return step / 2 * weight.abs().sum(1) + 8 * EPS * (x.abs() @ weight.abs().T + 1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns", "terms"), [(1, 4, 32), (3, 131, 576), (4, 6, 1056), (21, 77, 96)])
def test_the_kernel_is_the_plain_form(rows: int, columns: int, terms: int, bits: int) -> None:
    weight, bias = draw(columns, terms, bits)
    x = 3 * torch.randn(rows, terms)
    for added in (bias, None):
        y = quantized_linear(x[None], *weight, added)[0]
        with backend("reference"):
            plain = quantized_linear(x, *weight, added)
        torch.testing.assert_close(plain, F.linear(x, unpacked(*weight), added))
        assert ((y - plain).abs() <= rounding(x, unpacked(*weight), bits)).all()
        assert not torch.equal(y, plain)  # else the kernel has not run


def test_largest_numbers_do_not_overflow() -> None:
    for bits, largest in ((8, 127.0), (4, 7.0)):
        weight = pack(largest * torch.ones(4, 8192), bits)
        y = quantized_linear(torch.ones(4, 8192), *weight)
        torch.testing.assert_close(y, torch.full((4, 4), 8192 * largest))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_the_same_bits_in_any_company(bits: int) -> None:
    weight, bias = draw(390, 608, bits)
    x = torch.randn(37, 608)
    torch.set_num_threads(1)
    y = quantized_linear(x, *weight, bias)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for first, rows in ((0, 1), (3, 2), (30, 7), (5, 20)):
            assert torch.equal(quantized_linear(x[first : first + rows], *weight, bias), y[first : first + rows])


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.long), 4])  # a kernel takes seconds to compile
def test_a_recorded_function_has_the_same_bits(bits: int) -> None:
    weight, bias = draw(320, 512, bits)
    large, _ = draw(512, 320, bits)

    def function(x: Tensor) -> Tensor:
        return quantized_linear(quantized_linear(x, *weight, bias), *large)

    x = torch.randn(5, 512)
    kernel = RecordedFunction(function, x[:1], by_rows=True)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 5):
            assert torch.equal(kernel(x[:rows]), function(x[:rows]))


@pytest.mark.long
def test_rows_of_strided_numbers_are_copied() -> None:
    weight, _ = draw(8, 64, 8)
    x = torch.randn(5, 64)
    strided = RecordedFunction(lambda x: quantized_linear(x.T, *weight), x.T.contiguous())
    assert torch.equal(strided(x.T.contiguous()), quantized_linear(x, *weight))


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    weight, _ = draw(8, 64, 8)
    x = torch.randn(5, 64)
    for value in (torch.nan, torch.inf, -torch.inf):
        odd = x.clone()
        odd[2, 7] = value
        y = quantized_linear(odd, *weight)
        assert not y[2].isfinite().any()
        assert torch.equal(y[[0, 1, 3, 4]], quantized_linear(x, *weight)[[0, 1, 3, 4]])
    assert not quantized_linear(torch.zeros(1, 64), *weight).any()
    assert quantized_linear(torch.full((1, 64), 1e-44), *weight).abs().max() <= 1e-41


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7)])
def test_weights_are_the_nearest_whole_numbers(bits: int, steps: int) -> None:
    weight = torch.randn(9, 96)
    weight[3] = 0
    error = (unpacked(*pack(weight, bits)) - weight).abs()
    group = weight.abs().unflatten(1, (-1, 96 if bits == 8 else 32)).amax(2)
    largest = group.repeat_interleave(96 // group.shape[1], 1)
    assert (error <= largest * (0.5 / steps if bits == 8 else 0.3)).all()
    mean = error.square().mean().sqrt() / weight.square().mean().sqrt()
    assert mean <= (0.01 if bits == 8 else 0.12)
    assert pack(weight, bits).packed.numel() == weight.numel() * bits // 8


def test_dtypes_and_edges() -> None:
    weight, bias = draw(12, 64, 8)
    x = torch.randn(3, 2, 64)
    y = quantized_linear(x, *weight, bias)
    for dtype in (torch.bfloat16, torch.float64):
        other = quantized_linear(x.to(dtype), *weight, bias.to(dtype))
        assert other.dtype == dtype
        torch.testing.assert_close(other.float(), y, rtol=0.02, atol=0.02 if dtype == torch.bfloat16 else 1e-3)
    assert quantized_linear(x[:0], *weight).shape == (0, 2, 12)
    few = PackedWeight(weight.packed[:2], weight.scale[:2], None)  # fewer columns than a tile
    torch.testing.assert_close(quantized_linear(x, *few), y[..., :2] - bias[:2], rtol=1e-3, atol=1e-3)


def test_torch_compiles_and_exports_it() -> None:
    weight, bias = draw(12, 64, 8)
    x = torch.randn(3, 64)
    operator = torch.ops.scanl.quantized_linear.default
    torch.library.opcheck(operator, (x, *weight, bias), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda x: quantized_linear(x, *weight, bias), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), quantized_linear(x, *weight, bias))

    class Map(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return quantized_linear(x, *weight, bias)

    exported = torch.export.export(Map(), (x,))
    torch.testing.assert_close(exported.module()(x), quantized_linear(x, *weight, bias), rtol=1e-3, atol=1e-3)
    assert "quantized_linear" not in str(exported.graph)


def test_bad_input_is_refused() -> None:
    weight, _ = draw(12, 64, 8)
    with pytest.raises(ConfigError, match="x needs a gradient, expected none because weights of whole numbers are not"):
        quantized_linear(torch.randn(1, 64, requires_grad=True), *weight)
    with pytest.raises(ShapeError, match=r"weight has shape \(3, 33\), expected \(N, K\) with K a multiple of 32"):
        pack(torch.randn(3, 33), 8)
