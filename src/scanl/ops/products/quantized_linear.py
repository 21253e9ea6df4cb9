r"""A linear map whose weight is whole numbers of 8 or 4 bits.

.. math:: y_n = s_n \sum_k g_{n, \lfloor k / 32 \rfloor} \, q_{nk} \, x_k + b_n

With 8 bits g is 1 and s_n is the largest absolute value of row n over 127. With 4 bits each group of 32 terms has a
factor g of its own, a whole number too, so that the sum has whole numbers alone besides x.

Source: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", arXiv:2208.07339, section
2; Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv:2305.14314, section 3 (factors of groups that
are quantized too). Differs: x keeps 16 bits beside a weight of 8, and 13 beside one of 4; factors of groups are whole
numbers.
"""

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.fused import supported

GROUP = 32  # terms of a group; the number of terms is a multiple
MIN_ROWS = 4  # rows of a weight, at least
LOWER_BITS = 20  # bits of a float32 that its byte does not have
MIDDLE = 115 << 3  # the upper bits of 2^-12, whose byte is 0
LARGEST_SCALE = 15.0
PIECE = 1 << 22  # numbers of a weight that are quantized at a time
SHRUNK_SCALES = (
    1.0,
    0.95,
    0.9,
    0.85,
    0.8,
    0.75,
)  # steps that are tried for a group, in parts of the step that clips nothing
_KERNEL = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of x for which the kernel computes, in float32


class PackedWeight(NamedTuple):
    """A weight W (N, K) of whole numbers.

    packed: int8. With 8 bits (N, K). With 4 bits (N, K/2): a byte has the terms j and j + 16 of a group, each plus 8,
    the first in its lower half.   scale: s (N,), float32, or int8 as `bytes_of` has it, in a file.
    groups: g (N, K/32), int8, 1 to 127; None with 8 bits.
    """

    packed: Tensor
    scale: Tensor
    groups: Tensor | None


