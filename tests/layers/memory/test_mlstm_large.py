"""MLSTMLarge: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, linear, sigmoid
from scanl import layers

pytestmark = pytest.mark.cells_by_loop("name")


def mlstm_large(layer, xs):
    """As mlstm, on x itself; gates of c tanh(x / c)."""
    H, cap = layer.num_heads, layer.gate_soft_cap
    K, V = layer.q.out_features // H, layer.v.out_features // H
    C, n, m, ys = torch.zeros(H, K, V), torch.zeros(H, K), torch.zeros(H), []
    for x in xs:
        i = torch.exp(cap * torch.tanh(linear(layer.igate_preact, x) / cap))
        f = sigmoid(cap * torch.tanh(linear(layer.fgate_preact, x) / cap))
        m = torch.maximum(f.log() + m, i.log())
        q, k, v = (layer.q.weight @ x).view(H, K), (layer.k.weight @ x).view(H, K), (layer.v.weight @ x).view(H, V)
        C = f[:, None, None] * C + i[:, None, None] * k[:, :, None] * v[:, None, :]
        n = f[:, None] * n + i[:, None] * k
        heads = []
        for h in range(H):
            read = q[h] / math.sqrt(K)
            o = C[h].T @ read / (max(abs(n[h] @ read), torch.ones(())) + layer.eps * torch.exp(m[h]))
            heads.append((o - o.mean()) / torch.sqrt(o.var(correction=0) + layer.multihead_norm.eps))
        y = torch.cat(heads) * layer.multihead_norm.weight
        ys.append(layer.out_proj.weight @ (sigmoid(layer.ogate_preact.weight @ x) * y))
    return ys


EQUATIONS = {
    "mlstm_large": (lambda: layers.build("mlstm_large", DIM, num_heads=2), mlstm_large),
    "mlstm_large_capped": (
        lambda: layers.build(
            "mlstm_large", DIM, num_heads=4, expand_k=1.5, expand_v=2.0, gate_soft_cap=5.0, norm_eps=0.1, eps=0.1
        ),
        mlstm_large,
    ),
}

WRONG = [
    ("mlstm_large", {"num_heads": 3}, "expand_k is 0.5, expected dim=8 times it to be a multiple of num_heads=3"),
    ("mlstm_large", {"num_heads": 4, "expand_v": 0}, "expand_v is 0, expected more than 0"),
    ("mlstm_large", {"num_heads": 4, "gate_soft_cap": 0}, "gate_soft_cap is 0, expected more than 0"),
]


def test_init_of_mlstm_large():
    layer = layers.build("mlstm_large", 200, num_heads=4)
    assert (layer.q.out_features, layer.v.out_features) == (100, 200)
    for project in (layer.q, layer.k, layer.v):
        assert_normal(project.weight, math.sqrt(2 / 1000))
    assert not layer.ogate_preact.weight.any()
    assert_normal(layer.out_proj.weight, 2 / math.sqrt(200))
    assert not layer.igate_preact.weight.any()
    assert not layer.fgate_preact.weight.any()
    assert (layer.igate_preact.bias == -10).all()
    assert (layer.fgate_preact.bias == torch.linspace(3, 6, 4)).all()
    assert (layer.multihead_norm.weight == 1).all()
