"""Matrix products in which a row has the same bits in any company, on a CPU: alone, among others, on any threads.

A library chooses its code by the number of rows, and the order of a sum with it. So rows are multiplied in blocks of a
size that all calls have in common, filled up with zeros: a block gives each row the same bits, wherever it stands.
Which sizes agree depends on the library and the processor; it is tried, once for each size of the matrix. One to three
rows are multiplied by a kernel, where it gives the same bits. Where no sizes agree, the kernel multiplies all rows.
"""

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import BackendError

SIZES = (4, 16, 64)  # rows of a block
MAX_SIZE = SIZES[-1]
MIN_COLUMNS = 16  # columns of a matrix, at least
MAX_ROWS = 3  # rows that the kernel multiplies
PARTS = (192, 128, 256, 384)  # terms that libraries sum before they add them to others

_bmm = torch.bmm  # torch's own, also while it is replaced


class ProductOrder(NamedTuple):
    """The order of sums by matrices of one size: the sizes of blocks that agree, and the parts of the kernel's sums."""

    sizes: tuple[int, ...]  # none: the kernel multiplies all rows
    part: int | None  # None: the kernel does not give the same bits


@functools.cache
def product_order(dtype: torch.dtype, terms: int, columns: int, transposed: bool, threads: int) -> ProductOrder:
    """Return what gives equal bits for random rows. transposed: the matrix is stored as (columns, terms).

    Rows are tried at other places of a block too. BackendError says that not even the largest blocks agree, and that
    there is no kernel.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * MAX_SIZE, terms, generator=draw).to(dtype)
    stored = torch.randn((columns, terms) if transposed else (terms, columns), generator=draw).to(dtype)
    w = _widened(stored.t() if transposed else stored)

    def by_blocks(rows: Tensor, size: int) -> Tensor:
        blocks = rows.view(-1, size, terms)
        return _bmm(blocks, w.expand(len(blocks), -1, -1)).view(len(rows), -1)[:, :columns]

    def agrees(size: int) -> bool:
        alone = torch.equal(by_blocks(x[:size], size), y[:size])
        return alone and all(torch.equal(by_blocks(x.roll(n, 0), size), y.roll(n, 0)) for n in (0, 1, 2, 7))

    y = by_blocks(x, MAX_SIZE)
    sizes = tuple(size for size in SIZES if agrees(size))
    parts = []
    if dtype in (torch.float32, torch.float64) and has_kernels():
        parts = [part for part in (terms, -(-terms // 2), *PARTS) if part <= terms]
    if MAX_SIZE not in sizes:
        if parts:
            return ProductOrder((), terms)
        raise BackendError(
            f"exact: a row by a matrix ({terms}, {columns}) of {dtype} depends on its place among others, expected "
            "equal bits; torch's library on this machine cannot multiply exactly"
        )
    rows, expected = x[-MAX_ROWS:], y[-MAX_ROWS:]
    agree = (part for part in parts if torch.equal(_few_rows()(rows, stored, transposed, None, part), expected))
    return ProductOrder(sizes, next(agree, None))


@functools.cache
def has_kernels() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _few_rows() -> Any:
    return importlib.import_module("scanl.ops.products.few_rows").multiply


def _widened(w: Tensor) -> Tensor:
    """Return the matrices (..., K, N) with at least MIN_COLUMNS columns: libraries have other code for fewer."""
    missing = MIN_COLUMNS - w.shape[-1]
    if missing <= 0:
        return w
    return F.pad(w, (0, missing)) if w.is_contiguous() else F.pad(w.mT, (0, 0, 0, missing)).mT


def rows_by_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return x Wᵀ + bias by the kernel for one token's x (..., K) and a contiguous W (N, K); None if it is not able."""
    columns, terms = weight.shape
    part = product_order(x.dtype, terms, columns, True, torch.get_num_threads()).part
    bias = None if bias is None else bias.contiguous()
    return None if part is None else _few_rows()(x.contiguous(), weight, True, bias, part)


def rows_by_matrix(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x w + bias for x (M, K) and w (K, N), or for x (n, M, K) and w (n, K, N)."""
    rows, terms, columns = *x.shape[-2:], w.shape[-1]
    transposed = not w.is_contiguous() and w.mT.is_contiguous()
    x, w = x.contiguous(), w if transposed else w.contiguous()
    order = product_order(x.dtype, terms, columns, transposed, torch.get_num_threads())
    if (rows <= MAX_ROWS or not order.sizes) and order.part is not None:
        bias = None if bias is None else bias.contiguous()
        return _few_rows()(x, w.mT if transposed else w, transposed, bias, order.part)
    w, full = _widened(w), rows - rows % MAX_SIZE
    size = next(size for size in order.sizes if size >= rows - full) if full < rows else 0
    last = F.pad(x[..., full:, :], (0, 0, 0, size - rows + full)) if size else x[..., :0, :]
    if x.ndim == 2:
        whole = x.new_empty(full + size, w.shape[1])
        if full:
            blocks = x[:full].view(-1, MAX_SIZE, terms)
            _bmm(blocks, w.expand(len(blocks), -1, -1), out=whole[:full].view(-1, MAX_SIZE, w.shape[1]))
        if size:
            _bmm(last[None], w[None], out=whole[full:][None])
    else:
        parts = [_bmm(x[:, at : at + MAX_SIZE], w) for at in range(0, full, MAX_SIZE)]
        parts += [_bmm(last, w)] if size else []
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    whole = whole[..., :rows, :columns].contiguous()
    return whole if bias is None else whole.add_(bias)
