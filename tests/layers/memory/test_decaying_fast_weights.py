"""DecayingFastWeights: its equation step by step, how it starts, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_uniform, linear, sigmoid
from scanl import layers

pytestmark = pytest.mark.cells_by_loop("name")


def decaying_fast_weights(layer, xs):
    H, K, V = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    S, ys = torch.zeros(H, K, V), []
    for x in xs:
        q, k, fk = (linear(project, x).view(H, K) for project in (layer.q_proj, layer.k_proj, layer.fk_proj))
        v, fv = (linear(project, x).view(H, V) for project in (layer.v_proj, layer.fv_proj))
        S = torch.stack(
            [torch.outer(sigmoid(fk[h]), sigmoid(fv[h])) * S[h] + torch.outer(k[h], v[h]) for h in range(H)]
        )
        ys.append(linear(layer.o_proj, torch.cat([S[h].T @ q[h] for h in range(H)])))
    return ys


EQUATIONS = {
    "decaying_fast_weights": (
        lambda: layers.build("decaying_fast_weights", DIM, num_heads=2, expand_k=0.5, expand_v=1.5),
        decaying_fast_weights,
    ),
    "decaying_fast_weights_unbiased": (
        lambda: layers.build("decaying_fast_weights", DIM, num_heads=4, bias=False),
        decaying_fast_weights,
    ),
}

WRONG = [
    (
        "decaying_fast_weights",
        {"num_heads": 3},
        "expand_k is 1.0, expected dim=8 times it to be a multiple of num_heads=3",
    )
]


def test_init_of_decaying_fast_weights():
    layer = layers.build("decaying_fast_weights", 64)
    for project in (layer.q_proj, layer.k_proj, layer.v_proj, layer.fk_proj, layer.fv_proj, layer.o_proj):
        assert_uniform(project.weight, -1 / 8, 1 / 8)
