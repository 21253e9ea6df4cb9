"""Averages of values with weights e^{k_i + w_ti}: products of matrices where the exponents may be split.

The weight is e^{w_ti - a_t} e^{k_i - c} e^{a_t + c}, with a_t the largest visible w of row t. So the sums over i are a
product of the matrix e^{w - a} with all keys and values. Where no key is further than `SPAN` from c, the largest
visible weight of a row is at least e^{-2 SPAN} of the product of the largest factors, and no sum underflows. Where all
keys are visible, it is enough that the w of each row lie within `SPAN`. Other blocks are halved. A small block is
computed weight by weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scanl.ops._frame.nonfinite import readable

SPAN = 30.0  # e^{-2 SPAN} and e^{SPAN} are far from the limits of float32
MAX_DIRECT_PAIRS = 512  # pairs of positions that are computed weight by weight


class WeighedSums(NamedTuple):
    """e^m p = Σ e^{w_i + k_i} v_i and e^m z = Σ e^{w_i + k_i}; all (G, R, C), or broadcastable to it."""

    p: Tensor
    z: Tensor
    m: Tensor

    def plus(self, other: "WeighedSums", m: Tensor | None = None) -> "WeighedSums":
        """Return both sums as one. m: of the result; by default the larger of both."""
        m = torch.maximum(self.m, other.m).detach() if m is None else m
        finite = m.masked_fill(m == -torch.inf, 0)
        mine, theirs = (self.m - finite).exp(), (other.m - finite).exp()
        return WeighedSums(mine * self.p + theirs * other.p, mine * self.z + theirs * other.z, m)


def weighed(w: Tensor, k: Tensor, v: Tensor) -> WeighedSums:
    """Return the sums of each row. w: (G, R, J), -inf where the row does not see the key.   k, v: (G, J, C)."""
    rows, keys = w.shape[1:]
    least = torch.finfo(w.dtype).min / 2
    a = w.detach().amax(2, keepdim=True).clamp(min=least)
    if not readable(w, k) or rows * keys <= MAX_DIRECT_PAIRS:
        exponents = w[..., None] + k[:, None]
        m = exponents.detach().amax(2).clamp(min=least)
        weights = (exponents - m[:, :, None]).exp()
        return WeighedSums((weights * v[:, None]).sum(2), weights.sum(2), m)
    c, fits = k.detach()[:, :1], True
    if (k.detach() - c).abs().amax() > SPAN:
        c = k.detach().amax(1, keepdim=True)
        fits = bool((a - w.detach()).amax() <= SPAN)
    if fits:
        by_position, by_key = (w - a).exp(), (k - c).exp()
        return WeighedSums(by_position @ (by_key * v), by_position @ by_key, a + c)
    seen = (w.detach() != -torch.inf).any(1).any(0).nonzero()
    if not len(seen):
        nothing = torch.zeros_like(a * v[:, :1])
        return WeighedSums(nothing, nothing, a + nothing)
    keys = int(seen.amax()) + 1
    w, k, v = w[:, :, :keys], k[:, :keys], v[:, :keys]
    if rows >= keys:
        parts = [weighed(half, k, v) for half in w.chunk(2, 1)]
        return WeighedSums(*(torch.cat(sums, 1) for sums in zip(*parts, strict=True)))
    first, last = (weighed(*half) for half in zip(w.chunk(2, 2), k.chunk(2, 1), v.chunk(2, 1), strict=True))
    return first.plus(last)
