"""DeltaNet: its equation step by step, how it starts, and what it refuses."""

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, assert_normal, assert_uniform, linear, rms, sigmoid, silu, unit
from scanl import layers
from tests.layers.memory.equations import convolved, delta

pytestmark = pytest.mark.cells_by_loop("name")


def deltanet(layer, xs):
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    map_of = {
        "silu": silu,
        "relu": F.relu,
        "elu": lambda v: torch.where(v > 0, v + 1, torch.exp(v)),
        "identity": lambda v: v,
    }[layer.activation]
    norm = unit if layer.qk_norm == "l2" else lambda v: v / v.abs().sum().clamp(min=1e-6)
    pairs = [(layer.q_conv1d, layer.q_proj, map_of), (layer.k_conv1d, layer.k_proj, map_of)]
    pairs.append((layer.v_conv1d, layer.v_proj, silu))
    qs, ks, vs = (convolved(conv, [linear(project, x) for x in xs], act) for conv, project, act in pairs)
    S, ys = torch.zeros(H, K, V), []
    for x, q, k, v in zip(xs, qs, ks, vs, strict=True):
        beta = torch.ones(H) if layer.b_proj is None else sigmoid(linear(layer.b_proj, x))
        beta = beta * (2 if layer.allow_neg_eigval else 1)
        q, k, v = q.view(H, K), k.view(H, K), v.view(H, V)
        steps = [delta(S[h], norm(q[h]), norm(k[h]), v[h], beta[h]) for h in range(H)]
        S = torch.stack([memory for memory, _ in steps])
        y = torch.cat([rms(o) * layer.o_norm.weight for _, o in steps])
        if layer.g_proj is not None:
            y = y * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


EQUATIONS = {
    "deltanet": (lambda: layers.build("deltanet", DIM, num_heads=2), deltanet),
    "deltanet_2021": (lambda: layers.build("deltanet_2021", DIM, num_heads=2), deltanet),
    "deltanet_gated": (
        lambda: layers.build(
            "deltanet", DIM, num_heads=2, output_gate=True, allow_neg_eigval=True, conv_bias=True, activation="identity"
        ),
        deltanet,
    ),
    "deltanet_negative_eigenvalues": (
        lambda: layers.build("deltanet_negative_eigenvalues", DIM, num_heads=2),
        deltanet,
    ),
    "deltanet_wide": (
        lambda: layers.build(
            "deltanet", DIM, num_heads=4, expand_k=0.5, expand_v=2.0, use_beta=False, activation="relu"
        ),
        deltanet,
    ),
}

WRONG = [
    ("deltanet", {"num_heads": 3}, "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3"),
    ("deltanet", {"conv_size": 0}, "conv_size is 0, expected at least 1"),
    ("deltanet", {"activation": "gelu"}, "unknown activation 'gelu'"),
    ("deltanet", {"qk_norm": "l1"}, "unknown qk_norm 'l1'"),
]


def test_init_of_deltanet():
    layer = layers.build("deltanet", 256, output_gate=True)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj, layer.g_proj, layer.o_proj):
        assert_normal(project.weight, 0.02)
    assert_uniform(layer.k_conv1d.weight, -1 / 2, 1 / 2)
    assert (layer.o_norm.weight == 1).all()
