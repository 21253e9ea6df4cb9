"""The recurrences of flash-linear-attention as calls of our ops, with the arguments' names of `scanl.compat.fla`.

Each takes its own arguments, `state`, and scale, reverse and cu_seqlens where its caller has them. It returns o and the
last state.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.compat.calls import Result
from scanl.errors import ConfigError, ShapeError
from scanl.layers.base import widen
from scanl.ops import delta_rule, dplr_scan, linear_attention, linear_scan

EPS = 1e-6  # of the norm of queries and keys


def gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    **call: Any,
) -> Result:  # fmt: skip
    """Gated linear attention. g, gk: log decay of the keys, (B, T, H, K).   gv: of the values, (B, T, H, V)."""
    return linear_attention(q, k, v, gk if g is None else g, gv, **call)


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, **call: Any
) -> Result:
    """Linear attention with one decay for each head, their sum of g (B, T, H) and g_gamma (H,), in logarithms."""
    if g is not None and g_gamma is not None:
        g = g + g_gamma
    return linear_attention(q, k, v, g_gamma if g is None else g, **call)


def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, output_attentions: bool = False, **call: Any
) -> Result:
    """As `simple_gla`; returns o and, with output_attentions, the weights of v_s in o_t, (B, H, T, T), or None."""
    if output_attentions and call["cu_seqlens"] is not None:
        raise ConfigError("output_attentions is True, expected False because of cu_seqlens")
    o, _ = linear_attention(q, k, v, g, **call)
    if not output_attentions:
        return o, None
    unit = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)[None, :, None].expand(len(v), -1, v.shape[2], -1)
    return o, linear_attention(q, k, unit, g, **call)[0].transpose(1, 2)


def parallel_retention(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Result:
    """As `retention`; returns o and, with output_attentions, the weights of v_s in o_t, (B, H, T, T), or None."""
    return parallel_simple_gla(q, k, v, _retention_decay(q), **call)


def retention(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Result:
    """Retention: the decay of head h is 1 - 2^(-5-h)."""
    return linear_attention(q, k, v, _retention_decay(q), **call)


def _retention_decay(q: Tensor) -> Tensor:
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return torch.log1p(-(2 ** (-5 - heads)))


def lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **call: Any) -> Result:
    """Lightning attention: the log decay of head h of H is -8 h/H (1 - layer_idx/num_layers)."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return linear_attention(q, k, v, -8 / max(1, q.shape[2]) * (1 - layer_idx / num_layers) * heads, **call)


def linear_attn(
    q: Tensor, k: Tensor, v: Tensor, normalize: bool, output_final_state: bool, state: Any, scale: float | None,
    **call: Any,
) -> Result:  # fmt: skip
    """Linear attention without decay, o divided by the sum of (scale q_t)·k_s over s <= t if `normalize`.

    The state is then (S, z), with z the sum of the keys, (N, 1, H, K); without output_final_state, S alone is None.
    """
    if not normalize:
        o, last = linear_attention(q, k, v, state=state, scale=scale, **call)
        return o, last if output_final_state else None
    S, z = state if isinstance(state, tuple) else (state, None)
    if S is not None:
        z = S.new_zeros(S.shape[:-1]) if z is None else z.squeeze(1)
        S = torch.cat([S, z.to(S.dtype).unsqueeze(-1)], -1)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o, S = linear_attention(widen(q), widen(k), widen(values), state=S, scale=scale, **call)
    o, total = o.split([v.shape[-1], 1], -1)
    S, z = S.split([v.shape[-1], 1], -1)
    return (o / (total + 1e-10)).to(q.dtype), (S if output_final_state else None, z[..., 0].unsqueeze(1))


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **call: Any) -> Result:
    """RWKV-6. w: log decay, (B, T, H, K).   u: bonus of the current step, (H, K)."""
    return linear_attention(r, k, v, w, u=u, **call)


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, *, state: Any, scale: float | None,
    cu_seqlens: Tensor | None = None, **call: Any,
) -> Result:  # fmt: skip
    """Gated slot attention. s, g: weights and log decays of M slots, (B, T, H, M). q may have more heads than k.

    Without g, the weights of a slot are the softmax of s over the past. The state is (N, H, K, M) and (N, H, M, V).
    """
    if g is None:
        s, g = _additive_gate(s, cu_seqlens)
    shared = q.shape[2] // max(1, k.shape[2])
    if q.shape[2] != shared * k.shape[2]:
        raise ShapeError(f"gsa: q has {q.shape[2]} heads, expected a multiple of H={k.shape[2]} from k")
    k, v, s, g = (operand.repeat_interleave(shared, 2) for operand in (k, v, s, g))
    keys, values = (None, None) if state is None else (memory.repeat_interleave(shared, 1) for memory in state)
    call["cu_seqlens"] = cu_seqlens
    logits, keys = linear_attention(q, k, s.to(q.dtype), gv=g, state=keys, scale=scale, **call)
    weights = widen(logits).softmax(-1).to(q.dtype)
    o, values = linear_attention(weights, s.to(q.dtype), v, g, state=values, scale=1.0, **call)
    return o, (keys[:, ::shared], values[:, ::shared])


