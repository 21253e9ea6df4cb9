"""HGRN2: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, linear, rms, sigmoid, silu
from scanl import layers
from tests.layers.memory.equations import in_a_stack

pytestmark = pytest.mark.cells_by_loop("name")


def hgrn2(layer, xs):
    H, K = layer.dim // layer.head_dim, layer.head_dim
    bound, S, ys = layer.lower_bound(), torch.zeros(layer.dim // layer.head_dim, layer.head_dim, layer.head_dim), []
    for x in xs:
        f = (bound + (1 - bound) * sigmoid(linear(layer.f_proj, x))).view(H, K)
        q, v = silu(linear(layer.q_proj, x)).view(H, K), linear(layer.i_proj, x).view(H, K)
        S = torch.stack([torch.diag(f[h]) @ S[h] + torch.outer(1 - f[h], v[h]) for h in range(H)])
        o = torch.cat([S[h].T @ q[h] for h in range(H)]) / math.sqrt(K)
        ys.append(linear(layer.o_proj, rms(o, layer.g_norm.eps) * layer.g_norm.weight))
    return ys


def hgrn2_of_a_stack():
    """The third of four, whose bound is learned."""
    layer = in_a_stack("hgrn2", 2, 4, head_dim=4)
    layer._bound.lowest.gamma.requires_grad_(False).normal_()
    return layer


EQUATIONS = {"hgrn2": (lambda: layers.build("hgrn2", DIM), hgrn2), "hgrn2_in_a_stack": (hgrn2_of_a_stack, hgrn2)}

WRONG = [("hgrn2", {"head_dim": 3}, "head_dim is 3, expected a divisor of dim=8")]


@pytest.mark.parametrize("name", ["gsa", "abc", "hgrn2"])
def test_init_of_slots_and_hgrn2(name):
    layer = layers.build(name, 256)
    projections = [module for module in layer.children() if isinstance(module, torch.nn.Linear)]
    assert len(projections) == {"gsa": 5, "abc": 6, "hgrn2": 4}[name]
    for project in projections:
        assert_normal(project.weight, 0.02)
    assert (layer.g_norm.weight == 1).all()


def test_bounds_of_hgrn2_rise_with_depth():
    stack = [layers.build("hgrn2", 256) for _ in range(4)]
    for index, layer in enumerate(stack):
        layer.enter_stack(index, stack)
    assert [float(torch.as_tensor(layer.lower_bound()).detach().mean()) for layer in stack] == [0, 0.25, 0.5, 0.75]
    assert stack[1].init_state(1).shape == (1, 2, 128, 128)
    assert [layer.gamma is None for layer in stack] == [False, True, True, True]
