"""Titans: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, linear, rms, sigmoid, silu, unit
from scanl import layers
from tests.layers.memory.equations import gradients, learned, projected

pytestmark = pytest.mark.cells_by_loop("name")


def titans(layer, xs):
    H, K, c = layer.num_heads, layer.head_dim, layer.chunk_size
    norms = list(zip(layer.memory_norm_weight, layer.memory_norm_bias, strict=True))
    M = [[layer.get_parameter(f"M{n + 1}")[h] for n in range(layer.depth)] for h in range(H)]
    Z, none, ys = [[torch.zeros_like(m) for m in head] for head in M], [0.0] * layer.depth, []
    start = M
    for t, (x, (q, k, v)) in enumerate(zip(xs, projected(layer, xs, silu), strict=True)):
        if t % c == 0:
            start = [list(head) for head in M]
        alpha, eta, theta = (
            sigmoid(linear(project, x)) for project in (layer.alpha_proj, layer.eta_proj, layer.theta_proj)
        )
        read = []
        for h in range(H):
            query, key, value = (part.view(H, K)[h] for part in (q, k, v))
            found, _ = gradients(start[h], [torch.zeros(m.shape[1]) for m in start[h]], norms[h], unit(key), value)
            Z[h] = [eta[h] * z - theta[h] * 2 / K * g for z, g in zip(Z[h], found, strict=True)]
            M[h] = [(1 - alpha[h]) * m + z for m, z in zip(M[h], Z[h], strict=True)]
            read.append(rms(learned(M[h], none, norms[h], unit(query))) * layer.o_norm.weight)
        ys.append(linear(layer.o_proj, torch.cat(read) * sigmoid(linear(layer.g_proj, x))))
    return ys


EQUATIONS = {
    "titans": (lambda: layers.build("titans", DIM, num_heads=2, chunk_size=3), titans),
    "titans_each_step": (
        lambda: layers.build("titans", DIM, num_heads=1, depth=1, chunk_size=1, conv_size=None),
        titans,
    ),
}

WRONG = [
    ("titans", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"),
    ("titans", {"depth": 3}, "depth is 3, expected 1 or 2"),
]


def test_init_of_titans():
    layer = layers.build("titans", 256)
    assert (layer.num_heads, layer.depth, layer.chunk_size) == (4, 2, 16)
    assert_uniform(layer.M1, -math.sqrt(6 / 320), math.sqrt(6 / 320))
    assert_uniform(layer.M2, -math.sqrt(6 / 320), math.sqrt(6 / 320))
    assert (layer.memory_norm_weight == 1).all()
    assert not layer.memory_norm_bias.any()
    assert_uniform(layer.alpha_proj.weight, -1 / 16, 1 / 16)
    starts = [sigmoid(linear.bias) for linear in (layer.alpha_proj, layer.eta_proj, layer.theta_proj)]
    torch.testing.assert_close(torch.stack(starts), torch.tensor([[0.01], [0.5], [0.01]]).expand(3, 4))
