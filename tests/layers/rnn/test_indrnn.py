"""IndRNN: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, linear
from scanl.layers.rnn.indrnn import IndRNN

pytestmark = pytest.mark.cells_by_loop


PHI = {"relu": lambda v: torch.where(v > 0, v, 0), "tanh": torch.tanh, "identity": lambda v: v}


def indrnn(layer, xs):
    s, ys = torch.zeros(DIM), []
    for x in xs:
        s = PHI[layer.activation](layer.weight_hh * s + linear(layer.fc, x))
        ys.append(s)
    return ys


EQUATIONS = {"indrnn": (lambda: IndRNN(DIM), indrnn), "indrnn_tanh": (lambda: IndRNN(DIM, "tanh"), indrnn)}

REFUSED = [
    (lambda: IndRNN(0), "indrnn: dim is 0, expected at least 1"),
    (lambda: IndRNN(8, "rel"), r"indrnn: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: IndRNN(8, max_length=0), "indrnn: max_length is 0, expected at least 1"),
    (lambda: IndRNN(8, gamma=0.5), "indrnn: gamma is 0.5, expected at least 1"),
    (lambda: IndRNN(8, init="long"), "indrnn: max_length is None, expected a number of steps because of init="),
]


@pytest.mark.usefixtures("double")
def test_the_state_of_a_bounded_indrnn_grows_gamma_fold_at_most():
    layer = IndRNN(DIM, max_length=50, gamma=5.0)
    with torch.no_grad():
        layer.weight_hh.fill_(1.5)
        layer.fc.bias.zero_()
    y, _ = layer(torch.zeros(1, 50, DIM), torch.ones(1, DIM))
    torch.testing.assert_close(y[0, -1], torch.full((DIM,), 5.0))
    y[0, -1].sum().backward()
    torch.testing.assert_close(layer.weight_hh.grad, torch.full((DIM,), 50 * 5 ** (49 / 50)))  # the way back is open


def test_init_of_indrnn():
    layer = IndRNN(4000)
    assert_uniform(layer.weight_hh, 0, 1)
    assert_uniform(layer.fc.weight, -math.sqrt(6 / 65 / 4000), math.sqrt(6 / 65 / 4000))
    assert not layer.fc.bias.any()
    high = 5 ** (1 / 20)
    assert_uniform(IndRNN(4000, max_length=20, gamma=5).weight_hh, 0, high)
    assert_uniform(IndRNN(4000, max_length=20, gamma=5, init="long").weight_hh - 1, 1 / high - 1, high - 1)
    assert IndRNN(4).hints["weight_hh"].weight_decay is False
