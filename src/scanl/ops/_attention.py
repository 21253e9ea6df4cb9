"""Softmax attention in the form that its dtype and size want: by our kernel, by torch's, or by plain products."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._cpu._memory import contiguous
from scanl.ops._frame.context import exactly
from scanl.ops._frame.fused import apply, differentiable, kernels, supported

MIN_SCORES = 1 << 17  # pairs of a query and a key; with fewer, torch's attention is as fast as ours
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

    G divides H.   visible: (B or 1, T or 1, S or 1) bool.   bias: added to the scaled scores: (B or 1, H or 1, T, S),
    or (B or 1, H or 1, T + S - 1), by the place of a key less that of a query, from 1 - T on.
    is_causal: query t sees the keys up to t; neither visible nor bias is given then.   scale: 1/sqrt(K) when None.

    Many numbers of float32 on a CPU go through our kernel, which keeps no scores, and reads blocks with visible keys
    alone. The form for float64 has second derivatives, which derivative checks need, and the kernel takes its own from
    it. `sdpa_kernel(SDPBackend.MATH)` would choose it for all threads, and for good where two threads leave that
    context in the order in which they entered it.
    """
    scale = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    if _is_large(query, key, value, bias):
        return apply(_BlockedAttention, query, key, value, visible, bias, is_causal, False, scale)[0]
    if query.dtype == torch.float64:
        return _plain(query, key, value, visible, bias, is_causal, scale)
    # torch's fused kernel needs values as wide as keys; without it, the scores of all pairs are in memory.
    width = value.shape[3]
    value = F.pad(value, (0, max(0, key.shape[3] - width))) if visible is None and bias is None else value
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    mask = _added(query, key, visible, bias) if bias is not None else None if visible is None else visible[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)[..., :width]


def squared_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, bias: Tensor, *, scale: float
) -> Tensor:
    """Return the same with max(0, score)² as weights, of which hidden keys have 0. They are not normalized."""
    if _is_large(query, key, value, bias):
        return apply(_BlockedAttention, query, key, value, visible, bias, False, True, scale)[0]
    return _plain_squares(query, key, value, visible, bias, scale)


def attention_with_logs(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the softmax attention, and (B, H, T), the logarithm of the sum of e^score over the keys that are seen.

    With these, attention to two sets of keys is a weighted mean. A query without a key has a very low logarithm.
    """
    if _is_large(query, key, value, None):
        return apply(_BlockedAttention, query, key, value, visible, None, False, False, scale)
    return _plain_with_logs(query, key, value, visible, scale)


def _is_large(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Return whether our kernel can run, and there is enough to compute."""
    if torch.compiler.is_compiling() or query.dtype != torch.float32 or exactly():
        return False
    enough = query.shape[2] >= MIN_QUERIES and query.shape[:3].numel() * key.shape[2] >= MIN_SCORES
    return enough and supported(query, key, value, *(() if bias is None else (bias,)))


def of_pairs(bias: Tensor, queries: int, keys: int) -> Tensor:
    """Return a bias for each query and key, (..., T, S), also of one by the distance (..., T + S - 1)."""
    if bias.ndim == 4:
        return bias
    places = [torch.arange(count, device=bias.device) for count in (queries, keys)]
    return bias[..., queries - 1 + places[1] - places[0][:, None]]


def _added(query: Tensor, key: Tensor, visible: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return what is added to the scores: the bias, and -inf where a key is hidden."""
    bias = None if bias is None else of_pairs(bias, query.shape[2], key.shape[2])
    if visible is None:
        return bias
    bias = query.new_zeros(1, 1, *visible.shape[1:]) if bias is None else bias
    return bias.masked_fill(~visible[:, None], -torch.inf)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, bias: Tensor | None, is_causal: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    mask = _added(query, key, visible, bias)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, mask, **options)[0]


def _plain_with_logs(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    shared = query.shape[1] // key.shape[1]
    query = query.unflatten(1, (-1, shared)).flatten(2, 3)  # heads of one key head are more queries
    scores = (query @ key.mT * scale).unflatten(2, (shared, -1))
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], _lowest(query))
    logs = scores.logsumexp(-1)
    y = (scores - logs[..., None]).exp().flatten(2, 3) @ value
    return y.unflatten(2, (shared, -1)).flatten(1, 2), logs.flatten(1, 2)


def _lowest(like: Tensor) -> float:
    return torch.finfo(like.dtype).min / 2


def _plain_squares(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, bias: Tensor, scale: float) -> Tensor:
    scores = query @ key.mT * scale + of_pairs(bias, query.shape[2], key.shape[2])
    return scores.relu().square().masked_fill(~visible[:, None], 0) @ value


def _rows(x: Tensor) -> Tensor:
    """Return x with adjacent numbers in its rows."""
    return x if x.stride(-1) == 1 and not x.is_neg() else contiguous(x)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None, causal: bool,
        squared: bool, scale: float,
    ) -> Any:  # fmt: skip
        if hasattr(ctx, "set_materialize_grads"):  # a call without autograd has another context
            ctx.set_materialize_grads(False)
        rows, scores = _operands(q, k, v, visible, bias, causal, squared, scale)
        y, logs = kernels("blocked_attention").forward(*rows, scores)
        ctx.save_for_backward(q, k, v, visible, bias, y, logs)
        ctx.options = causal, squared, scale
        return y.transpose(1, 2), logs.masked_fill(logs == torch.inf, _lowest(q))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (dy, dlogs), (q, k, v, visible, bias, y, logs), options = cotangents, ctx.saved_tensors, ctx.options
        of_bias = ctx.needs_input_grad[4]
        if torch.is_grad_enabled():  # this pass is differentiated
            causal, squared, scale = options

            def plain(q: Tensor, k: Tensor, v: Tensor, learned: Any = bias) -> Tensor | tuple[Tensor, Tensor]:
                if squared:
                    return _plain_squares(q, k, v, visible, learned, scale)
                if dlogs is not None:
                    return _plain_with_logs(q, k, v, visible, scale)
                return _plain(q, k, v, visible, learned, causal, scale)

            by = [dy] if dlogs is None else [dy, dlogs]
            grads = differentiable(plain, [q, k, v, *([bias] if of_bias else [])], by)
            return *grads[:3], None, grads[3] if of_bias else None, None, None, None
        rows, scores = _operands(q, k, v, visible, bias, *options)
        dbias = q.new_zeros(*q.shape[:2], *bias.shape[2:]) if of_bias else None
        dy = contiguous(dy.transpose(1, 2))
        dlogs = None if dlogs is None else contiguous(dlogs)
        grads = kernels("blocked_attention").backward(dy, y, logs, *rows, scores, dbias, dlogs)
        dbias = None if dbias is None else dbias.sum_to_size(bias.shape)
        return *(grad.transpose(1, 2) for grad in grads), None, dbias, None, None, None


def _operands(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None, causal: bool, squared: bool,
    scale: float,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Return the operands of the kernel: with adjacent numbers in rows, and an entry of the mask for each pair."""
    seen = None if visible is None else visible.expand(-1, q.shape[2], k.shape[2]).contiguous()
    added = None if bias is None else _rows(bias)
    scores = kernels("blocked_attention").AttentionRule(seen, added, causal, squared, scale)
    return [_rows(x) for x in (q, k, v)], scores
