"""ABC: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, linear, rms, silu
from scanl import layers
from scanl.layers import state as states
from tests.layers.memory.equations import slots

pytestmark = pytest.mark.cells_by_loop("name")


def abc(layer, xs):
    """A mean over so many weights keeps the part that the ones before are of all."""
    H, K = layer.num_heads, layer.head_k_dim
    weights = [torch.exp(linear(layer.s_proj, x).clamp(-layer.clamp, layer.clamp)).view(H, -1) for x in xs]
    sums = [sum(weights[: t + 1]) for t in range(len(xs))]

    def turn(v, t):
        half = 0 if layer.rope_base is None else K // 2
        angles = t * 10000.0 ** (-torch.arange(half) / max(1, half))
        a, b, rest = v.split([half, half, K - 2 * half], -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def queries(t, x):
        q, k, v = (linear(project, x).view(H, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        return turn(q, t) / math.sqrt(K), turn(k, t), v

    def read(x, o):
        y = torch.cat([rms(part, layer.g_norm.eps) * layer.g_norm.weight for part in o])
        return y if layer.g_proj is None else y * silu(linear(layer.g_proj, x))

    kept = [1 - e / z for e, z in zip(weights, sums, strict=True)]
    return slots(layer, xs, kept, [e / z for e, z in zip(weights, sums, strict=True)], queries, read)


EQUATIONS = {
    "abc": (lambda: layers.build("abc", DIM, num_heads=2, num_slots=3), abc),
    "abc_plain": (
        lambda: layers.build(
            "abc", DIM, num_heads=2, num_slots=5, expand_k=0.75, rope_base=None, output_gate=False, clamp=0.5
        ),
        abc,
    ),
}

WRONG = [
    ("abc", {"num_slots": 0}, "num_slots is 0, expected at least 1"),
    ("abc", {"clamp": 0}, "clamp is 0, expected more than 0"),
    (
        "abc",
        {"num_heads": 4},
        "expand_k is 0.5, expected an even number of channels of a head because of rope_base, not 1",
    ),
]


def test_weights_of_abc_stay_finite():
    """Logits of ±1000 are clipped; a slot that got e^32 and then e^-32 forgets nothing."""
    layer = layers.build("abc", DIM, num_heads=2, num_slots=3)
    with torch.no_grad():
        layer.s_proj.weight.mul_(1e5)
    x = torch.randn(2, 300, DIM)
    y, state = layer(x)
    exact, _ = layer.double()(x.double())
    assert all(leaf.isfinite().all() for _, leaf in states.leaves(state))
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)
