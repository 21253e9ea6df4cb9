"""Matrix products in which a row has the same bits in any company, on a CPU: alone, among others, on any threads.

A library chooses its code by the number of rows, and the order of a sum with it. So rows are multiplied in blocks of a
size that all calls have in common, filled up with zeros: a block gives each row the same bits, wherever it stands.
Which sizes agree depends on the library and the processor; it is tried, once for each size of the matrix. One to three
rows are multiplied by a kernel, where it gives the same bits.
"""

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import BackendError
from scanl.ops._frame.context import exactly, plain

SIZES = (4, 16, 64)  # rows of a block
MAX_SIZE = SIZES[-1]
STEP = 64  # elements; whole vectors of any processor and dtype
MIN_COLUMNS = 16  # columns of a matrix, at least
MAX_ROWS = 3  # rows that the kernel multiplies
PARTS = (192, 128, 256, 384)  # terms that libraries sum before they add them to others

_bmm, _mm = torch.bmm, torch.mm  # torch's own, also while they are replaced


class Plan(NamedTuple):
    """How to multiply by matrices of one size: the sizes of blocks that agree, and the parts of the kernel's sums."""

    sizes: tuple[int, ...]
    span: int | None  # None: the kernel does not give the same bits


@functools.cache
def _plan(dtype: torch.dtype, terms: int, columns: int, turned: bool, threads: int) -> Plan:
    """Return what gives equal bits for random rows. turned: the matrix is stored as (columns, terms).

    Rows are tried at other places of a block too. BackendError says that not even the largest blocks agree.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * MAX_SIZE, terms, generator=draw).to(dtype)
    stored = torch.randn((columns, terms) if turned else (terms, columns), generator=draw).to(dtype)
    w = _widened(stored.t() if turned else stored)

    def by_blocks(rows: Tensor, size: int) -> Tensor:
        blocks = rows.view(-1, size, terms)
        return _bmm(blocks, w.expand(len(blocks), -1, -1)).view(len(rows), -1)[:, :columns]

    def agrees(size: int) -> bool:
        alone = torch.equal(by_blocks(x[:size], size), y[:size])
        return alone and all(torch.equal(by_blocks(x.roll(n, 0), size), y.roll(n, 0)) for n in (0, 1, 2, 7))

    y = by_blocks(x, MAX_SIZE)
    sizes = tuple(size for size in SIZES if agrees(size))
    if MAX_SIZE not in sizes:
        raise BackendError(
            f"exact: a row by a matrix ({terms}, {columns}) of {dtype} depends on its place among others, expected "
            "equal bits; torch's library on this machine cannot multiply exactly"
        )
    span = None
    if dtype in (torch.float32, torch.float64) and _has_kernels():
        rows, expected = x[-MAX_ROWS:], y[-MAX_ROWS:]
        parts = [tensor for tensor in (terms, -(-terms // 2), *PARTS) if tensor <= terms]
        span = next(
            (tensor for tensor in parts if torch.equal(_few(rows, stored, turned, None, tensor), expected)), None
        )
    return Plan(sizes, span)


@functools.cache
def _has_kernels() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _few_rows() -> Any:
    return importlib.import_module("scanl.ops._cpu.few_rows")


def _few(x: Tensor, stored: Tensor, turned: bool, bias: Tensor | None, span: int) -> Tensor:
    """Return x w + bias by the kernel. stored: w (..., K, N), or with `turned` its transpose; contiguous."""
    if turned:
        return _few_rows().multiply(x, stored, bias, span)
    y = _few_rows().multiply_by_terms(x, stored, span)
    return y if bias is None else y.add_(bias)


def _widened(w: Tensor) -> Tensor:
    """Return the matrices (..., K, N) with at least NARROW columns: libraries have other code for fewer."""
    missing = MIN_COLUMNS - w.shape[-1]
    if missing <= 0:
        return w
    return F.pad(w, (0, missing)) if w.is_contiguous() else F.pad(w.mT, (0, 0, 0, missing)).mT


def _aligned(w: Tensor) -> tuple[Tensor, bool]:
    """Return the matrices (..., K, N) with adjacent rows or adjacent columns, and whether it is the columns."""
    if w.is_contiguous():
        return w, False
    turned = w.mT.is_contiguous()
    return (w, True) if turned else (w.contiguous(), False)


def _rows_by_matrix(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return x w + bias for x (M, K) and w (K, N)."""
    (rows, terms), columns = x.shape, w.shape[1]
    w, turned = _aligned(w)
    plan = _plan(x.dtype, terms, columns, turned, torch.get_num_threads())
    x = x.contiguous()
    if rows <= MAX_ROWS and plan.span is not None:
        return _few(x, w.t() if turned else w, turned, None if bias is None else bias.contiguous(), plan.span)
    full = rows - rows % MAX_SIZE
    size_of_last = next(size for size in plan.sizes if size >= rows - full)
    w = _widened(w)
    y = x.new_empty(full + (size_of_last if full < rows else 0), w.shape[1])
    if full:
        blocks = x[:full].view(-1, MAX_SIZE, terms)
        _bmm(blocks, w.expand(len(blocks), -1, -1), out=y[:full].view(-1, MAX_SIZE, w.shape[1]))
    if full < rows:
        last = F.pad(x[full:], (0, 0, 0, size_of_last - rows + full))
        _bmm(last[None], w[None], out=y[full:][None])
    y = y[:rows] if columns == w.shape[1] else y[:rows, :columns].contiguous()
    return y if bias is None else y.add_(bias)


