"""Helpers for the ops with a matrix state: the default scale, log decays per step, kernel registration."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from scanl.ops._frame.compiled import compiled
from scanl.ops._frame.constant import constant
from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES
from scanl.ops._frame.nonfinite import faulty, since
from scanl.ops._frame.op import Op


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the scale; the default is 1/sqrt(K)."""
    return 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale


def row_decays(g: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand g to (B, T, H, K or 1). q has all H heads here."""
    if g is None:
        return None
    return g.view(*g.shape, *(1,) * (4 - g.ndim if g.ndim > 1 else 1)).expand(*q.shape[:3], -1)


def add_kernels(op: Op, without: Sequence[str] = ()) -> None:
    """Register the numba and the Triton kernels of an op.

    without: operands that the Triton kernels do not take. The numba kernels keep columns of the state, of K numbers
    each, in the first-level cache. The Triton kernels keep whole rows and columns, so they limit both K and V.
    """

    def over_a_column(*, K: int, **_: object) -> list[str]:
        return [f"K={K} is over 512"] if K > 512 else []

    def over_a_tile(*, K: int, V: int, given: Collection[str], **_: object) -> list[str]:
        wide = [f"{axis}={size} is over 256" for axis, size in (("K", K), ("V", V)) if size > 256]
        return [*wide, *(f"{name} is given" for name in without if name in given)]

    compiled(op, "cpu", devices=("cpu",), package="numba", dtypes=FLOATING, needs=over_a_column)
    compiled(
        op,
        "triton",
        devices=("cuda",),
        package="triton",
        dtypes=HALF_DTYPES + FLOATING,
        half_products=True,
        needs=over_a_tile,
        faults=_of_half_products,
    )


@constant
def _of_half_products(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why the Triton kernels cannot be trusted with this dtype on this device."""
    if dtype not in HALF_DTYPES:
        return []
    from scanl.ops._triton._assembler import faults

    return faults(device)


def spoilt(keys: list[Tensor], decays: Tensor | None, values: list[Tensor], decays_of_values: Tensor | None) -> Tensor:
    """Return (B, T, H, V): 1, or NaN from the first step whose inputs are not finite.

    keys, decays: (B, T, G or H, K); a fault in them affects every column of the state.
    values, decays_of_values: (B, T, H, V); a fault in them affects its own column only, since columns are independent.
    """
    fault = torch.stack([faulty(value) for value in values]).any(0)
    if decays_of_values is not None:
        fault = fault | faulty(decays_of_values, decay=True)
    faults = [faulty(key) for key in keys] + ([] if decays is None else [faulty(decays, decay=True)])
    for of_keys in faults:
        heads = fault.shape[2] // of_keys.shape[2]
        fault = fault | of_keys.any(-1, keepdim=True).repeat_interleave(heads, 2)
    return since(fault, 1)
