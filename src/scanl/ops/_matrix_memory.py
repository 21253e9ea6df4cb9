"""What the ops with a matrix state say alike: the default scale, and log decays written out for every step."""

import math

import torch
from torch import Tensor

from scanl.ops._frame.nonfinite import faulty, since


def scale_of(q: Tensor, scale: float | None) -> float:
    """1/sqrt(K) where none is given."""
    return 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale


def row_decays(g: Tensor | None, q: Tensor) -> Tensor | None:
    """g as (B, T, H, K or 1), for q that has every head."""
    if g is None:
        return None
    return g.view(*g.shape, *(1,) * (4 - g.ndim if g.ndim > 1 else 1)).expand(*q.shape[:3], -1)


def over_a_tile(*, K: int, V: int, **_: object) -> list[str]:
    """Reasons against kernels that hold a whole row and column of the state."""
    return [f"{axis}={size} is over 256" for axis, size in (("K", K), ("V", V)) if size > 256]


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
