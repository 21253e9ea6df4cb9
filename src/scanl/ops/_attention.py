"""Softmax attention in the form that its dtype and size want: by our kernel, by torch's, or by plain products."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.context import exactly
from scanl.ops._frame.fused import apply, differentiable, kernels, supported

MIN_SCORES = 1 << 16  # pairs of a query and a key; with fewer, torch's attention is as fast as ours
MIN_QUERIES = 16  # of a head: fewer fill no block


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return (B, H, T, V), the softmax attention of queries (B, H, T, K) to keys (B, G, S, K) and values (B, G, S, V).

    G divides H.   visible: (B or 1, T or 1, S or 1) bool.   bias: (B or 1, H or 1, T, S), added to the scaled scores.
    is_causal: query t sees the keys up to t; neither visible nor bias is given then.   scale: 1/sqrt(K) when None.

    Many numbers of float32 on a CPU go through our kernel, which keeps no scores, and reads blocks with visible keys
    alone. The form for float64 has second derivatives, which derivative checks need, and the kernel takes its own from
    it. `sdpa_kernel(SDPBackend.MATH)` would choose it for all threads, and for good where two threads leave that
    context in the order in which they entered it.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if _is_large(query, key) and supported(query, key, value, *(() if bias is None else (bias,))):
        return apply(_BlockedAttention, query, key, value, visible, bias, is_causal, scale)
    if query.dtype == torch.float64:
        return _plain(query, key, value, bias, visible, is_causal, scale)
    # torch's fused kernel needs values as wide as keys; without it, the scores of all pairs are in memory.
    width = value.shape[3]
    value = F.pad(value, (0, max(0, key.shape[3] - width))) if visible is None and bias is None else value
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    mask = _added(bias, visible, query) if bias is not None else None if visible is None else visible[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)[..., :width]


def _is_large(query: Tensor, key: Tensor) -> bool:
    if torch.compiler.is_compiling() or query.dtype != torch.float32 or exactly():
        return False
    return query.shape[2] >= MIN_QUERIES and query.shape[:3].numel() * key.shape[2] >= MIN_SCORES


def _added(bias: Tensor | None, visible: Tensor | None, query: Tensor) -> Tensor | None:
    """Return what is added to the scores: the bias, and -inf where a key is hidden."""
    if visible is None:
        return bias
    bias = query.new_zeros(1, 1, *visible.shape[1:]) if bias is None else bias
    return bias.masked_fill(~visible[:, None], -torch.inf)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, visible: Tensor | None, is_causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    mask = _added(bias, visible, query)
    shared = query.shape[1] != key.shape[1]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=shared
    )[0]


def _rows(x: Tensor) -> Tensor:
    """Return x with adjacent numbers in its rows."""
    return x if x.stride(-1) == 1 and not x.is_neg() else contiguous(x)


def _of_all(visible: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask with an entry for each query and key."""
    return None if visible is None else visible.expand(-1, query.shape[2], key.shape[2]).contiguous()


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None, causal: bool,
        scale: float,
    ) -> Any:  # fmt: skip
        rows = [_rows(x) for x in (q, k, v)]
        seen, added = _of_all(visible, q, k), None if bias is None else _rows(bias)
        y, logs = kernels("blocked_attention").forward(*rows, seen, added, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, visible, bias, y, logs)
        ctx.options = causal, scale
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dy,), (q, k, v, visible, bias, y, logs), (causal, scale) = cotangents, ctx.saved_tensors, ctx.options
        of_bias = ctx.needs_input_grad[4]
        if torch.is_grad_enabled():  # this pass is differentiated
            operands = [q, k, v, *([bias] if of_bias else [])]

            def plain(q: Tensor, k: Tensor, v: Tensor, learned: Tensor | None = bias) -> Tensor:
                return _plain(q, k, v, learned, visible, causal, scale)

            grads = differentiable(plain, operands, [dy])
            return *grads[:3], None, grads[3] if of_bias else None, None, None
        rows = [_rows(x) for x in (q, k, v)]
        seen, added = _of_all(visible, q, k), None if bias is None else _rows(bias)
        dbias = q.new_zeros(*q.shape[:3], k.shape[2]) if of_bias else None
        grads = kernels("blocked_attention").backward(
            contiguous(dy.transpose(1, 2)), y, logs, *rows, seen, added, dbias, causal=causal, scale=scale
        )
        of_bias = None if bias is None or dbias is None else dbias.sum_to_size(bias.shape)
        return *(grad.transpose(1, 2) for grad in grads), None, of_bias, None, None
