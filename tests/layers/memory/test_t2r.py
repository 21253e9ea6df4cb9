"""T2R: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear
from scanl import layers

pytestmark = pytest.mark.cells_by_loop("name")


def t2r(layer, xs):
    """The quadratic form: one map of features for queries and keys."""
    H, K, each = layer.num_heads, layer.head_dim, layer.num_heads // layer.num_kv_heads

    def turned(v, t):
        half = layer.rotated // 2
        angles = t * layer.rope_base ** (-torch.arange(half) / max(1, half))
        a, b, rest = v.split([half, half, K - 2 * half], -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def features(v, h):
        return torch.relu(layer.phi_weight[h] @ v + layer.phi_bias[h])

    ks = [turned(linear(layer.k_proj, x).view(-1, K), t) for t, x in enumerate(xs)]
    vs, ys = [linear(layer.v_proj, x).view(-1, K) for x in xs], []
    for t, x in enumerate(xs):
        q, read = turned(linear(layer.q_proj, x).view(H, K), t), []
        for h in range(H):
            scores = [features(q[h] / math.sqrt(K), h) @ features(k[h // each], h) for k in ks[: t + 1]]
            top = sum(score * v[h // each] for score, v in zip(scores, vs, strict=False))
            read.append(top / torch.stack(scores).sum().clamp(min=layer.eps))
        ys.append(linear(layer.o_proj, torch.cat(read)))
    return ys


EQUATIONS = {
    "t2r": (lambda: layers.build("t2r", DIM, num_heads=4, num_kv_heads=2, num_features=6), t2r),
    "t2r_rotated": (
        lambda: layers.build("t2r", DIM, num_heads=2, num_features=5, rope_fraction=1.0, bias=True, eps=0.3),
        t2r,
    ),
}

WRONG = [("t2r", {"num_features": 0}, "num_features is 0, expected at least 1")]


def test_init_of_t2r():
    layer = layers.build("t2r", 256)
    assert_normal(layer.q_proj.weight, 1 / 16)
    assert_uniform(layer.phi_weight, -(32**-0.5), 32**-0.5)
    assert_uniform(layer.phi_bias, -(32**-0.5), 32**-0.5)
    assert layer.phi_weight.shape == (8, 64, 32)
    assert (layer.eps, layer.rotated) == (1e-2, 0)
