"""RDN: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, sigmoid
from scanl import layers
from tests.layers.memory.equations import delta

pytestmark = pytest.mark.cells_by_loop("name")


def rdn(layer, xs):
    H, K = layer.num_heads, layer.head_dim
    S, last, ys = [torch.zeros(K, K)] * H, [torch.zeros(K)] * H, []
    for x in xs:
        parts = linear(layer.slow_net, x).view(H, -1)
        for h in range(H):
            q, k, v, b = parts[h].split([K, K, K, 1])
            back = torch.tanh(last[h])
            q, k = torch.exp(q + back @ layer.R_q[0, h]), torch.exp(k + back @ layer.R_k[0, h])
            v, beta = v + back @ layer.R_v[0, h], sigmoid(b + layer.r_b[0, h] @ back)
            S[h], o = delta(S[h], q / q.sum(), k / k.sum(), v, beta)
            last[h] = o * math.sqrt(K)
        ys.append(linear(layer.out_linear, torch.cat(last)))
    return ys


EQUATIONS = {"rdn": (lambda: layers.build("rdn", DIM, num_heads=2), rdn)}

WRONG = [("rdn", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8")]


def test_init_of_rdn():
    layer = layers.build("rdn", 256)
    for weight in (layer.R_q, layer.R_k, layer.R_v, layer.r_b):
        assert_normal(weight, 32**-0.5)
    for project in (layer.slow_net, layer.out_linear):
        assert_uniform(project.weight, -1 / 16, 1 / 16)
    assert layer.slow_net.out_features == 8 * 97
