"""ReLiT: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, assert_orthogonal, linear, sigmoid
from scanl import layers
from tests.layers.memory.equations import expanded, gated_outer_products

pytestmark = pytest.mark.cells_by_loop("name")


def relit(layer, xs):
    H, K = layer.num_heads, layer.head_dim
    C, s, ys = [0] * H, [0] * H, []
    for x in xs:
        o = []
        for h, (k, q, v, beta, gamma, (p1, p3)) in enumerate(gated_outer_products(layer, x, 2)):
            k, gamma = expanded(F.relu(k), F.relu(p1)), expanded(sigmoid(gamma), sigmoid(p3))
            q = F.relu(layer.query_weight[h] @ q + layer.query_bias[h])
            q, write = expanded(q[:K], q[K:]), torch.outer(sigmoid(beta), gamma)
            C[h] = (1 - write) * C[h] + write * torch.outer(v, k)
            s[h] = (1 - gamma) * s[h] + gamma * k
            o.append(C[h] @ q / (s[h] @ q + layer.eps))
        ys.append(linear(layer.project, torch.cat(o)))
    return ys


EQUATIONS = {
    "relit": (lambda: layers.build("relit", DIM, num_heads=2, head_dim=5, eta=3), relit),
    "relit_narrow": (lambda: layers.build("relit", DIM, num_heads=1, head_dim=6, eps=0.5), relit),
}

WRONG = [
    ("relit", {"eta": 0}, "eta is 0, expected at least 1"),
]


@pytest.mark.parametrize("name", ["relit", "arelit"])
def test_init_of_relit(name):
    """In the released code of `relit` each map of each head is a matrix of its own, in that of `arelit` one map is."""
    layer = layers.build(name, 32, num_heads=2, head_dim=8, eta=4)
    alone = name == "relit"
    for project, rows in ((layer.linear_kqvbetagammas, 8), (layer.linear_p1p2p3, 4), (layer.project, 32)):
        for block in project.weight.split(rows if alone else len(project.weight)):
            assert_orthogonal(block, math.sqrt(2))
        assert not project.bias.any()
    if alone:
        for head in layer.query_weight:
            assert_orthogonal(head[:8], math.sqrt(2))
            assert_orthogonal(head[8:], math.sqrt(2))
        assert not layer.query_bias.any()
