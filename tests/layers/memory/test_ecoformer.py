"""EcoFormer: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, unit
from scanl import layers
from scanl.errors import ConfigError, ShapeError

# Of the authors' KernelSH after learning: signs of the codes of each token, and the first hash function.
CODES = (
    *("++-+--", "--++--", "--+---", "-++-++", "++-++-", "++--++", "++++-+"),
    *("---+--", "--+--+", "----+-", "++-+++", "++-+++", "--++--", "--+-+-"),
)

FUNCTION = [-6.0046225, -4.6671839, -2.3352432, 4.5692396, 9.4777718]


def ecoformer(layer, x):
    heads, c, ys = layer.num_heads, layer.num_bits + 1, []
    qk, v = (
        torch.stack([project(each) for each in x]).unflatten(-1, (heads, -1)) for project in (layer.to_qk, layer.to_v)
    )
    for t in range(len(x)):
        read = []
        for h in range(heads):
            codes = []
            for j in range(t + 1):
                squares = torch.stack([(unit(qk[j, h]) - a).square().sum() for a in layer.anchor[h]])
                kernel = torch.exp(-squares / (2 * layer.scale[h])) - layer.mvec[h]
                codes.append(torch.sign(layer.A[h] @ kernel))
            weights = torch.stack([c + codes[t] @ code for code in codes])
            read.append(weights @ v[: t + 1, h] / weights.sum())
        ys.append(layer.proj.weight @ torch.cat(read) + layer.proj.bias)
    return ys


def tokens() -> torch.Tensor:
    g = torch.arange(56.0).view(1, 14, 4)
    return torch.sin(1.3 * g) + torch.cos(0.37 * g * g)


EQUATIONS = {
    "ecoformer": (lambda: layers.build("ecoformer", DIM, num_heads=2, num_bits=5, num_anchors=4, bias=True), ecoformer)
}


def test_learned_codes_are_those_of_the_authors_program():
    layer = layers.build("ecoformer", 4, num_heads=1, num_bits=6, num_anchors=5)
    with torch.no_grad():
        layer.to_qk.weight.copy_(torch.eye(4))
        layer.A.copy_(torch.sin(2.1 * torch.arange(30)).view(1, 6, 5))
    torch.manual_seed(3)
    layer.learn_codes(tokens(), similar=3, lr=0.05)
    hashed = layer._kernel(layer._hashed(tokens()))[0, :, 0] @ layer.A[0].T
    assert ["".join("+" if bit > 0 else "-" for bit in row) for row in hashed] == list(CODES)
    torch.testing.assert_close(layer.A[0, 0], torch.tensor(FUNCTION), rtol=1e-4, atol=1e-4)


def test_gradients_go_straight_through_where_the_argument_is_small():
    layer = layers.build("ecoformer", 4, num_heads=1, num_bits=2, num_anchors=3)
    for factor, reaches in ((1e-3, True), (1e6, False)):
        layer.A.fill_(factor)
        (found,) = torch.autograd.grad(layer(tokens())[0][0, -1].square().sum(), layer.to_qk.weight)
        assert found.any() == reaches


def test_init():
    torch.manual_seed(0)
    layer = layers.build("ecoformer", 64, num_heads=2, num_bits=32, num_anchors=100)
    assert_uniform(layer.to_qk.weight, -1 / 8, 1 / 8)
    assert math.isclose(layer.A.std().item(), 1, rel_tol=0.05)
    torch.testing.assert_close(layer.anchor.norm(dim=-1), torch.ones(2, 100))
    assert layers.build("ecoformer", 16, num_heads=2).A.shape == (2, 16, 25)


def test_wrong_input_is_refused():
    layer = layers.build("ecoformer", 8, num_heads=2)
    with pytest.raises(ShapeError, match=r"learn_codes: x has shape \(1, 24, 8\), expected .* T of at least 25"):
        layer.learn_codes(torch.zeros(1, 24, 8))
    with pytest.raises(ConfigError, match="num_heads is 3, expected a divisor of dim=8"):
        layers.build("ecoformer", 8, num_heads=3)
    with pytest.raises(ConfigError, match="num_bits is 0, expected at least 1"):
        layers.build("ecoformer", 8, num_bits=0)
