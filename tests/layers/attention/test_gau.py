"""GAU: its equation step by step, what only it knows, how it starts, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_normal, linear, relu_squared
from scanl.errors import ShapeError
from scanl.layers import FLASH, GAU
from tests.layers.attention.equations import biased, gated_operands


def gau(layer, xs):
    us, vs, heads = gated_operands(layer, xs)
    ys = []
    for t, u in enumerate(us):
        o = torch.zeros(layer.hidden_dim)
        for j in range(t + 1 if layer.causal else len(xs)):
            o = o + relu_squared(heads[t][0] @ heads[j][1] / layer.reach + biased(layer.rel_pos_bias, t, j)) * vs[j]
        ys.append(linear(layer.out_proj, u * o))
    return ys


EQUATIONS = {
    "gau": (lambda: GAU(DIM, 4, 0.75, 24), gau),
    "gau_rotary": (lambda: GAU(DIM, 4, 1.5, 24, "rotary", 1.0, 100.0), gau),
    "gau_noncausal": (lambda: GAU(DIM, 4, 0.75, 24, rope_fraction=0.5, causal=False), gau),
}

WRONG = [
    ("gau", {"expand": 0.01}, "expand is 0.01, expected at least 1/8 because of dim=8"),
    ("gau", {"z_dim": 3, "position_bias": "rotary"}, "z_dim is 3, expected an even number because position_bias"),
    ("gau", {"z_dim": 6, "rope_fraction": 0.5}, "rope_fraction is 0.5, expected an even number of channels of z_dim=6"),
    ("gau", {"max_length": 0}, "max_length is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
def test_a_longer_sequence_is_refused_and_a_chunk_as_long_as_the_sequence_is_flash():
    layer, other = GAU(DIM, 4, 1.0, 9), FLASH(DIM, 4, 1.0, 9, rope_fraction=0.0)
    values = dict(layer.state_dict())
    for name in ("gamma", "beta"):  # q, r, k, w
        values[name] = values[name].repeat_interleave(2, 0)
    other.load_state_dict(values)
    x = torch.randn(2, 9, DIM)
    torch.testing.assert_close(layer(x)[0], other(x)[0])
    with pytest.raises(ShapeError, match="gau: x makes a sequence of 10 steps, expected at most max_length=9"):
        layer(x[:, :1], layer(x)[1])


def test_how_it_starts():
    layer = GAU(64, 32)
    assert [GAU(dim, max_length=4).z_dim for dim in (8, 96, 768)] == [2, 24, 128]
    biases = layer.rel_pos_bias.rel_pos_bias
    of_one = layer.reach - 2  # the bias of distance 1
    for weight in (layer.in_proj.weight, layer.out_proj.weight, layer.gamma, biases[:of_one], biases[of_one + 1 :]):
        assert_normal(weight, 0.02)
    assert biases[of_one] == 0.5
    assert not any(part.any() for part in (layer.in_proj.bias, layer.out_proj.bias, layer.beta))
    assert_normal(GAU(64, 512, position_bias="rotary").rel_pos_bias.alpha, 0.02)


@pytest.mark.parametrize("make", [lambda: GAU(16, max_length=8), lambda: FLASH(16, chunk_size=8)])
def test_every_start_learns_from_the_step_before(make):
    for seed in range(20):
        torch.manual_seed(seed)
        layer, x = make(), torch.randn(1, 6, 16, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(x)[0][0, 5].square().sum(), x)
        assert gradient[0, 4].norm() > gradient[0, :4].norm()
