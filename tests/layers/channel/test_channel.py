"""Channel mixers: each against its equation, step by step, and what only it knows."""

import pytest
import torch

from by_hand import DIM, T, relu_squared, shaken, sigmoid, with_before
from scanl.errors import ConfigError
from scanl.layers.channel.gated_mlp import GatedMLP
from scanl.layers.channel.rwkv_channel_mix import RWKV4ChannelMix, RWKV6ChannelMix, RWKV7ChannelMix
from scanl.models import Stack


def rwkv4_channel_mix(layer, xs):
    ys = []
    for x, before in with_before(xs):
        r = layer.time_mix_receptance[0, 0] * x + (1 - layer.time_mix_receptance[0, 0]) * before
        k = layer.time_mix_key[0, 0] * x + (1 - layer.time_mix_key[0, 0]) * before
        ys.append(sigmoid(layer.receptance.weight @ r) * (layer.value.weight @ relu_squared(layer.key.weight @ k)))
    return ys


def rwkv6_channel_mix(layer, xs):
    ys = []
    for x, before in with_before(xs):
        r, k = (x + (before - x) * getattr(layer, f"time_maa_{name}")[0, 0] for name in "rk")
        ys.append(sigmoid(layer.receptance.weight @ r) * (layer.value.weight @ relu_squared(layer.key.weight @ k)))
    return ys


def rwkv7_channel_mix(layer, xs):
    ys = []
    for x, before in with_before(xs):
        ys.append(layer.value.weight @ relu_squared(layer.key.weight @ (x + (before - x) * layer.x_k[0, 0])))
    return ys


def sglu(layer, xs):
    return [layer.down.weight @ ((layer.gate.weight @ x) * (layer.up.weight @ x)) for x in xs]


EQUATIONS = {
    "gated_mlp_identity": (lambda: GatedMLP(DIM, activation="identity"), sglu),
    "rwkv4_channel_mix": (lambda: RWKV4ChannelMix(DIM, 10), rwkv4_channel_mix),
    "rwkv6_channel_mix": (lambda: RWKV6ChannelMix(DIM, 10), rwkv6_channel_mix),
    "rwkv7_channel_mix": (lambda: RWKV7ChannelMix(DIM, 10), rwkv7_channel_mix),
}


@pytest.mark.parametrize(("name", "options"), [("rwkv4", {}), ("rwkv6", {"head_dim": 4}), ("rwkv7", {"head_dim": 4})])
def test_channel_mixers_carry_a_state(name, options):
    stack = shaken(Stack(DIM, 2, name, layer_options=options, channel_mixer=name), 0.3)
    x = torch.randn(2, T, DIM)
    whole, last = stack(x)
    left, state = stack(x[:, :3])
    right, state = stack(x[:, 3:], state)
    torch.testing.assert_close(torch.cat([left, right], 1), whole)
    torch.testing.assert_close(state[1].channel, last[1].channel)
    assert last[1].channel.shape == (2, 1, DIM)


WRONG = [
    (lambda: RWKV7ChannelMix(8, 0), "rwkv7: hidden_dim is 0, expected at least 1"),
    (lambda: RWKV6ChannelMix(8, 0), "rwkv6: hidden_dim is 0, expected at least 1"),
    (lambda: RWKV4ChannelMix(8, 0), "rwkv4: hidden_dim is 0, expected at least 1"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