def pack(weight: Tensor, bits: int) -> PackedWeight:
    """Return the nearest whole numbers of 8 or 4 bits to a weight (N, K); K is a multiple of 32.

    >>> packed, scale, _ = pack(torch.tensor([[127.0, -64.0, 0.4] + 29 * [0.0]]), 8)
    >>> packed[0, :3].tolist(), scale.tolist()
    ([127, -64, 0], [1.0])
    """
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ShapeError(f"pack: weight has shape {tuple(weight.shape)}, expected (N, K) with K a multiple of {GROUP}")
    rows = max(1, PIECE // max(1, weight.shape[1]))
    pieces = [_piece(piece.detach().float(), bits) for piece in weight.split(rows)]
    packed, scale, groups = zip(*pieces, strict=True)
    return PackedWeight(torch.cat(packed), torch.cat(scale), None if bits == 8 else torch.cat(groups))


def _piece(weight: Tensor, bits: int) -> PackedWeight:
    if bits == 8:
        scale = weight.abs().amax(1) / 127
        return PackedWeight((weight / _divisor(scale)[:, None]).round().to(torch.int8), scale, None)
    terms = weight.unflatten(1, (-1, GROUP))
    step = terms.abs().amax(2) / 7
    scale = step.amax(1) / 127
    best = torch.full_like(step, torch.inf)
    groups, numbers = torch.ones_like(step), torch.zeros_like(terms)
    for shrunk in SHRUNK_SCALES:  # a smaller step clips the largest number, and is finer for the others
        tried = (shrunk * step / _divisor(scale)[:, None]).round().clamp(1, 127)
        width = tried * scale[:, None]
        rounded = (terms / _divisor(width)[..., None]).round().clamp(-8, 7)
        error = (rounded * width[..., None] - terms).square().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        groups = torch.where(better, tried, groups)
        numbers = torch.where(better[..., None], rounded, numbers)
    lower, upper = (numbers + 8).to(torch.uint8).chunk(2, 2)
    return PackedWeight((lower | upper << 4).flatten(1).view(torch.int8), scale, groups.to(torch.int8))


def bytes_of(scale: Tensor) -> Tensor:
    """Return bytes of the least numbers at or above those of a scale, at most LARGEST_SCALE: three bits of a fraction.

    >>> numbers_of(bytes_of(torch.tensor([1.0, 1.01, 0.0]))).tolist()
    [1.0, 1.125, 3.725290298461914e-09]
    """
    upper = (scale.view(torch.int32) + (1 << LOWER_BITS) - 1) >> LOWER_BITS
    return (upper - MIDDLE).clamp(-128, 127).to(torch.int8)


def numbers_of(bytes: Tensor) -> Tensor:
    """Return the numbers, whose upper bits the bytes are."""
    return ((bytes.int() + MIDDLE) << LOWER_BITS).view(torch.float32)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def unpacked(packed: Tensor, scale: Tensor, groups: Tensor | None) -> Tensor:
    """Return W (N, K), float32.

    >>> unpacked(*pack(torch.tensor([[14.0, -8.0] + 30 * [0.0]]), 4))[0, :2].round(decimals=4).tolist()
    [14.0, -8.0]
    """
    if groups is None:
        return packed * scale[:, None]
    pairs = packed.view(torch.uint8).unflatten(1, (-1, GROUP // 2))
    numbers = torch.cat([pairs & 15, pairs >> 4], 2).float() - 8
    return (numbers * (groups * scale[:, None])[..., None]).flatten(1)


def quantized_linear(
    x: Tensor, packed: Tensor, scale: Tensor, groups: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + bias for x (..., K), in x's dtype. packed, scale, groups: W, as `pack` returns it.   bias: (N,).

    On a CPU a kernel rounds each row of x to whole numbers, so a row has the same bits alone and among others, on any
    number of threads. Elsewhere W is computed, and multiplied by torch. There is no gradient: ConfigError refuses x
    that needs one.

    >>> packed, scale, groups = pack(torch.eye(32), 8)
    >>> quantized_linear(torch.arange(32.0), packed, scale, groups)[-2:].tolist()
    [30.0, 31.0]
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise ConfigError(
            "quantized_linear: x needs a gradient, expected none because weights of whole numbers are not trained; "
            "train the float model, then quantize it; to run it, use torch.no_grad()"
        )
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    run = _operator if traced and not torch.compiler.is_exporting() else _multiply
    *lead, terms = x.shape  # this runs for every map and token
    if len(lead) == 1:
        return run(x, packed, scale, groups, bias)
    return run(x.reshape(-1, terms), packed, scale, groups, bias).view(*lead, packed.shape[0])


def _multiply(x: Tensor, packed: Tensor, scale: Tensor, groups: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias for x (M, K)."""
    if scale.dtype == torch.int8:
        scale = numbers_of(scale)
    if groups is None and packed.shape[1] % GROUP:  # of a file, which has no zeros behind a row
        x, packed = (F.pad(rows, (0, -packed.shape[1] % GROUP)) for rows in (x, packed))
    rows = contiguous(x.float())
    fits = x.dtype in _KERNEL and packed.shape[0] >= MIN_ROWS and x.numel() > 0
    if not (fits and supported(rows)):
        y = F.linear(x, unpacked(packed, scale, groups).to(x.dtype))
        return y if bias is None else y + bias
    added = None if bias is None else contiguous(bias.float())
    return _kernels().multiply(rows, packed, scale.float(), groups, added).to(x.dtype)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("scanl.ops.products.rows_by_weight")


_operator = torch.library.custom_op(
    "scanl::quantized_linear",
    _multiply,
    mutates_args=(),
    schema="(Tensor x, Tensor packed, Tensor scale, Tensor? groups, Tensor? bias) -> Tensor",
)
_operator.register_fake(lambda x, packed, scale, groups, bias: x.new_empty(x.shape[0], packed.shape[0]))
