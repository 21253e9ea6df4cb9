"""GLA: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, linear, rms, sigmoid, silu
from scanl import layers
from tests.layers.memory.equations import projected

pytestmark = pytest.mark.cells_by_loop("name")


def gla(layer, xs):
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    S, ys = torch.zeros(H, K, V), []
    identity = layer.q_conv1d is None
    for x, (q, k, v) in zip(xs, projected(layer, xs, (lambda v: v) if identity else silu), strict=True):
        alpha = sigmoid(linear(layer.gk_proj[1], linear(layer.gk_proj[0], x))) ** (1 / layer.gate_logit_normalizer)
        read = []
        for h, (q_h, k_h, v_h) in enumerate(zip(q.view(H, K), k.view(H, K), v.view(H, V), strict=True)):
            now = torch.diag(alpha.view(H, K)[h]) @ S[h] + torch.outer(k_h, v_h)
            S = torch.cat([S[:h], now[None], S[h + 1 :]])
            read.append(rms(now.T @ q_h / math.sqrt(K)))
        if layer.g_proj is None:
            y = torch.cat([o * layer.g_norm.weight for o in read])
        else:
            gated = torch.cat([o * layer.g_norm_swish_gate.weight for o in read])
            y = gated * silu(linear(layer.g_proj, x))
        ys.append(linear(layer.o_proj, y))
    return ys


EQUATIONS = {
    "gla": (lambda: layers.build("gla", DIM, num_heads=2, gate_rank=3), gla),
    "gla_convolved": (
        lambda: layers.build(
            "gla",
            DIM,
            expand_k=1.0,
            expand_v=0.5,
            num_heads=4,
            conv_size=4,
            conv_bias=True,
            output_gate=False,
            gate_logit_normalizer=2,
        ),
        gla,
    ),
}

WRONG = [
    ("gla", {"expand_k": 0.3}, "expand_k is 0.3, expected dim=8 times it to be a multiple of num_heads=4"),
    ("gla", {"num_heads": 3}, "expand_k is 0.5, expected dim=8 times it to be a multiple of num_heads=3"),
    ("gla", {"gate_rank": 0}, "gate_rank is 0, expected at least 1"),
]


def test_init_of_gla():
    layer = layers.build("gla", 256)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, *layer.gk_proj, layer.o_proj):
        limit = 2**-2.5 * math.sqrt(6 / sum(project.weight.shape))
        assert_uniform(project.weight, -limit, limit)
    assert not layer.gk_proj[1].bias.any()
    assert (layer.q_proj.weight.shape, layer.v_proj.weight.shape) == ((128, 256), (256, 256))
    assert layer.gk_proj[0].weight.shape == (16, 256)
    assert (layer.g_norm_swish_gate.weight == 1).all()
