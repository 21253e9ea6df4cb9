"""RWKV6: its equation step by step, how it starts, and what it refuses."""

import torch

from by_hand import DIM, assert_orthogonal, assert_uniform, channels, relu_squared, sigmoid, with_before
from scanl import layers
from scanl.layers import RWKV6
from scanl.layers.channel.rwkv_channel_mix import RWKV6ChannelMix
from tests.layers.rwkv.equations import blocks, group_norm


def rwkv6_channel_mix(layer, xs):
    ys = []
    for x, before in with_before(xs):
        r, k = (x + (before - x) * getattr(layer, f"time_maa_{name}")[0, 0] for name in "rk")
        ys.append(sigmoid(layer.receptance.weight @ r) * (layer.value.weight @ relu_squared(layer.key.weight @ k)))
    return ys


def rwkv6(layer, xs):
    heads = layer.time_faaaa.shape
    S, ys = torch.zeros(heads[0], heads[1], heads[1]), []
    for x, before in with_before(xs):
        lora = torch.tanh((x + (before - x) * layer.time_maa_x[0, 0]) @ layer.time_maa_w1).view(5, -1)
        mixed = {}
        for slot, name in enumerate("wkvrg"):
            share = getattr(layer, f"time_maa_{name}")[0, 0] + lora[slot] @ layer.time_maa_w2[slot]
            mixed[name] = x + (before - x) * share
        r, k, v = (
            (getattr(layer, name).weight @ mixed[name[0]]).view(heads) for name in ("receptance", "key", "value")
        )
        d = layer.time_decay[0, 0] + torch.tanh(mixed["w"] @ layer.time_decay_w1) @ layer.time_decay_w2
        w = torch.exp(-torch.exp(d)).view(heads)
        o = torch.zeros(heads)
        for h in range(heads[0]):
            kv = torch.outer(k[h], v[h])
            o[h] = (S[h] + torch.diag(layer.time_faaaa[h]) @ kv).T @ r[h]
            S[h] = torch.diag(w[h]) @ S[h] + kv
        g = layer.gate.weight @ mixed["g"]
        ys.append(layer.output.weight @ (group_norm(o, layer.ln_x) * g * sigmoid(g)))
    return ys


def start_of_rwkv6(dim, a, c):
    flat = channels(lambda j: 1 - (j / dim) ** c, dim)
    slow = channels(lambda j: 1 - (j / dim) ** (c / 2), dim)
    return {
        **{f"time_maa_{name}": flat for name in "xwk"},
        "time_maa_v": flat - 0.3 * a,
        **{f"time_maa_{name}": slow for name in "rg"},
        "time_decay": channels(lambda j: -6 + 5 * (j / (dim - 1)) ** (0.7 + 1.3 * a), dim),
        "time_faaaa": channels(lambda j: a * (1 - j / (dim - 1)) + 0.1 * ((j + 1) % 3 - 1), dim),
    }


EQUATIONS = {
    "rwkv6_channel_mix": (lambda: RWKV6ChannelMix(DIM, 10), rwkv6_channel_mix),
    "rwkv6": (lambda: RWKV6(DIM, 4, 3, 5), rwkv6),
}

REFUSED = [(lambda: layers.build("rwkv6", 8, head_dim=3), "rwkv6: head_dim is 3, expected a divisor of dim=8")]


def test_init_of_rwkv6():
    for layer, mixer, a, c in blocks("rwkv6", 128, 3):
        expected = start_of_rwkv6(128, a, c)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for name in ("time_maa_k", "time_maa_r"):
            torch.testing.assert_close(
                getattr(mixer, name).flatten(), channels(lambda j, c=c: 1 - (j / 128) ** c**3, 128)
            )
        assert layer.time_maa_w1.shape == (128, 160)
        assert layer.time_decay_w1.shape == (128, 64)
        assert layer.time_faaaa.shape == (2, 64)
        assert_uniform(layer.time_maa_w2, -0.01, 0.01)
        assert_uniform(layer.time_decay_w2, -0.01, 0.01)
        for zero in (layer.time_maa_w1, layer.time_decay_w1, layer.output.weight):
            assert not zero.any()
        for linear, gain in ((layer.receptance, 1), (layer.value, 1), (layer.key, 0.1), (layer.gate, 0.1)):
            assert_orthogonal(linear.weight, gain)
        torch.testing.assert_close(layer.ln_x.weight, torch.full((128,), (1 - c + 1 / 3) ** 0.7))
        assert layer.ln_x.eps == 64e-5
        assert mixer.key.weight.shape == (448, 128)
        assert_orthogonal(mixer.key.weight, 1)
        assert not mixer.receptance.weight.any()
        assert not mixer.value.weight.any()
