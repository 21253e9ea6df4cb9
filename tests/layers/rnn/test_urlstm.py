"""URLSTM: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_uniform, sigmoid
from scanl.layers.rnn.urlstm import URLSTM

pytestmark = pytest.mark.cells_by_loop


def urlstm(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        f, r, u, o = (layer.weight_ih @ x + layer.weight_hh @ h + layer.bias).split(DIM)
        f, r = sigmoid(f + layer.forget_bias), sigmoid(r - layer.forget_bias)
        g = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
        c = g * c + (1 - g) * torch.tanh(u)
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


EQUATIONS = {"urlstm": (lambda: URLSTM(DIM), urlstm)}

REFUSED = [(lambda: URLSTM(1), "urlstm: dim is 1, expected at least 2")]


def test_a_refined_gate_lies_between_its_bounds():
    """Read off one step from c = 1 with the candidate at 0."""
    layer = URLSTM(64)
    for parameter in (layer.weight_ih, layer.weight_hh):
        torch.nn.init.zeros_(parameter)
    torch.nn.init.normal_(layer.bias[:128], std=3)
    _, state = layer.step(torch.zeros(1, 64), torch.stack([torch.zeros(1, 64), torch.ones(1, 64)], 1))
    f = torch.sigmoid(layer.bias[:64] + layer.forget_bias)
    assert (f**2 - 1e-6 <= state[0, 1]).all()
    assert (state[0, 1] <= 1 - (1 - f) ** 2 + 1e-6).all()


def test_init_of_urlstm():
    layer = URLSTM(256)
    for weight in (layer.weight_ih, layer.weight_hh):
        assert_uniform(weight, -1 / 16, 1 / 16)
    assert not layer.bias.any()
    assert_uniform(layer.forget_bias.sigmoid(), 1 / 256, 255 / 256)
