"""ReLiT: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, assert_orthogonal, linear, sigmoid
from scanl import layers, ops
from scanl.models import Stack
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

WRONG = [("relit", {"eta": 0}, "eta is 0, expected at least 1")]


@pytest.mark.parametrize("name", ["relit", "arelit"])
def test_init_of_relit(name):
    """In the released code of `relit` each map of each head is a matrix of its own, in that of `arelit` one map is."""
    layer = layers.build(name, 32, num_heads=2, head_dim=8, eta=4)
    alone = name == "relit"
    for project, rows in ((layer.linear_kqvbetagammas, 8), (layer.linear_p1p2p3, 4), (layer.project, 32)):
        for block in project.weight.split(rows if alone else len(project.weight)):
            assert_orthogonal(block, math.sqrt(2))
    (k, *others), (p1, *gates) = (
        linear.bias.view(2, vectors, -1).unbind(1)
        for linear, vectors in ((layer.linear_kqvbetagammas, 5), (layer.linear_p1p2p3, 2 if alone else 3))
    )
    assert all((bias == alone).all() for bias in (k, p1))
    assert not any(bias.any() for bias in (*others, *gates, layer.project.bias))
    if alone:
        for head in layer.query_weight:
            assert_orthogonal(head[:8], math.sqrt(2))
            assert_orthogonal(head[8:], math.sqrt(2))
        assert (layer.query_bias == 1).all()


def test_a_deep_stack_starts_with_gradients_of_the_size_of_its_input():
    """Of 12 layers. With biases of 0 the gradient is up to 60 times as long, and the parameters' 600."""
    for seed in range(3):
        torch.manual_seed(seed)
        stack, x = Stack(32, 12, "relit", channel_mixer="none"), torch.randn(1, 16, 32, requires_grad=True)
        with ops.backend("parallel", "reference"):
            y, _ = stack(x)
        (y * torch.randn_like(y)).sum().div(y.numel() ** 0.5).backward()
        assert x.grad.norm() < 8
        assert sum(p.grad.square().sum() for p in stack.parameters()) < 100**2
