"""Equations that several layers of this family are written with, and what their tests share."""

import math

import torch

from by_hand import linear, silu


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


def turned_pairs(v, t, width, base):
    """v with the channels i and i + width / 2, for i below width / 2, turned by the angle t / base^(2 i / width)."""
    v = v.clone()
    for i in range(width // 2):
        j, angle = i + width // 2, t * base ** (-2 * i / width)
        a, b = v[i].clone(), v[j].clone()
        v[i], v[j] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return v


def gated_operands(layer, xs):
    """u, v, and the queries and keys of a gated attention unit, of each step."""
    E, us, vs, heads = layer.hidden_dim, [], [], []
    for t, x in enumerate(xs):
        u, v, z = silu(linear(layer.in_proj, x)).split([E, E, layer.z_dim])
        rows = [
            turned_pairs(z * g + b, t, layer.rotated, layer.rope_base)
            for g, b in zip(layer.gamma, layer.beta, strict=True)
        ]
        us, vs, heads = [*us, u], [*vs, v], [*heads, rows]
    return us, vs, heads


def biased(module, i, j):
    """The bias of the score of the key at j for the query at i."""
    if hasattr(module, "rel_pos_bias"):
        return module.rel_pos_bias[module.reach - 1 + j - i]
    at, of = (turned_pairs(w[0], t, w.shape[1], 10000.0) for w, t in ((module.alpha, i), (module.beta, j)))
    return at @ of
