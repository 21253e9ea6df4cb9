"""RWKV4: its equation step by step, how it starts, and what it refuses."""

import math

import torch

from by_hand import DIM, assert_orthogonal, channels, relu_squared, sigmoid, with_before
from scanl import layers
from scanl.layers import RWKV4
from scanl.layers.channel.rwkv_channel_mix import RWKV4ChannelMix
from tests.layers.rwkv.equations import blocks


def rwkv4_channel_mix(layer, xs):
    ys = []
    for x, before in with_before(xs):
        r = layer.time_mix_receptance[0, 0] * x + (1 - layer.time_mix_receptance[0, 0]) * before
        k = layer.time_mix_key[0, 0] * x + (1 - layer.time_mix_key[0, 0]) * before
        ys.append(sigmoid(layer.receptance.weight @ r) * (layer.value.weight @ relu_squared(layer.key.weight @ k)))
    return ys


def rwkv4(layer, xs):
    """Sums over all steps before, as the paper writes them."""
    w, u = torch.exp(layer.time_decay), layer.time_first
    mixed = {name: getattr(layer, f"time_mix_{name}")[0, 0] for name in ("key", "value", "receptance")}
    ks, vs, ys = [], [], []
    for t, (x, before) in enumerate(with_before(xs)):
        k, v, r = (getattr(layer, name).weight @ (mu * x + (1 - mu) * before) for name, mu in mixed.items())
        p, z = torch.exp(u + k) * v, torch.exp(u + k)
        for i in range(t):
            weight = torch.exp(-(t - 1 - i) * w + ks[i])
            p, z = p + weight * vs[i], z + weight
        ks.append(k)
        vs.append(v)
        ys.append(layer.output.weight @ (sigmoid(r) * p / z))
    return ys


def start_of_rwkv4(dim, a, c):
    return {
        "time_decay": channels(lambda j: -5 + 8 * (j / (dim - 1)) ** (0.7 + 1.3 * a), dim),
        "time_first": channels(lambda j: math.log(0.3) + 0.5 * ((j + 1) % 3 - 1), dim),
        "time_mix_key": channels(lambda j: (j / dim) ** c, dim),
        "time_mix_value": channels(lambda j: (j / dim) ** c + 0.3 * a, dim),
        "time_mix_receptance": channels(lambda j: (j / dim) ** (c / 2), dim),
    }


EQUATIONS = {
    "rwkv4_channel_mix": (lambda: RWKV4ChannelMix(DIM, 10), rwkv4_channel_mix),
    "rwkv4": (lambda: RWKV4(DIM, 6), rwkv4),
}

REFUSED = [(lambda: layers.build("rwkv4", 8, width=0), "rwkv4: width is 0, expected at least 1")]


def test_init_of_rwkv4():
    for layer, mixer, a, c in blocks("rwkv4", 12, 4):
        expected = start_of_rwkv4(12, a, c)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for name in ("time_mix_key", "time_mix_receptance"):
            torch.testing.assert_close(getattr(mixer, name).flatten(), expected["time_mix_key"])
        for zero in (layer.key, layer.receptance, layer.output, mixer.receptance, mixer.value):
            assert not zero.weight.any()
        assert_orthogonal(layer.value.weight, 1)
        assert_orthogonal(mixer.key.weight, 2)
    assert_orthogonal(RWKV4(8, 18).value.weight, 1.5)
