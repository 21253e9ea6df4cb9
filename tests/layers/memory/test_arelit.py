"""AReLiT: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, linear, sigmoid
from scanl import layers
from tests.layers.memory.equations import expanded, gated_outer_products

pytestmark = pytest.mark.cells_by_loop("name")


def arelit(layer, xs):
    H, r = layer.num_heads, layer.rank
    omegas = [-math.pi + 2 * math.pi * m / max(1, r - 1) for m in range(r)]
    ks, vs, s, ys = [[0] * r for _ in range(H)], [[0] * r for _ in range(H)], [0] * H, []
    for t, x in enumerate(xs):
        o = []
        for h, (k, q, v, beta, gamma, (p1, p2, p3)) in enumerate(gated_outer_products(layer, x, 3)):
            k, q = expanded(F.relu(k), F.relu(p1)), expanded(F.relu(q), F.relu(p2))
            gamma, beta, top = expanded(sigmoid(gamma), sigmoid(p3)), sigmoid(beta), 0
            for m in range(r):
                wave = math.cos(omegas[m] * (t + 2))
                ks[h][m] = (1 - gamma) * ks[h][m] + wave * gamma * k
                vs[h][m] = (1 - beta) * vs[h][m] + wave * beta * v
                top = top + (ks[h][m] @ q) * vs[h][m]
            s[h] = (1 - gamma) * s[h] + gamma * k
            o.append(top / (2 * r * (s[h] @ q) + layer.eps))
        ys.append(linear(layer.project, torch.cat(o)))
    return ys


EQUATIONS = {
    "arelit": (lambda: layers.build("arelit", DIM, num_heads=2, head_dim=5), arelit),
    "arelit_seven": (lambda: layers.build("arelit", DIM, num_heads=1, head_dim=6, eta=3, rank=7, eps=0.5), arelit),
}

WRONG = [
    ("arelit", {"head_dim": 0}, "head_dim is 0, expected at least 1"),
    ("arelit", {"rank": 0}, "rank is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
def test_arelit_with_many_frequencies_has_a_decay_of_rows_times_one_of_columns():
    torch.manual_seed(0)
    layer = layers.build("arelit", DIM, num_heads=1, head_dim=6, eta=3, rank=128, eps=1e-30)
    torch.nn.init.ones_(layer.linear_kqvbetagammas.bias)  # so that no denominator is 0
    torch.nn.init.ones_(layer.linear_p1p2p3.bias)
    xs, S, s = list(torch.randn(20, DIM)), 0, 0
    y, _ = layer(torch.stack(xs)[None])
    for t, x in enumerate(xs):
        ((k, q, v, beta, gamma, (p1, p2, p3)),) = gated_outer_products(layer, x, 3)
        k, q = expanded(F.relu(k), F.relu(p1)), expanded(F.relu(q), F.relu(p2))
        gamma, beta = expanded(sigmoid(gamma), sigmoid(p3)), sigmoid(beta)
        S = torch.outer(1 - beta, 1 - gamma) * S + torch.outer(beta * v, gamma * k)
        s = (1 - gamma) * s + gamma * k
        if t > 3:
            torch.testing.assert_close(4 * y[0, t], layer.project(S @ q / (s @ q)), rtol=0, atol=0.05)
