"""PaTHAttention: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_normal, convolve, rms, sigmoid, silu, unit
from scanl import layers
from scanl.layers import Attention


def path_attention(layer, xs):
    """Every token rewrites the keys before it, and is read by plain attention."""
    shared, K = layer.num_heads // layer.num_kv_heads, layer.head_dim
    projections = list(layer.w_proj) if isinstance(layer.w_proj, torch.nn.Sequential) else [layer.w_proj]
    ws = list(xs)
    for project in projections:
        ws = [project(w) for w in ws]
    ws = [silu(w).view(-1, K) for w in convolve(ws, layer.w_conv1d)]
    keys, values, ys = [], [], []
    for x, w in zip(xs, ws, strict=True):
        beta = 2 * sigmoid(layer.bt_proj(x))
        w = torch.stack([unit(row) for row in w])
        keys = [torch.stack([k - b * (k @ u) * u for k, b, u in zip(key, beta, w, strict=True)]) for key in keys]
        q, k = layer.q_proj(x).view(-1, K), layer.k_proj(x).view(-1, K)
        if layer.maybe_q_norm is not None:
            q = torch.stack([rms(row) for row in q]) * layer.maybe_q_norm.weight
            k = torch.stack([rms(row) for row in k]) * layer.maybe_k_norm.weight
        keys.append(k)
        values.append(layer.v_proj(x).view(-1, K))
        out = []
        for head in range(layer.num_heads):
            weights = torch.exp(torch.stack([key[head // shared] @ q[head] / math.sqrt(K) for key in keys]))
            weights = weights / weights.sum()
            out.append(sum(p * value[head // shared] for p, value in zip(weights, values, strict=True)))
        ys.append(layer.o_proj(torch.cat(out)))
    return ys


EQUATIONS = {
    "path_attention": (
        lambda: layers.build("path_attention", DIM, num_heads=4, num_kv_heads=2, max_length=T, rank=3),
        path_attention,
    ),
    "path_attention_normed": (
        lambda: layers.build(
            "path_attention", DIM, num_heads=2, max_length=64, rank=None, conv_bias=True, qk_norm=True
        ),
        path_attention,
    ),
}

WRONG = [
    ("path_attention", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("path_attention", {"num_kv_heads": 3}, "num_kv_heads is 3, expected a divisor of num_heads=8"),
    ("path_attention", {"rank": 0}, "rank is 0, expected at least 1"),
]


def test_init_of_path_attention():
    layer = layers.build("path_attention", 256, qk_norm=True)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, *layer.w_proj, layer.bt_proj, layer.o_proj):
        assert_normal(linear.weight, 0.02)
    assert not layer.bt_proj.bias.any()
    assert (layer.maybe_q_norm.weight == 1).all()
    assert layer.w_proj[0].weight.shape == (32, 256)


@pytest.mark.usefixtures("double")
def test_path_attention_over_several_chunks():
    """As in pieces that end elsewhere, one of two tokens; and without reflections it is attention without positions."""
    layer, x = layers.build("path_attention", DIM, num_heads=2, max_length=150), torch.randn(2, 150, DIM)
    whole, last = layer(x)
    y, state = layer(x[:, :90])
    z, state = layer(x[:, 90:148], state)
    few, state = layer(x[:, 148:], state)
    torch.testing.assert_close(torch.cat([y, z, few], 1), whole)
    torch.testing.assert_close(state.memory.keys, last.memory.keys)
    layer.bt_proj.bias.data.fill_(-1e3)
    plain = Attention(DIM, 2, max_length=150, rope_fraction=0.0)
    plain.load_state_dict({key: layer.state_dict()[key] for key in plain.state_dict()})
    torch.testing.assert_close(layer(x)[0], plain(x)[0])
