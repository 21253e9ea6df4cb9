"""Softmax attention to what a mask leaves visible, for layers whose memories stand beside the steps."""

import torch
from torch import Tensor

from scanl.layers.base import as_widened, widen
from scanl.ops._attention import softmax_attention
from scanl.ops._frame.nonfinite import faulty, replaced, suspected


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return (B, Q, H, V), in float32 or wider, of q (B, Q, H, K), k (B, S, H, K) and v (B, S, H, V).

    visible: (B or 1, Q, S) bool, of which every query sees at least one key; None for all keys.
    scale: of q . k; 1/sqrt(K) when None.
    bias: added to the scaled scores: (B or 1, H or 1, Q, S), or (B or 1, H or 1, Q + S - 1), by the place of a key less
    that of a query, from 1 - Q on.

    A key or value that is not finite makes NaN only of the queries that see it.
    """
    spoil = None
    q, k, v = widen(q), widen(k), widen(v)
    if suspected(q, k, v):
        fault = faulty(k).flatten(2).any(2) | faulty(v).flatten(2).any(2)
        spoil = (fault[:, None] if visible is None else visible & fault[:, None]).any(2) | faulty(q).flatten(2).any(2)
        q, k, v = replaced(q), replaced(k), replaced(v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with as_widened(q):
        y = softmax_attention(q, k, v, visible, None if bias is None else widen(bias), scale=scale).transpose(1, 2)
    return y if spoil is None else y * torch.where(spoil, torch.nan, 1.0).to(y.dtype)[:, :, None, None]
