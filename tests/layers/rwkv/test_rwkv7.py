"""RWKV7: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, T, assert_orthogonal, assert_uniform, channels, relu_squared, shaken, sigmoid, with_before
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import RWKV7
from scanl.layers.channel.rwkv_channel_mix import RWKV7ChannelMix
from scanl.models import Stack
from tests.layers.rwkv.equations import blocks, group_norm


def rwkv7_channel_mix(layer, xs):
    ys = []
    for x, before in with_before(xs):
        ys.append(layer.value.weight @ relu_squared(layer.key.weight @ (x + (before - x) * layer.x_k[0, 0])))
    return ys


def rwkv7(layer, xs, firsts=None):
    """firsts: the values of the lowest layer, for a layer above it."""
    heads = layer.r_k.shape
    S, ys = torch.zeros(heads[0], heads[1], heads[1]), []  # rows of values, columns of keys, as the paper has it
    for t, (x, before) in enumerate(with_before(xs)):
        mixed = {name: x + (before - x) * getattr(layer, f"x_{name}")[0, 0] for name in "rwkvag"}
        r, k, v = layer.receptance.weight @ mixed["r"], layer.key.weight @ mixed["k"], layer.value.weight @ mixed["v"]
        d = layer.w0[0, 0] + torch.tanh(mixed["w"] @ layer.w1) @ layer.w2
        w = torch.exp(-torch.exp(-torch.log(1 + torch.exp(-d)) - 0.5)).view(heads)
        a = sigmoid(layer.a0[0, 0] + mixed["a"] @ layer.a1 @ layer.a2)
        g = sigmoid(mixed["g"] @ layer.g1) @ layer.g2
        if firsts is not None:
            v = v + (firsts[t] - v) * sigmoid(layer.v0[0, 0] + mixed["v"] @ layer.v1 @ layer.v2)
        kappa = (k * layer.k_k[0, 0]).view(heads)
        k = k * (1 + (a - 1) * layer.k_a[0, 0])
        r, k, v, a = (part.view(heads) for part in (r, k, v, a))
        o, bonus = torch.zeros(heads), torch.zeros(heads)
        for h in range(heads[0]):
            unit = kappa[h] / torch.sqrt((kappa[h] ** 2).sum())
            S[h] = S[h] @ (torch.diag(w[h]) - torch.outer(unit, unit * a[h])) + torch.outer(v[h], k[h])
            o[h], bonus[h] = S[h] @ r[h], (r[h] * k[h] * layer.r_k[h]).sum() * v[h]
        ys.append(layer.output.weight @ ((group_norm(o, layer.ln_x) + bonus.flatten()) * g))
    return ys


EQUATIONS = {
    "rwkv7_channel_mix": (lambda: RWKV7ChannelMix(DIM, 10), rwkv7_channel_mix),
    "rwkv7": (lambda: RWKV7(DIM, 4, 3, 4, 5, 6), rwkv7),
}

REFUSED = [(lambda: layers.build("rwkv7", 8, head_dim=0), "rwkv7: head_dim is 0, expected at least 1")]


@pytest.mark.usefixtures("double")
def test_values_of_the_lowest_rwkv7_reach_those_above():
    low, high = tied = [RWKV7(DIM, 4, 3, 4, 5, 6) for _ in range(2)]
    for index, layer in enumerate(tied):
        layer.enter_stack(index, tied)
    assert not any(name.startswith("v") and name[1:].isdigit() for name, _ in low.named_parameters())
    shaken(low, 0.3), shaken(high, 0.3)
    x, z = torch.randn(1, T, DIM), torch.randn(1, T, DIM)
    memo = {}
    torch.testing.assert_close(low(x, memo=memo)[0][0], torch.stack(rwkv7(low, list(x[0]))))
    firsts = [low.value.weight @ (u + (before - u) * low.x_v[0, 0]) for u, before in with_before(list(x[0]))]
    torch.testing.assert_close(high(z, memo=memo)[0][0], torch.stack(rwkv7(high, list(z[0]), firsts)))
    with pytest.raises(ConfigError, match="rwkv7: memo has no values of the lowest RWKV-7 layer, expected them"):
        high(z)


def test_a_stack_hands_the_values_up():
    torch.manual_seed(0)
    stack = shaken(Stack(DIM, 3, "rwkv7", layer_options={"head_dim": 4}), 0.3)
    x = torch.randn(2, T, DIM)
    y, _ = stack(x)
    y.square().sum().backward()
    assert all(parameter.grad.any() for block in stack.blocks for parameter in block.mixer.parameters())
    expected, memo = x, {}
    for block in stack.blocks:
        expected = expected + block.mixer(block.mixer_norm(expected), memo=memo)[0]
        expected = expected + block.channel(block.channel_norm(expected))[0]
    torch.testing.assert_close(stack.norm(expected), y)
    compiled = torch.compile(stack, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], y)


def test_wrapped_rwkv7_stays_alone():
    stack = Stack(DIM, 2, "bidirectional", layer_options={"layer": "rwkv7", "layer_options": {"head_dim": 4}})
    assert stack(torch.randn(1, 3, DIM))[0].shape == (1, 3, DIM)


def test_init_of_rwkv7():
    dim, size = 128, 64
    zig = channels(lambda j: (z := (j % size - 31.5) / 31.5) * abs(z), dim)
    lin = channels(lambda j: j / (dim - 1) - 0.5, dim)
    for place, (layer, mixer, a, c) in enumerate(blocks("rwkv7", dim, 3)):
        expected = {
            "a0": -0.19 + 0.3 * zig + 0.4 * lin,
            "k_k": 0.71 - 0.1 * lin,
            "k_a": torch.full((dim,), 1.02),
            "r_k": torch.full((dim,), -0.04),
            "w0": -5.5 + 6 * channels(lambda j, a=a: (j / (dim - 1)) ** (1 + a**0.3), dim) + 2.5 * zig,
            **({"v0": 0.73 - 0.4 * lin} if place else {}),
        }
        for name, share in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            expected[f"x_{name}"] = channels(lambda j, e=share * c: 1 - (j / dim) ** e, dim)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for name, rank in {"w": 32, "a": 32, "g": 64, **({"v": 32} if place else {})}.items():
            first, second = getattr(layer, f"{name}1"), getattr(layer, f"{name}2")
            assert first.shape == (dim, rank)
            assert not first.any()
            assert_orthogonal(second, 0.1)
        assert_uniform(layer.receptance.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        assert_uniform(layer.value.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        assert_uniform(layer.key.weight, -0.05 / math.sqrt(dim), 0.05 / math.sqrt(dim))
        assert not layer.output.weight.any()
        assert layer.ln_x.eps == 64e-5
        torch.testing.assert_close(mixer.x_k.flatten(), channels(lambda j, e=c**4: 1 - (j / dim) ** e, dim))
        assert_uniform(mixer.key.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        assert mixer.key.weight.shape == (512, dim)
        assert not mixer.value.weight.any()
    assert_orthogonal(RWKV7(8, 4).w2, 0.2)
    assert RWKV7(1024).g1.shape == (1024, 160)