def _additive_gate(s: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return exp(s_t - z_t) and z_{t-1} - z_t, where z_t is the logarithm of the sum of exp(s) up to t."""
    lengths = [s.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    gates = []
    for piece in widen(s).split(lengths, 1):
        z = piece.logcumsumexp(1)
        gates.append((piece - z).exp())
        gates.append(torch.cat([z[:, :1], z[:, :-1]], 1) - z)
    return torch.cat(gates[::2], 1), torch.cat(gates[1::2], 1)


def delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, **call: Any
) -> Result:
    """The delta rule. beta: write strength, (B, T, H); None is 1."""
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    q = _unit(q) if use_qk_l2norm_in_kernel else q
    return delta_rule(q, k, v, beta, normalize_keys=use_qk_l2norm_in_kernel, eps=EPS, **call)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, g: Tensor | None = None, gk: Tensor | None = None,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, **call: Any,
) -> Result:  # fmt: skip
    """The gated delta rule. v may have more heads than q and k. g: log decay, (B, T, H).   gk: that of the keys.

    use_gate_in_kernel: the log decay is -exp(A_log) softplus(g + dt_bias).   use_beta_sigmoid_in_kernel: beta is
    replaced by its sigmoid; with allow_neg_eigval, by twice that.
    """
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, None)
    if g is not None and gk is not None:
        gk = g.unsqueeze(-1) + gk
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return delta(q, k, v, beta, g=g if gk is None else gk, **call)


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, return_intermediate_states: bool = False,
    chunk_size: int = 64, **call: Any,
) -> Result:  # fmt: skip
    """Kimi delta attention. v may have more heads than q and k. g: log decay of the keys, (B, T, H, K).

    use_gate_in_kernel: the log decay is -exp(A_log) softplus(g + dt_bias), with A_log (H,) and dt_bias (H K,); with
    lower_bound it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), and A_log may be None.
    use_beta_sigmoid_in_kernel: beta is replaced by its sigmoid; with allow_neg_eigval, by twice that.
    return_intermediate_states: also return the states before each chunk_size steps of each sequence, one after the
    other, (B, ·, H, K, V), in q's dtype.
    """
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    strength: Any = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    o, last = delta(q, k, v, strength, g=g, **call)
    if not return_intermediate_states:
        return o, last
    begin, cu_seqlens = call.pop("state"), call.pop("cu_seqlens")
    begin, packed = torch.zeros_like(last) if begin is None else begin, cu_seqlens is not None
    between = []
    for n, (first, end) in enumerate(pairwise(cu_seqlens.tolist() if packed else [0, q.shape[1]])):
        state = begin[n : n + 1] if packed else begin
        for start in range(first, end, chunk_size):
            between.append(state.to(q.dtype))
            cut = [x[:, start : min(start + chunk_size, end)] for x in (q, k, v, strength, g)]
            _, state = delta(cut[0], cut[1], cut[2], cut[3], g=cut[4], state=state, **call)
    return o, last, torch.stack(between, 1)


def gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int,
    cu_seqlens: Tensor | None = None, **call: Any,
) -> Result:  # fmt: skip
    """The gated delta product: n = num_householder writes between two reads. k, v, beta: (B, T n, H, ·)."""

    def spread(x: Tensor, last: bool) -> Tensor:
        """Put x at the last or first write of its step, and zeros at the others."""
        others = x.new_zeros(*x.shape[:2], num_householder - 1, *x.shape[2:])
        x = x.unsqueeze(2)
        return torch.cat([others, x] if last else [x, others], 2).flatten(1, 2)

    g = None if g is None else spread(g, last=False)
    offsets = None if cu_seqlens is None else cu_seqlens * num_householder
    o, state = delta(spread(q, last=True), k, v, beta, g=g, cu_seqlens=offsets, **call)
    return o.unflatten(1, (-1, num_householder))[:, :, -1], state


def _gate(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return the log decay of its value before the gate, g (B, T, H) or (B, T, H, K)."""
    if g is None or (A_log is None and lower_bound is None):
        name = "g" if g is None else "A_log"
        raise ConfigError(f"{name} is None, expected a tensor because of use_gate_in_kernel=True")
    g = widen(g) if dt_bias is None else widen(g) + widen(dt_bias).view(g.shape[2:])
    rate = None if A_log is None else widen(A_log).exp().view(-1, *[1] * (g.ndim - 3))
    if lower_bound is not None:
        return lower_bound * (g if rate is None else rate * g).sigmoid()
    assert rate is not None
    return -rate * F.softplus(g)


