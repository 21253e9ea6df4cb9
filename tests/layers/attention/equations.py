"""Equations that several layers of this family are written with, and what their tests share."""

import math

import torch


def attention(layer, xs):
    def turned(v, t):
        v = v.clone()
        for i in range(layer.rotated // 2):
            j, angle = i + layer.rotated // 2, t * layer.rope_base ** (-2 * i / layer.rotated)
            a, b = v[..., i].clone(), v[..., j].clone()
            v[..., i], v[..., j] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return v

    shared, K = layer.num_heads // layer.num_kv_heads, layer.head_dim
    ks = [turned(layer.k_proj(x).view(-1, K), t) for t, x in enumerate(xs)]
    vs, ys = [layer.v_proj(x).view(-1, K) for x in xs], []
    for t, x in enumerate(xs):
        q, out = turned(layer.q_proj(x).view(-1, K), t), []
        seen = range(max(0, t - layer.reach + 1), t + 1)
        for head in range(layer.num_heads):
            scores = torch.stack([q[head] @ ks[j][head // shared] / math.sqrt(K) for j in seen])
            weights = torch.exp(scores) / torch.exp(scores).sum()
            out.append(sum(w * vs[j][head // shared] for w, j in zip(weights, seen, strict=True)))
        ys.append(layer.o_proj(torch.cat(out)))
    return ys
