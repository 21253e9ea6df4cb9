"""Mamba2: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, linear, rms, silu, softplus
from scanl import layers
from tests.layers.memory.equations import assert_time_steps, convolved, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def mamba2(layer, xs):
    H, G, N = layer.num_heads, layer.num_groups, layer.state_dim
    inner = H * layer.head_dim
    widths = [inner, inner + 2 * G * N, H]
    mixed = [linear(layer.in_proj, x).split(widths) for x in xs]
    branches = convolved(layer.conv1d, [u for _, u, _ in mixed])
    S = [torch.zeros(N, layer.head_dim) for _ in range(H)]
    ys = []
    for (z, _, dt), u in zip(mixed, branches, strict=True):
        x, B, C = u[:inner].view(H, -1), u[inner : inner + G * N].view(G, N), u[inner + G * N :].view(G, N)
        delta = softplus(dt + layer.dt_bias)
        heads = []
        for h in range(H):
            group = h // (H // G)
            decay = torch.exp(-layer.A_log[h].exp() * delta[h])
            S[h] = decay * S[h] + torch.outer(B[group], delta[h] * x[h])
            heads.append(S[h].T @ C[group] + layer.D[h] * x[h])
        gated = torch.cat(heads) * silu(z)
        y = torch.cat([rms(part) for part in gated.chunk(G)]) * layer.norm.weight
        ys.append(linear(layer.out_proj, y))
    return ys


EQUATIONS = {
    "mamba2": (lambda: layers.build("mamba2", DIM, state_dim=3, head_dim=4), mamba2),
    "mamba2_groups": (
        lambda: layers.build(
            "mamba2", DIM, state_dim=3, head_dim=2, num_groups=4, conv_size=1, bias=True, conv_bias=False
        ),
        mamba2,
    ),
}

WRONG = [
    ("mamba2", {"head_dim": 5}, r"head_dim is 5, expected a divisor of expand \* dim, with expand=2 and dim=8"),
    (
        "mamba2",
        {"head_dim": 4, "num_groups": 3},
        r"num_groups is 3, expected a divisor of expand \* dim / head_dim, with",
    ),
    ("mamba2", {"state_dim": 0}, "state_dim is 0, expected at least 1"),
    ("mamba2", {"expand": 0}, "expand is 0, expected at least 1"),
    ("mamba2", {"head_dim": 4, "dt_min": 0}, "dt_min is 0, expected more than 0"),
    ("mamba2", {"head_dim": 4, "dt_min": 1.0}, "dt_max is 0.1, expected at least dt_min=1.0"),
]


def test_init_of_mamba2():
    layer = layers.build("mamba2", 4000, state_dim=1, head_dim=2, expand=1)
    assert_uniform(layer.A_log.exp(), 1, 16)
    assert_time_steps(layer.dt_bias)
    assert (layer.D == 1).all()
    assert (layer.norm.weight == 1).all()
    assert_uniform(layer.in_proj.weight, -1 / math.sqrt(4000), 1 / math.sqrt(4000))
    assert_uniform(layer.conv1d.weight, -1 / 2, 1 / 2)
    assert {"A_log", "D", "dt_bias"} <= undecayed(layer)
    assert layer.in_proj.bias is None
    layer = layers.build("mamba2", 64)
    assert layer.in_proj.weight.shape == (2 * 128 + 2 * 128 + 2, 64)
    assert layer.conv1d.weight.shape == (128 + 2 * 128, 1, 4)
