"""Columnar network: its equation step by step, how it starts, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_uniform, linear, sigmoid
from scanl.layers.rnn.columnar import Columnar

pytestmark = pytest.mark.cells_by_loop


def columnar(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        i, f, g, o = linear(layer.gates, x).view(4, DIM) + layer.recurrent * h
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


EQUATIONS = {"columnar": (lambda: Columnar(DIM, init_scale=0.7), columnar)}

REFUSED = [
    (lambda: Columnar(0), "columnar: dim is 0, expected at least 1"),
    (lambda: Columnar(4, init_scale=-1.0), "columnar: init_scale is -1.0, expected at least 0"),
]


def test_init_of_columnar():
    layer = Columnar(200)
    for parameter in layer.parameters():
        assert_uniform(parameter, -0.01, 0.01)