def _strength(beta: Tensor | None, use_sigmoid: bool, allow_negative: bool) -> Tensor | None:
    if allow_negative and not use_sigmoid:
        raise ConfigError("allow_neg_eigval is True, expected False without use_beta_sigmoid_in_kernel")
    if not use_sigmoid or beta is None:
        return beta
    return (2.0 if allow_negative else 1.0) * widen(beta).sigmoid()


def _unit(q: Tensor) -> Tensor:
    return (widen(q) * (widen(q).square().sum(-1, keepdim=True) + EPS).rsqrt()).to(q.dtype)


def comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, beta: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, **call: Any,
) -> Result:  # fmt: skip
    """Comba: the gated delta rule that corrects what p (B, T, H, K) reads before the decay; None is k."""
    p = k if p is None else p
    q, k, p = map(_unit, (q, k, p)) if use_qk_l2norm_in_kernel else (q, k, p)
    shared = v.shape[2] // max(1, k.shape[2])
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    beta = widen(beta).unsqueeze(-1)
    a = (-beta * k.repeat_interleave(shared, 2)).to(v.dtype)
    return dplr_scan(q, k, (beta * v).to(v.dtype), a, p.repeat_interleave(shared, 2), g, **call)


def dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor | None = None, **call: Any) -> Result:
    """S_t = (Diag(e^gk) + b aᵀ) S_{t-1} + k vᵀ: a reads the state, and b is where the result is written."""
    return dplr_scan(q, k, v, b, a, gk, **call)


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **call: Any) -> Result:
    """RWKV-7, S_t = (Diag(e^w) + b aᵀ) S_{t-1} + k vᵀ."""
    return dplr_scan(r, k, v, b, a, w, **call)


def mul_rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, **call: Any) -> Result:
    """RWKV-7, S_t = (Diag(e^w) - (kk ⊙ a) kkᵀ) S_{t-1} + k vᵀ."""
    return dplr_scan(r, k, v, kk * a, -kk, w, **call)


def hgrn(x: Tensor, g: Tensor, **call: Any) -> Result:
    """HGRN, h_t = e^g ⊙ h_{t-1} + x_t. x, g: (B, T, D).   The state is (N, D)."""
    h, last = linear_scan(widen(x), widen(g).exp(), **call)
    return h.to(x.dtype), last
