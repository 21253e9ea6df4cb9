"""Softmax attention by torch, in the form that its dtype wants."""

import torch
from torch import Tensor
from torch.nn import functional as F


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `F.scaled_dot_product_attention`; in float64 by its plain form.

    The plain form has second derivatives, which derivative checks need. `sdpa_kernel(SDPBackend.MATH)` would choose it
    for all threads, and for good where two threads leave that context in the order in which they entered it.
    """
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if query.dtype == torch.float64:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
        return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, **options)[0]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
