"""Chrono starts spread the memories of gates up to the longest."""

import pytest
import torch

from by_hand import assert_uniform, sigmoid
from scanl.layers import GRU, LSTM
from scanl.layers.rnn.layernorm_lstm import LayerNormLSTM
from scanl.layers.rnn.onlstm import ONLSTM

pytestmark = pytest.mark.cells_by_loop


CHRONO = {
    "lstm": (lambda **start: LSTM(2500, **start), lambda cell: cell.bias_ih_l0 + cell.bias_hh_l0, (1, 0)),
    "gru": (lambda **start: GRU(2500, **start), lambda cell: cell.bias_ih_l0 + cell.bias_hh_l0, (1, None)),
    "onlstm": (lambda **start: ONLSTM(2500, 2500, **start), lambda cell: (cell.ih[0].bias + cell.hh.bias)[2:], (3, 2)),
    "layernorm_lstm": (
        lambda **start: LayerNormLSTM(2500, **start),
        lambda cell: cell.layernorm_i.bias + cell.layernorm_h.bias,
        (1, 0),
    ),
}


@pytest.mark.parametrize("name", CHRONO)
def test_chrono_start_spreads_the_memories_up_to_the_longest(name):
    make, biases, (keep, write) = CHRONO[name]
    gates = biases(make(t_max=100)).detach().view(-1, 2500)
    assert_uniform(gates[keep].exp() - 50, -49.0 + 1e-4, 49.0 + 1e-4)  # U(1, 99)
    lasting = 1 / (1 - sigmoid(gates[keep].double()))
    assert 2 <= lasting.min() < 3
    assert 99 < lasting.max() <= 100
    if write is not None:
        torch.testing.assert_close(gates[write], -gates[keep])
        gates = biases(make(forget_bias=1.5)).detach().view(-1, 2500)
        torch.testing.assert_close(gates[keep], torch.full((2500,), 1.5))
        assert gates[write].abs().max() < 0.1
