"""GILR: its equation step by step, how it starts, and what it refuses."""

import pytest

from by_hand import DIM, assert_uniform
from scanl.layers.rnn.gilr import GILR
from scanl.layers.rnn.glru_scan import GLRUScan
from tests.layers.rnn.equations import gilr

pytestmark = pytest.mark.cells_by_loop


EQUATIONS = {"gilr": (lambda: GILR(DIM), gilr), "gilr_tanh": (lambda: GILR(DIM, "tanh"), gilr)}

REFUSED = [
    (lambda: GILR(0), "gilr: dim is 0, expected at least 1"),
    (lambda: GILR(8, "eu"), r"gilr: unknown activation 'eu'; did you mean 'elu'\?"),
]


def test_init_of_gilr_and_its_lstm():
    layer = GLRUScan(64)
    for part in (GILR(64), layer.gilr):
        assert_uniform(part.linear.weight, -0.05, 0.05)
        assert not part.linear.bias.any()
    assert_uniform(layer.linear.weight, -0.05, 0.05)
    assert layer.linear.bias.tolist() == [5.0] * 64 + [0.0] * 192
