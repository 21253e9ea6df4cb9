"""Mamba: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, convolve, silu
from scanl.layers import Mamba
from tests.layers.ssm.equations import held


def mamba(layer, xs, spans=None):
    mixed = [layer.in_proj.weight @ x for x in xs]
    us = [silu(v) for v in convolve([v[: layer.width] for v in mixed], layer.conv1d)]
    h, ys = torch.zeros(layer.width, layer.state_dim), []
    A = -torch.exp(layer.A_log)
    for u, v, span in zip(us, mixed, held(spans, xs), strict=True):
        low, B, C = (layer.x_proj.weight @ u).split([layer.rank, layer.state_dim, layer.state_dim])
        delta = torch.log(1 + torch.exp(layer.dt_proj.weight @ low + layer.dt_proj.bias)) * span
        h = torch.exp(delta[:, None] * A) * h + (delta * u)[:, None] * B
        ys.append(layer.out_proj.weight @ ((h @ C + layer.D * u) * silu(v[layer.width :])))
    return ys


EQUATIONS = {
    "mamba": (lambda: Mamba(DIM, state_dim=4, conv_size=3, rank=2), mamba),
    "mamba_without_a_bias": (lambda: Mamba(DIM, state_dim=2, expand=1.5, conv_bias=False), mamba),
}

WRONG = [
    ("mamba", {"state_dim": 0}, "state_dim is 0, expected at least 1"),
    ("mamba", {"expand": 0.1}, "expand is 0.1, expected at least 1/8 because of dim=8"),
    ("mamba", {"rank": "all"}, "rank is 'all', expected an integer or None"),
    ("mamba", {"dt_min": 0.2}, "dt_max is 0.1, expected at least dt_min=0.2"),
    ("mamba", {"dt_init": "zero"}, "unknown dt_init 'zero'; known: random, constant"),
]


@pytest.mark.usefixtures("double")
def test_init_of_mamba():
    layer = Mamba(64, state_dim=5, expand=100)
    torch.testing.assert_close(layer.A_log.exp(), torch.arange(1.0, 6).expand(6400, 5))
    torch.testing.assert_close(layer.D.detach(), torch.ones(6400))
    assert layer.dt_proj.weight.shape == (6400, 4)
    assert_uniform(layer.dt_proj.weight, -0.5, 0.5)
    assert_uniform(torch.log(torch.log(1 + layer.dt_proj.bias.exp())), math.log(1e-3), math.log(1e-1))
    layer = Mamba(16, dt_init="constant", rank=9, dt_min=1e-6, dt_max=1e-5)
    torch.testing.assert_close(layer.dt_proj.weight.detach(), torch.full((32, 9), 1 / 3))
    torch.testing.assert_close(torch.log(1 + layer.dt_proj.bias.exp()), torch.full((32,), 1e-4))
