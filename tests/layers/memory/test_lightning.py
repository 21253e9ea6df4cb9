"""Lightning: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, linear, rms, sigmoid, silu
from scanl import layers
from tests.layers.memory.equations import in_a_stack

pytestmark = pytest.mark.cells_by_loop("name")


def lightning(layer, xs, depth=0.0):
    """depth: index of the layer over that of the highest."""
    H, K = layer.num_heads, layer.head_dim
    S, ys = torch.zeros(H, K, K), []
    for x in xs:
        q, k, v = silu(linear(layer.qkv_proj, x)).view(H, 3, K).unbind(1)
        decays = [math.exp(-(2 ** (-8 * (h + 1) / H)) * (1 - depth + 1e-5)) for h in range(H)]
        S = torch.stack([decays[h] * S[h] + torch.outer(k[h], v[h]) for h in range(H)])
        o = rms(torch.cat([S[h].T @ q[h] for h in range(H)]), 1e-6) * layer.norm.weight
        ys.append(linear(layer.out_proj, o * sigmoid(linear(layer.output_gate, x))))
    return ys


EQUATIONS = {
    "lightning": (lambda: layers.build("lightning", DIM, num_heads=3, head_dim=2), lightning),
    "lightning_in_a_stack": (
        lambda: in_a_stack("lightning", 1, 4, num_heads=2),
        lambda layer, xs: lightning(layer, xs, 1 / (3 + 1e-5)),
    ),
}

WRONG = [
    ("lightning", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    ("lightning", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
]


@pytest.mark.parametrize("name", ["lightning", "transnormerllm"])
def test_init_of_lightning(name):
    layer = layers.build(name, 256)
    projections = [module for module in layer.children() if isinstance(module, torch.nn.Linear)]
    assert len(projections) == {"lightning": 3, "transnormerllm": 2}[name]
    for project in projections:
        assert_normal(project.weight, 0.02)
    if name == "transnormerllm":
        torch.testing.assert_close(layer.lrpe.theta.flatten(), 10000 ** (-2 * torch.arange(256) / 256))
    else:
        assert (layer.norm.weight == 1).all()
