"""xLSTM's mLSTM layer. A call takes and returns its state: C (B, H, K, V), n (B, H, K) and m (B, H, 1)."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.hub import call
from scanl.hub.patches.base import Patch, register
from scanl.layers.base import widen
from scanl.layers.memory._exponential_gates import stabilizer
from scanl.ops import linear_attention
from scanl.ops.offsets import sequences

State = tuple[Tensor, Tensor, Tensor]


@register("xlstm")
class XLSTMPatch(Patch):
    """Keeps C and n with the factor e^-m and the original's m, so patch and original can read each other's state.

    Beam search needs `use_cache=False`, as in the original: the model's cache cannot be reordered.
    """

    modules: ClassVar = ("xlstm.xLSTMLayer",)
    original: ClassVar = "chunks, then a Python loop over the last steps"
    runs: ClassVar = "linear_attention"
    corrects: ClassVar = ("padding is left out", "packed sequences are kept apart")
    reads: ClassVar = ("mlstm_backend", "multihead_norm")
    needs_call: ClassVar = ("padding", "packing")

    @staticmethod
    def forward(module: Any, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        rows, x = call.TokenRows.lay(call.part(module, x), x)
        if rows.packed and state is not None:
            rows.start_anew(bool((state[1] != 0).any()))
            state = None
        if state is not None and torch.is_grad_enabled():  # the model overwrites the state with the next one
            state = state[0].clone(), state[1].clone(), state[2].clone()
        q, k, v, o, i, f = _projected(module, x)
        i, log_f = widen(i), F.logsigmoid(widen(f))
        count = sequences(x, rows.cu_seqlens)
        m = i.new_zeros(count, i.shape[-1]) if state is None else widen(state[2][..., 0])
        if x.shape[1] == 1 and rows.cu_seqlens is None:
            previous_m = m[:, None]
            now = torch.maximum(log_f + previous_m, i)
            m = now[:, 0]
        else:
            now, previous_m, m = stabilizer(i, log_f, m, rows.cu_seqlens)
        memory, sums = (None, None) if state is None else (state[0], state[1][..., None])
        q, k, g = widen(q), k * (i - now).exp()[..., None], log_f + previous_m - now
        ones = torch.ones_like(v[..., :1])
        if v.shape[1] == 1:  # one call would join and split the states at every token
            y, memory = linear_attention(q, k, v, g, state=memory, cu_seqlens=rows.cu_seqlens)
            total, sums = linear_attention(q, k, ones, g, state=sums, cu_seqlens=rows.cu_seqlens)
        else:
            joined = None if memory is None or sums is None else torch.cat([memory, sums], -1)
            y, joined = linear_attention(q, k, torch.cat([v, ones], -1), g, state=joined, cu_seqlens=rows.cu_seqlens)
            y, total = y.split([v.shape[-1], 1], -1)
            memory, sums = joined.split([v.shape[-1], 1], -1)
        h = y / (torch.maximum(total.abs(), (-now).exp()[..., None]) + module.config.eps)
        y = module.out_proj(module.ogate_act_fn(o) * _normed(module.multihead_norm, h).to(x.dtype))
        return rows.back(y), (rows.last(memory), rows.last(sums)[..., 0], rows.last(m)[..., None])


def _projected(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys, values (B, T, H, ·), and the raw gates: output (B, T, H V), input and forget (B, T, H)."""
    config = module.config
    if config.weight_mode == "single":
        q, k, v, o = module.q(x), module.k(x), module.v(x), module.ogate_preact(x)
        gates = module.igate_preact(x), module.fgate_preact(x)
    else:
        q, k, v, o = module.qkv_opreact(x).split([module.qk_dim, module.qk_dim, module.v_dim, module.v_dim], -1)
        gates = module.ifgate_preact(x).chunk(2, -1)
    cap = config.gate_soft_cap
    i, f = gates if cap is None else (cap * torch.tanh(gate / cap) for gate in gates)
    q, k, v = (projection.unflatten(-1, (config.num_heads, -1)) for projection in (q, k, v))
    return q, k, v, o, i, f


def _normed(norm: Any, h: Tensor) -> Tensor:
    """Norm each head of h (B, T, H, V) separately, then scale. Return (B, T, H V)."""
    h = F.layer_norm(h, h.shape[-1:], eps=norm.eps).flatten(-2)
    h = h if norm.weight is None else h * norm.weight
    return h if norm.bias is None else h + norm.bias
