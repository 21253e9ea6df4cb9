"""RWKV5: its equation step by step, how it starts, and what it refuses."""

import torch

from by_hand import DIM, assert_orthogonal, channels, silu, with_before
from scanl.layers import RWKV5
from scanl.layers.channel.rwkv_channel_mix import RWKV5ChannelMix
from tests.layers.rwkv.equations import blocks, group_norm
from tests.layers.rwkv.test_rwkv4 import rwkv4_channel_mix

MATRICES = {"r": "receptance", "k": "key", "v": "value", "g": "gate"}


def rwkv5(layer, xs):
    """The sum over all steps before, as the paper writes it, with the program's division by 8 before the norm."""
    H, N = layer.time_decay.shape
    w, past, ys = torch.exp(-torch.exp(layer.time_decay)), [], []
    norm = torch.nn.GroupNorm(H, H * N, eps=1e-5)
    norm.load_state_dict(layer.ln_x.state_dict())
    for t, (x, before) in enumerate(with_before(xs)):
        r, k, v, g = (
            getattr(layer, matrix).weight @ (mu * x + (1 - mu) * before)
            for matrix, mu in ((matrix, getattr(layer, f"time_mix_{name}")[0, 0]) for name, matrix in MATRICES.items())
        )
        r, k, v = (each.view(H, N) for each in (r, k, v))
        o = []
        for h in range(H):
            seen = torch.outer(layer.time_faaaa[h] * k[h], v[h])
            for i, (key, value) in enumerate(past):
                seen = seen + torch.outer(w[h] ** (t - 1 - i) * key[h], value[h])
            o.append(seen.T @ r[h] / 8)
        past.append((k, v))
        ys.append(layer.output.weight @ (group_norm(torch.stack(o), norm) * silu(g)))
    return ys


def start_of_rwkv5(dim, a, c):
    slow = channels(lambda j: (j / dim) ** (c / 2), dim)
    return {
        "time_mix_k": channels(lambda j: (j / dim) ** c, dim),
        "time_mix_v": channels(lambda j: (j / dim) ** c + 0.3 * a, dim),
        "time_mix_r": slow,
        "time_mix_g": slow,
        "time_decay": channels(lambda j: -6 + 5 * (j / (dim - 1)) ** (0.7 + 1.3 * a), dim),
        "time_faaaa": channels(lambda j: a * (1 - j / (dim - 1)) + 0.1 * ((j + 1) % 3 - 1), dim),
    }


EQUATIONS = {
    "rwkv5_channel_mix": (lambda: RWKV5ChannelMix(DIM, 10), rwkv4_channel_mix),
    "rwkv5": (lambda: RWKV5(DIM, 4), rwkv5),
}

WRONG = [("rwkv5", {"head_dim": 5}, "head_dim is 5, expected a divisor of dim=")]

REFUSED = [(lambda: RWKV5ChannelMix(8, 0), "rwkv5: hidden_dim is 0, expected at least 1")]


def test_init_of_rwkv5():
    for layer, mixer, a, c in blocks("rwkv5", 128, 3):
        for name, value in start_of_rwkv5(128, a, c).items():
            torch.testing.assert_close(getattr(layer, name).flatten(), value)
        for mu in (mixer.time_mix_key, mixer.time_mix_receptance):
            torch.testing.assert_close(mu.flatten(), channels(lambda j, c=c: (j / 128) ** c, 128))
        for linear, gain in ((layer.receptance, 1), (layer.value, 1), (layer.key, 0.1), (layer.gate, 0.1)):
            assert_orthogonal(linear.weight, gain)
        for zero in (layer.output, mixer.receptance, mixer.value):
            assert not zero.weight.any()
        torch.testing.assert_close(layer.ln_x.weight, torch.full((128,), (1 - c + 1 / 3) ** 0.7))
        assert mixer.key.weight.shape == (448, 128)
        assert_orthogonal(mixer.key.weight, 1)
