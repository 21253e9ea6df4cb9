"""TransNormerLLM: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, linear, silu
from scanl import layers
from tests.layers.memory.equations import in_a_stack

pytestmark = pytest.mark.cells_by_loop("name")


def transnormerllm(layer, xs, depth=0.0, slopes=(2**-4, 2**-8)):
    """The quadratic form: positions are cosines of the angles between steps."""
    H, ys = layer.num_heads, []
    parts = [linear(layer.qkvu_proj, x).chunk(4) for x in xs]
    for t in range(len(xs)):
        o = [0] * H
        for s in range(t + 1):
            q, k, v = silu(parts[t][0]).view(H, -1), silu(parts[s][1]).view(H, -1), parts[s][2].view(H, -1)
            turn = torch.ones(q.shape) if layer.lrpe is None else torch.cos((t - s) * layer.lrpe.theta)
            for h in range(H):
                weight = (q[h] * k[h] * turn[h]).sum() * math.exp(-slopes[h] * (1 - depth + 1e-5) * (t - s))
                o[h] = o[h] + weight * v[h]
        o = torch.cat(o)
        ys.append(linear(layer.out_proj, parts[t][3] * o / (o.norm() / math.sqrt(len(o)) + 1e-8)))
    return ys


EQUATIONS = {
    "transnormerllm": (lambda: layers.build("transnormerllm", DIM, num_heads=2), transnormerllm),
    "transnormerllm_in_a_stack": (
        lambda: in_a_stack("transnormerllm", 2, 4, num_heads=4),
        lambda layer, xs: transnormerllm(layer, xs, 2 / 3, (2**-2, 2**-4, 2**-6, 2**-8)),
    ),
    "transnormerllm_positioned": (
        lambda: in_a_stack("transnormerllm", 3, 4, num_heads=1, lrpe=True),
        lambda layer, xs: transnormerllm(layer, xs, 1.0, (2**-8,)),
    ),
}

WRONG = [("transnormerllm", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8")]


def test_positions_of_transnormerllm_are_in_the_lowest_layer():
    at = [in_a_stack("transnormerllm", index, 3, num_heads=2).lrpe is not None for index in range(3)]
    assert at == [True, False, False]
    assert in_a_stack("transnormerllm", 0, 3, num_heads=2, lrpe=False).lrpe is None
    highest = in_a_stack("transnormerllm", 2, 3, num_heads=2)
    assert highest.rate == pytest.approx(1e-5)
    assert highest.init_state(1).recurrent.shape == (1, 2, 4, 4)
