"""What the ops with a matrix state have in common: the default scale, log decays for every step, their kernels."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from scanl.ops._frame.compiled import compiled
from scanl.ops._frame.declaration import FLOATING, HALF
from scanl.ops._frame.nonfinite import faulty, since
from scanl.ops._frame.op import Op


def scale_of(q: Tensor, scale: float | None) -> float:
    """1/sqrt(K) where none is given."""
    return 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale


def row_decays(g: Tensor | None, q: Tensor) -> Tensor | None:
    """g as (B, T, H, K or 1), for q that has every head."""
    if g is None:
        return None
    return g.view(*g.shape, *(1,) * (4 - g.ndim if g.ndim > 1 else 1)).expand(*q.shape[:3], -1)


def add_kernels(op: Op, without: Sequence[str] = ()) -> None:
    """Register the numba and the Triton kernels of an op.

    without: operands that the Triton kernels do not take. numba's hold a column of the state in the first-level cache,
    and Triton's hold a whole row and column of it.
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
        dtypes=HALF + FLOATING,
        half_products=True,
        needs=over_a_tile,
    )


def spoilt(keys: list[Tensor], decays: Tensor | None, values: list[Tensor], decays_of_values: Tensor | None) -> Tensor:
    """One, or NaN from the first step at which one of these is not finite, (B, T, H, V): columns do not see each other.

    keys, decays: (B, T, G or H, K), spoil all columns; values and their decays (B, T, H, V) their own.
    """
    fault = torch.stack([faulty(value) for value in values]).any(0)
    if decays_of_values is not None:
        fault = fault | faulty(decays_of_values, decay=True)
    found = [faulty(key) for key in keys] + ([] if decays is None else [faulty(decays, decay=True)])
    for of_keys in found:
        each = fault.shape[2] // of_keys.shape[2]
        fault = fault | of_keys.any(-1, keepdim=True).repeat_interleave(each, 2)
    return since(fault, 1)
