"""FLASH: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, relu_squared, shaken
from scanl.layers import FLASH
from tests.layers.attention.equations import biased, gated_operands


def flash(layer, xs):
    C = layer.reach
    us, vs, heads = gated_operands(layer, xs)
    ys = []
    for t, u in enumerate(us):
        o, start = torch.zeros(layer.hidden_dim), t - t % C
        q, r = heads[t][:2]
        for j in range(t + 1 if layer.causal else len(xs)):
            k, w = heads[j][2:]
            if start <= j < start + C:
                o = o + relu_squared(q @ k / C + biased(layer.rel_pos_bias, t - start, j - start)) * vs[j]
            if j < start or not layer.causal:
                o = o + r @ w / C * vs[j]
        ys.append(linear(layer.out_proj, u * o))
    return ys


EQUATIONS = {
    "flash": (lambda: FLASH(DIM, 4, 0.75, 3), flash),
    "flash_1": (lambda: FLASH(DIM, 3, 0.75, 1, rope_fraction=0.0), flash),
    "flash_rotary": (lambda: FLASH(DIM, 4, 1.5, 2, "rotary", 0.5, 100.0), flash),
    "flash_noncausal": (lambda: FLASH(DIM, 4, 0.75, 3, causal=False), flash),
}

WRONG = [
    ("flash", {"chunk_size": 0}, "chunk_size is 0, expected at least 1"),
    ("flash", {"position_bias": "none"}, "unknown position_bias 'none'"),
]


@pytest.mark.usefixtures("double")
def test_the_chunk_before_is_read_through_the_memory_alone():
    """Without the memory's keys a step sees its own chunk only."""
    layer, x = shaken(FLASH(DIM, 4, 1.0, 4)), torch.randn(1, 8, DIM, requires_grad=True)
    with torch.no_grad():
        layer.gamma[3], layer.beta[3] = 0, 0
        layer.rel_pos_bias.rel_pos_bias.add_(1)  # no score is below 0
    (gradient,) = torch.autograd.grad(layer(x)[0][0, 5].sum(), x)
    assert gradient[0].ne(0).any(1).tolist() == [4 <= t <= 5 for t in range(8)]
