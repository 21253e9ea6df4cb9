"""Provisional: the reference loop alone, while the op framework is being written."""
import torch

def linear_scan(x, a, state=None, *, reverse=False, cu_seqlens=None, backend="auto"):
    if cu_seqlens is not None:
        o = cu_seqlens.tolist()
        parts = [linear_scan(x[:, s:e], a if a.shape[1:2] != x.shape[1:2] else a[:, s:e], None if state is None else state[i:i+1], reverse=reverse) for i, (s, e) in enumerate(zip(o, o[1:]))]
        return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts])
    h = x.new_zeros(x.shape[:1] + x.shape[2:]) if state is None else state
    a = a.expand(torch.broadcast_shapes(a.shape, x.shape))
    ys = [None] * x.shape[1]
    for t in (range(x.shape[1])[::-1] if reverse else range(x.shape[1])):
        h = a[:, t] * h + x[:, t]
        ys[t] = h
    return (torch.stack(ys, 1) if ys else x), h
