"""GateLoop: its equation step by step, how it starts, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_uniform, linear, sigmoid, silu
from scanl import layers

pytestmark = pytest.mark.cells_by_loop("name")


def gateloop(layer, xs):
    H, K = layer.num_heads, layer.head_dim
    S, ys = torch.zeros(H, K, K, dtype=torch.complex128), []
    for x in xs:
        q, k, v = linear(layer.to_qkv, x).view(3, H, K)
        alpha, beta = linear(layer.to_a[0], x).view(H, K, 2).unbind(-1)
        a = sigmoid(alpha) * torch.exp(1j * beta)
        if layer.polar:
            a = sigmoid(torch.sqrt(alpha**2 + beta**2)) * torch.exp(1j * torch.atan2(beta, alpha))
        S = torch.stack([torch.diag(a[h]) @ S[h] + torch.outer(k[h], v[h]) for h in range(H)])
        y = torch.cat([(S[h].T @ q[h].to(S.dtype)).real for h in range(H)])
        if isinstance(layer.maybe_sub_ln, torch.nn.LayerNorm):
            y = (y - y.mean()) / torch.sqrt(y.var(correction=0) + 1e-5)
            y = y * layer.maybe_sub_ln.weight + layer.maybe_sub_ln.bias
        if layer.to_gates is not None:
            y = y * silu(linear(layer.to_gates[0], x))
        ys.append(linear(layer.to_out, y))
    return ys


EQUATIONS = {
    "gateloop": (lambda: layers.build("gateloop", DIM), gateloop),
    "gateloop_heads": (lambda: layers.build("gateloop", DIM, num_heads=2, width=6), gateloop),
    "gateloop_polar": (
        lambda: layers.build("gateloop", DIM, polar=True, output_norm=False, output_gate=False),
        gateloop,
    ),
    "gateloop_polar_heads": (lambda: layers.build("gateloop", DIM, polar=True, num_heads=4), gateloop),
}

WRONG = [
    ("gateloop", {"num_heads": 3}, "num_heads is 3, expected a divisor of width=8"),
    ("gateloop", {"width": 0}, "width is 0, expected at least 1"),
]


def test_init_of_gateloop():
    layer = layers.build("gateloop", 64)
    for project in (layer.to_qkv, layer.to_a[0], layer.to_gates[0], layer.to_out):
        assert_uniform(project.weight, -1 / 8, 1 / 8)
