"""Functions of torch as an `exact` context replaces them, on a CPU: a row has the same bits in any company.

A layer has those that multiply matrices replaced as well, for large products.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._frame.context import context, exactly, plain
from scanl.ops._frame.replacing import Replacement
from scanl.ops.products import by_onednn
from scanl.ops.products.blocks import MAX_ROWS, has_kernels, rows_by_matrix, rows_by_weight

MIN_ROWS = 16  # from which a product may be large
VECTOR = 16  # rows or columns of which matrices of the kernel have a multiple
STEP = 64  # elements; whole vectors of any processor and dtype


class _Product(torch.autograd.Function):
    """Rows by a matrix, or matrices by matrices; the gradients are torch's."""

    @staticmethod
    def forward(x, w, bias=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return rows_by_matrix(x, w, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        needed, times = ctx.needs_input_grad, _ORIGINAL["matmul"]
        dx = times(dy, w.mH) if needed[0] else None
        dw = times(x.mH, dy) if needed[1] else None
        return dx, dw, dy.sum(0) if needed[2] else None


class _Attention(torch.autograd.Function):
    """Softmax attention; the gradients are torch's."""

    @staticmethod
    def forward(*operands):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _attend(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[4:]

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        causal, scale, shared = ctx.options
        operands: list[Any] = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
        needed = [i for i in range(4) if ctx.needs_input_grad[i]]
        with torch.enable_grad():
            for i in needed:
                operands[i].requires_grad_()
            original = _ORIGINAL["scaled_dot_product_attention"]
            y = original(*operands, is_causal=causal, scale=scale, enable_gqa=shared)
        gradients = dict(zip(needed, torch.autograd.grad(y, [operands[i] for i in needed], dy), strict=True))
        return *(gradients.get(i) for i in range(4)), None, None, None


def _apply(function: type[torch.autograd.Function], *operands: Any) -> Tensor:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in operands):
        return function.apply(*operands)  # pyright: ignore[reportReturnType]
    return function.forward(*operands)


def _as_autocast(operands: Sequence[Tensor | None]) -> list[Any]:
    if not torch.is_autocast_enabled("cpu"):
        return list(operands)
    dtype = torch.get_autocast_dtype("cpu")
    return [tensor.to(dtype) if tensor is not None and tensor.dtype == torch.float32 else tensor for tensor in operands]


def _rows(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x w + bias for x (..., K) and w (K, N)."""
    y = _apply(_Product, x.reshape(-1, x.shape[-1]), w, bias)
    return y.view(*x.shape[:-1], w.shape[1])


def _takes(*operands: Any) -> bool:
    """Return whether this call is to be exact: in a context, of ordinary tensors on a CPU, not traced."""
    if not (exactly() and plain(*operands)):
        return False
    return all(tensor.numel() for tensor in operands)


class _LargeProducts:
    def __enter__(self) -> None:
        context.large_products += 1
        for replacement in _MULTIPLYING:
            replacement.open()

    def __exit__(self, *error: object) -> None:
        for replacement in _MULTIPLYING:
            replacement.close()
        context.large_products -= 1


def large_products(rows: int) -> AbstractContextManager[None]:
    """A context in which torch's products of matrices are computed by the fastest program there is, unless in `exact`.

    rows: about as many as will be multiplied. The context does nothing for few, nor for what is traced.
    """
    return nullcontext() if torch.compiler.is_compiling() or rows < MIN_ROWS else _LargeProducts()


def _is_large(work: int, *operands: Any) -> bool:
    """Return whether a product of so many pairs of numbers may take another program than torch's."""
    enough = context.large_products and work >= by_onednn.MIN_WORK and not exactly()
    return bool(enough) and plain(*(tensor for tensor in operands if tensor is not None))


def _large_product(a: Tensor, b: Tensor) -> Tensor | None:
    """Return a b by the faster program; None if there is none."""
    if b.ndim == 2 and a.ndim > 1:
        return by_onednn.linear(a, b.t(), None) if by_onednn.is_able(a, b.t(), None) else None
    whole = a.shape[-2] % VECTOR == 0 or b.shape[-1] % VECTOR == 0
    if not (a.ndim == b.ndim > 2 and a.shape[-1] == b.shape[-2] and whole and has_kernels()):
        return None
    if a.dtype != b.dtype or a.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return None
    return importlib.import_module("scanl.ops.products.batched").product(a, b)


def linear(input, weight, bias=None):
    large = _is_large(input.numel() * weight.shape[0], input, weight, bias)
    if large and by_onednn.is_able(input, weight, bias):
        return by_onednn.linear(input, weight, bias)
    fits = _takes(input, weight) and weight.ndim == 2 and input.shape[-1:] == weight.shape[1:]
    if not (fits and (input.dtype == weight.dtype or torch.is_autocast_enabled("cpu"))):
        return _ORIGINAL["linear"](input, weight, bias)
    input, weight, bias = _as_autocast((input, weight, bias))
    few = input.numel() <= MAX_ROWS * weight.shape[1]
    if few and not torch.is_grad_enabled() and weight.is_contiguous():  # one token
        y = rows_by_weight(input, weight, bias)
        if y is not None:
            return y
    return _rows(input, weight.t(), bias)


def matmul(input, other, *, out=None):
    if out is None and isinstance(other, Tensor) and other.ndim > 1:
        large = _is_large(input.numel() * other.shape[-1], input, other)
        if large and (y := _large_product(input, other)) is not None:
            return y
    if out is not None or not _takes(input, other):
        return _ORIGINAL["matmul"](input, other, out=out)
    a, b = _as_autocast((input, other))
    if a.dtype != b.dtype or min(a.ndim, b.ndim) == 0 or a.shape[-1] != b.shape[max(0, b.ndim - 2)]:
        return _ORIGINAL["matmul"](input, other)
    if b.ndim == 1:
        return matmul(a, b[:, None])[..., 0]
    if a.ndim == 1:
        return matmul(a[None], b)[..., 0, :]
    if b.ndim == 2:
        return _rows(a, b)
    lead = a.shape[:-2]
    if lead != b.shape[:-2]:
        lead = torch.broadcast_shapes(lead, b.shape[:-2])
        a, b = (tensor.expand(*lead, *tensor.shape[-2:]) for tensor in (a, b))
    if len(lead) == 1:
        return _apply(_Product, a, b, None)
    a, b = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (a, b))
    return _apply(_Product, a, b, None).reshape(*lead, a.shape[1], b.shape[2])


def _matrices(name: str, axes: int) -> Callable[..., Tensor]:
    """Return `torch.mm` or `torch.bmm`."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def product(input, mat2, *, out=None):
        takes = out is None and input.ndim == mat2.ndim == axes
        takes = takes and (_takes(input, mat2) or _is_large(input.numel() * mat2.shape[-1], input, mat2))
        if takes and input.shape[:-2] == mat2.shape[:-2]:
            return matmul(input, mat2)
        return original(input, mat2, **({} if out is None else {"out": out}))

    return product


def _matrices_added(name: str) -> Callable[..., Tensor]:
    """Return `torch.addmm` or `torch.baddbmm`."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def product(input, mat1, mat2, *, beta=1, alpha=1, out=None):
        if out is not None or not _takes(input, mat1, mat2):
            return original(input, mat1, mat2, beta=beta, alpha=alpha, out=out)
        y = matmul(mat1, mat2)
        return y + input if beta == alpha == 1 else torch.add(beta * input, y, alpha=alpha)

    return product


def einsum(equation, *operands):
    """Two operands become matrices of: letters of both and the output, letters of one, and letters that are summed.

    The operand with the first letter of the output, its batch, has the rows.
    """
    pair = list(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else list(operands)
    takes = len(pair) == 2 and (_takes(*pair) or _is_large(max(tensor.numel() for tensor in pair) ** 2, *pair))
    letters_of = _letters(equation, *(tensor.ndim for tensor in pair)) if takes else None
    if letters_of is None or pair[0].dtype != pair[1].dtype:
        return _ORIGINAL["einsum"](equation, *operands)
    first, second, result = letters_of
    a, b = pair
    if result and result[0] not in first:
        first, second, a, b = second, first, b, a
    sizes = dict(zip(first + second, (*a.shape, *b.shape), strict=True))
    for letters, tensor in ((first, a), (second, b)):
        if any(sizes[letter] != size for letter, size in zip(letters, tensor.shape, strict=True)):
            return _ORIGINAL["einsum"](equation, *operands)
    both = [letter for letter in result if letter in first and letter in second]
    outer, right = ([c for c in result if c in letters and c not in both] for letters in (first, second))
    summed = [letter for letter in first if letter not in result]

    if not exactly() and math.prod(sizes.values()) < by_onednn.MIN_WORK:
        return _ORIGINAL["einsum"](equation, *operands)

    def arranged(tensor: Tensor, letters: str, *groups: list[str]) -> Tensor:
        tensor = tensor.permute([letters.index(letter) for group in groups for letter in group])
        shape = [math.prod(sizes[letter] for letter in group) for group in groups]
        return tensor.reshape(shape)

    if both:
        each = [[letter] for letter in both]
        y = matmul(arranged(a, first, *each, outer, summed), arranged(b, second, *each, summed, right))
    else:
        y = matmul(arranged(a, first, outer, summed), arranged(b, second, right, summed).t())
    now = [*both, *outer, *right]
    return y.reshape([sizes[letter] for letter in now]).permute([now.index(letter) for letter in result])


@functools.cache
def _letters(equation: str, first_axes: int, second_axes: int) -> tuple[str, str, str] | None:
    """Return the letters of both operands and of the result; None for an equation that is no product of matrices."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    spare = "".join(chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in equation)
    counts = (first, first_axes), (second, second_axes)
    wide = [max(0, axes - len(tensor) + 3) if "..." in tensor else 0 for tensor, axes in counts]
    leading = spare[: max(wide) if "..." in operands else 0]

    def spelled(letters: str, count: int) -> str:
        return letters.replace("...", leading[len(leading) - count :])

    first, second, result = spelled(first, wide[0]), spelled(second, wide[1]), spelled(result, len(leading))
    distinct = all(len(set(tensor)) == len(tensor) for tensor in (first, second, result))
    shared = {letter for letter in first + second if letter not in result}
    if not (arrow and comma and distinct and set(result) <= set(first + second)):
        return None
    if len(first) != first_axes or len(second) != second_axes or not shared <= set(first) & set(second):
        return None
    return first, second, result


def _by_element(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of each element in which all elements run the same code.

    torch computes whole vectors by its own code, and what remains at the end of a row or of a thread's share by the C
    library's. Here nothing remains: the elements are one row, filled up with zeros.
    """

    @functools.wraps(function)
    def call(input, *args, **options):
        if not _takes(input):
            return function(input, *args, **options)
        full = STEP * torch.get_num_threads()
        count = input.numel()
        if count % full == 0 and (input.is_contiguous() or (input.shape[-1] % STEP == 0 and input.stride(-1) == 1)):
            return function(input, *args, **options)
        row = F.pad(input.reshape(-1), (0, -count % full))
        return function(row, *args, **options)[:count].view(input.shape)

    return call


def softmax(input, dim, dtype=None):
    """Add the terms one after another. A hidden one is 0, so how many are hidden, and where, has no effect.

    torch adds them by vectors: the order depends on how many there are, and on what stands beside them in memory.
    """
    if dtype is not None or not _takes(input):
        return _ORIGINAL["softmax"](input, dim, dtype)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    powers = (wide - wide.detach().amax(dim, keepdim=True)).exp()
    return (powers / powers.cumsum(dim).narrow(dim, -1, 1)).to(input.dtype)


def grouped_mm(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None):
    """Multiply each group of rows by its matrix, as the experts of a mixture do."""
    takes = bias is None and out_dtype is None and _takes(mat_a, mat_b)
    if offs is None or not (takes and mat_a.ndim == 2 and mat_b.ndim == 3):
        return _ORIGINAL["grouped_mm"](mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    bounds = itertools.pairwise([0, *offs.tolist()])
    y = torch.cat([matmul(mat_a[i:j], matrix) for (i, j), matrix in zip(bounds, mat_b, strict=True)])
    return F.pad(y, (0, 0, 0, len(mat_a) - len(y)))


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    masks = [] if attn_mask is None else [attn_mask]
    fits = _takes(query, key, value) and all(tensor.ndim == 4 for tensor in (query, key, value, *masks))
    heads = fits and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0))
    if not heads or dropout_p or not query.dtype == key.dtype == value.dtype or not has_kernels():
        more = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _ORIGINAL["scaled_dot_product_attention"](query, key, value, attn_mask, **more)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return _apply(_Attention, query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, shared: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=wide).masked_fill_(~mask, -torch.inf)
    if mask is not None:
        mask = mask.to(wide).expand(*mask.shape[:2], q.shape[2], k.shape[2])
    attend = importlib.import_module("scanl.ops._cpu.softmax_attention").attend
    return attend(*(tensor.to(wide) for tensor in (q, k, v)), mask, causal=causal, scale=scale).to(q.dtype)


# Each function of torch that is replaced while a context is open, with the owner and the names by which it is called.
_PLACES: dict[Callable[..., Any], Sequence[tuple[Any, str]]] = {
    linear: [(F, "linear")],
    matmul: [(torch, "matmul"), (Tensor, "matmul"), (Tensor, "__matmul__")],
    _matrices("mm", 2): [(torch, "mm"), (Tensor, "mm")],
    _matrices("bmm", 3): [(torch, "bmm"), (Tensor, "bmm")],
    _matrices_added("addmm"): [(torch, "addmm"), (Tensor, "addmm")],
    _matrices_added("baddbmm"): [(torch, "baddbmm"), (Tensor, "baddbmm")],
    einsum: [(torch, "einsum")],
    softmax: [(torch, "softmax"), (Tensor, "softmax")],  # F.softmax calls the latter
    grouped_mm: [(F, "grouped_mm")],
    scaled_dot_product_attention: [(F, "scaled_dot_product_attention")],
}
_ORIGINAL: dict[str, Any] = {new.__name__: getattr(*where[0]) for new, where in _PLACES.items()}
for _owner, _name in [
    *((owner, "sigmoid") for owner in (torch, Tensor)),
    *((F, name) for name in ("sigmoid", "silu", "gelu", "softplus", "logsigmoid", "elu", "selu", "celu", "mish")),
    *((owner, name) for owner in (torch, Tensor) for name in ("expm1", "log1p", "exp", "tanh", "log", "sin", "cos")),
    (F, "tanh"),
]:
    _PLACES[_by_element(getattr(_owner, _name))] = [(_owner, _name)]
REPLACED_FUNCTIONS = [Replacement(owner, name, new) for new, places in _PLACES.items() for owner, name in places]
_MULTIPLYING = [each for each in REPLACED_FUNCTIONS if each.name in ("linear", "matmul", "__matmul__", "bmm", "einsum")]
