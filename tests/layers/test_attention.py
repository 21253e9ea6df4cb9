"""Softmax attention: each layer against its equation, step by step, how it starts, and what only it knows."""

import math

import pytest
import torch
from by_hand import DIM, T, assert_normal

from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import Attention, WindowAttention
from scanl.layers import state as states


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


EQUATIONS = {
    "window_attention": (lambda: WindowAttention(DIM, 2, window=3), attention),
    "window_attention_shared": (lambda: WindowAttention(DIM, 6, 2, head_dim=4, window=4, bias=True), attention),
    "attention": (lambda: Attention(DIM, 2, max_length=T, rope_base=100.0), attention),
    "attention_unrotated": (lambda: Attention(DIM, 4, 2, max_length=64, rope_fraction=0), attention),
}


@pytest.mark.usefixtures("double")
def test_rotary_positions_are_relative_a_million_steps_on():
    layer, x = WindowAttention(DIM, 2, window=4), torch.randn(1, T, DIM)
    y, _ = layer(x)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        far = layer.to(dtype).init_state(1)._replace(position=torch.tensor([1_000_000]))
        _, memory = layer(torch.randn(1, 4, DIM, dtype=dtype), far)
        _, memory = layer(x[:, :3].to(dtype), memory)
        after, _ = layer(x[:, 3:].to(dtype), memory)
        torch.testing.assert_close(after.double(), y[:, 3:], rtol=0, atol=tolerance)


@pytest.mark.usefixtures("double")
def test_attention_has_room_for_max_length_only():
    layer = Attention(DIM, 2, max_length=5)
    message = "attention: x makes a sequence of {} steps, expected at most max_length=5"
    with pytest.raises(ShapeError, match=message.format(6)):
        layer(torch.randn(1, 6, DIM))
    _, state = layer(torch.randn(2, 4, DIM))
    _, state = layer.step(torch.randn(2, DIM), state)
    with pytest.raises(ShapeError, match=message.format(6)):
        layer.step(torch.randn(2, DIM), state)
    with pytest.raises(ShapeError, match=message.format(11)):
        layer(torch.randn(1, 8, DIM), states.index(state, [0, 1]), cu_seqlens=torch.tensor([0, 6, 8]))
    assert layer(torch.randn(1, 8, DIM), cu_seqlens=torch.tensor([0, 5, 8]))[0].shape == (1, 8, DIM)


@pytest.mark.usefixtures("double")
def test_init_of_attention():
    for layer in (WindowAttention(256, bias=True), Attention(256, bias=True)):
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            assert_normal(linear.weight, 1 / 16)
            assert not linear.bias.any()
    assert [linear.out_features for linear in (layer.k_proj, WindowAttention(256).k_proj)] == [256, 32]


WRONG = [
    ("window_attention", {"window": 0}, "window_attention: window is 0, expected at least 1"),
    ("window_attention", {"num_heads": 3}, "window_attention: num_heads is 3, expected a divisor of dim=8"),
    (
        "window_attention",
        {"rope_fraction": 1.5},
        "rope_fraction is 1.5, expected an even part, 0 to 1, of head_dim",
    ),
    ("attention", {"num_kv_heads": 3}, "attention: num_kv_heads is 3, expected a divisor of num_heads=8"),
    ("attention", {"num_heads": 0}, "attention: num_heads is 0, expected at least 1"),
    (
        "attention",
        {"num_heads": 8},
        "attention: rope_fraction is 1.0, expected an even part, 0 to 1, of head_dim=1",
    ),
    ("attention", {"max_length": 0}, "attention: max_length is 0, expected at least 1"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        layers.build(name, DIM, **options)