def _matrices(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for a (n, M, K) and b (n, K, N)."""
    _, rows, terms = a.shape
    b, turned = _aligned(b)
    plan, a = _plan(a.dtype, terms, b.shape[2], turned, torch.get_num_threads()), a.contiguous()
    if rows <= MAX_ROWS and plan.span is not None:
        return _few(a, b.mT if turned else b, turned, None, plan.span)
    full, columns, b = rows - rows % MAX_SIZE, b.shape[2], _widened(b)
    parts = [_bmm(a[:, at : at + MAX_SIZE], b) for at in range(0, full, MAX_SIZE)]
    if full < rows:
        size_of_last = next(size for size in plan.sizes if size >= rows - full)
        last = a[:, full:] if size_of_last == rows - full else F.pad(a[:, full:], (0, 0, 0, size_of_last - rows + full))
        parts.append(_bmm(last, b)[:, : rows - full])
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return y[..., :columns].contiguous()


class _Linear(torch.autograd.Function):
    """Rows by a matrix; the gradients are torch's."""

    @staticmethod
    def forward(x, w, bias):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rows_by_matrix(x, w, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        needed = ctx.needs_input_grad
        dx = _mm(dy, w.mH) if needed[0] else None
        dw = _mm(x.mH, dy) if needed[1] else None
        return dx, dw, dy.sum(0) if needed[2] else None


class _Bmm(torch.autograd.Function):
    """Matrices by matrices; the gradients are torch's."""

    @staticmethod
    def forward(a, b):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _matrices(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        needed = ctx.needs_input_grad
        da = _bmm(dy, b.mH) if needed[0] else None
        db = _bmm(a.mH, dy) if needed[1] else None
        return da, db


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


def _apply(function: type[torch.autograd.Function], forward: Callable[..., Tensor], *operands: Any) -> Tensor:
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in operands):
        return function.apply(*operands)  # pyright: ignore[reportReturnType]
    return forward(*operands)


def _as_autocast(operands: Sequence[Tensor | None]) -> list[Any]:
    if not torch.is_autocast_enabled("cpu"):
        return list(operands)
    dtype = torch.get_autocast_dtype("cpu")
    return [tensor.to(dtype) if tensor is not None and tensor.dtype == torch.float32 else tensor for tensor in operands]


def _rows(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x w + bias for x (..., K) and w (K, N)."""
    y = _apply(_Linear, _rows_by_matrix, x.reshape(-1, x.shape[-1]), w, bias)
    return y.view(*x.shape[:-1], w.shape[1])


def _takes(*operands: Any) -> bool:
    """Return whether this call is to be exact: in a context, of ordinary tensors on a CPU, not traced."""
    if not (exactly() and plain(*operands)):
        return False
    return all(tensor.numel() for tensor in operands)


def linear(input, weight, bias=None):
    fits = _takes(input, weight) and weight.ndim == 2 and input.shape[-1:] == weight.shape[1:]
    if not (fits and (input.dtype == weight.dtype or torch.is_autocast_enabled("cpu"))):
        return _ORIGINAL["linear"](input, weight, bias)
    input, weight, bias = _as_autocast((input, weight, bias))
    columns, terms = weight.shape
    if input.numel() <= MAX_ROWS * terms and not torch.is_grad_enabled() and weight.is_contiguous():  # one token
        span = _plan(input.dtype, terms, columns, True, torch.get_num_threads()).span
        if span is not None:
            return _few(input.contiguous(), weight, True, None if bias is None else bias.contiguous(), span)
    return _rows(input, weight.t(), bias)


def matmul(input, other, *, out=None):
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
        return _apply(_Bmm, _matrices, a, b)
    a, b = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (a, b))
    return _apply(_Bmm, _matrices, a, b).reshape(*lead, a.shape[1], b.shape[2])


def mm(input, mat2, *, out=None):
    takes = out is None and _takes(input, mat2) and input.ndim == mat2.ndim == 2
    return matmul(input, mat2) if takes else _ORIGINAL["mm"](input, mat2, **({} if out is None else {"out": out}))


def bmm(input, mat2, *, out=None):
    takes = out is None and _takes(input, mat2) and input.ndim == mat2.ndim == 3 and len(input) == len(mat2)
    return matmul(input, mat2) if takes else _ORIGINAL["bmm"](input, mat2, **({} if out is None else {"out": out}))


def _sum(input: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    return product + input if beta == alpha == 1 else torch.add(beta * input, product, alpha=alpha)


def addmm(input, mat1, mat2, *, beta=1, alpha=1, out=None):
    if out is not None or not _takes(input, mat1, mat2):
        return _ORIGINAL["addmm"](input, mat1, mat2, beta=beta, alpha=alpha, out=out)
    return _sum(input, matmul(mat1, mat2), beta, alpha)


def baddbmm(input, batch1, batch2, *, beta=1, alpha=1, out=None):
    if out is not None or not _takes(input, batch1, batch2):
        return _ORIGINAL["baddbmm"](input, batch1, batch2, beta=beta, alpha=alpha, out=out)
    return _sum(input, matmul(batch1, batch2), beta, alpha)


def einsum(equation, *operands):
    """Two operands become matrices of: letters of both and the output, letters of one, and letters that are summed.

    The operand with the first letter of the output, its batch, has the rows.
    """
    pair = list(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else list(operands)
    letters_of = _letters(equation, *(tensor.ndim for tensor in pair)) if len(pair) == 2 and _takes(*pair) else None
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

    def arranged(tensor: Tensor, letters: str, *groups: list[str]) -> Tensor:
        tensor = tensor.permute([letters.index(letter) for group in groups for letter in group])
        shape = [functools.reduce(lambda n, letter: n * sizes[letter], group, 1) for group in groups]
        return tensor.reshape(shape)

    if both:
        y = matmul(arranged(a, first, both, outer, summed), arranged(b, second, both, summed, right))
    else:
        y = matmul(arranged(a, first, outer, summed), arranged(b, second, right, summed).t())
    now = [*both, *outer, *right]
    return y.view([sizes[letter] for letter in now]).permute([now.index(letter) for letter in result])


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
    if not heads or dropout_p or not query.dtype == key.dtype == value.dtype or not _has_kernels():
        more = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _ORIGINAL["scaled_dot_product_attention"](query, key, value, attn_mask, **more)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return _apply(_Attention, _attend, query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, shared: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=wide).masked_fill_(~mask, -torch.inf)
    if mask is not None:
        mask = mask.to(wide).expand(*mask.shape[:2], q.shape[2], k.shape[2])
    attend = importlib.import_module("scanl.ops._cpu.softmax_attention").attend
    return attend(*(tensor.to(wide) for tensor in (q, k, v)), mask, causal=causal, scale=scale).to(q.dtype)


# Each function of torch that is replaced while a context is open, with the owner and the names by which it is called.
REPLACED: dict[Callable[..., Any], Sequence[tuple[Any, str]]] = {
    linear: [(F, "linear")],
    matmul: [(torch, "matmul"), (Tensor, "matmul"), (Tensor, "__matmul__")],
    mm: [(torch, "mm"), (Tensor, "mm")],
    bmm: [(torch, "bmm"), (Tensor, "bmm")],
    addmm: [(torch, "addmm"), (Tensor, "addmm")],
    baddbmm: [(torch, "baddbmm"), (Tensor, "baddbmm")],
    einsum: [(torch, "einsum")],
    softmax: [(torch, "softmax"), (Tensor, "softmax")],  # F.softmax calls the latter
    grouped_mm: [(F, "grouped_mm")],
    scaled_dot_product_attention: [(F, "scaled_dot_product_attention")],
}
_ORIGINAL: dict[str, Any] = {new.__name__: getattr(*where[0]) for new, where in REPLACED.items()}
for _owner, _name in [
    *((owner, "sigmoid") for owner in (torch, Tensor)),
    *((F, name) for name in ("sigmoid", "silu", "gelu", "softplus", "logsigmoid", "elu", "selu", "celu", "mish")),
    *((owner, name) for owner in (torch, Tensor) for name in ("expm1", "log1p", "exp", "tanh", "log", "sin", "cos")),
    (F, "tanh"),
]:
    REPLACED[_by_element(getattr(_owner, _name))] = [(_owner, _name)]
