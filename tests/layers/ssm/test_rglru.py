"""RGLRU: its equation step by step, how it starts, and what only it knows."""

import math

import torch
from torch.nn import functional as F

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import RGLRU, Hawk
from scanl.ops.fused.rglru_gates import BoundedSqrt
from tests.layers.ssm.equations import rglru

EQUATIONS = {"rglru": (lambda: RGLRU(DIM, 2), rglru)}


def test_rglru_bounds_the_derivative_of_its_root():
    layer = RGLRU(DIM, 2)
    torch.nn.init.constant_(layer.a_param, -200.0)  # a = 1: the square root stands at 0
    x = torch.ones(1, 3, DIM)
    y, _ = layer(x)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    plain = torch.zeros(1, requires_grad=True)
    root = BoundedSqrt.apply(plain + torch.tensor([0.0, 1e-8, 0.25]))
    (gradient,) = torch.autograd.grad(root.sum(), plain)
    torch.testing.assert_close(gradient, torch.tensor([1000.0 + 1000.0 + 1.0]))


def test_init_of_rglru_and_hawk():
    layer = RGLRU(20_000, 200)
    assert_uniform(torch.exp(-F.softplus(layer.a_param).double()) ** 2, 0.9**2 - 1e-6, 0.999**2 + 1e-6)
    for gate in (layer.a_gate, layer.input_gate):
        assert_normal(gate.w, math.sqrt(1 / 100))
        assert not gate.b.any()
    block = Hawk(96)
    assert block.width == 128
    assert [Hawk(dim).width for dim in (8, 256, 1024)] == [8, 320, 1344]
    assert_normal(block.linear_x.weight, math.sqrt(1 / 96))
    assert_normal(block.linear_y.weight, math.sqrt(1 / 96))
    assert_normal(block.linear_out.weight, math.sqrt(1 / 128))
    assert_normal(Hawk(4, 8, 4096).conv_1d.conv.weight, math.sqrt(0.01 / 4))
    assert not block.linear_out.bias.any()
