"""What the ops with a matrix state say alike: the default scale, and log decays written out for every step."""

import math

from torch import Tensor


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
