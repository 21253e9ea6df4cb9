"""Norms of a state over a stream."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import state_norms
from scanl.inspect.base import noise
from scanl.layers import LRU, LSTM, build


def test_they_are_those_of_the_state_after_so_many_steps():
    torch.manual_seed(0)
    layer, x = LSTM(4).double(), noise(2, 10, 4)
    inspection = state_norms(layer, x, steps=40)
    assert inspection.names == tuple(layer.init_state(1)._fields)
    for number, steps in enumerate(inspection.steps.tolist()):
        with torch.no_grad():
            state = layer(x.repeat(1, 4, 1)[:, :steps])[1]
        expected = [leaf.square().sum().div(2).sqrt() for leaf in state]
        torch.testing.assert_close(inspection.norms[number], torch.stack(expected))
    assert inspection.steps[[0, -1]].tolist() == [1, 40]
    assert set(inspection.numbers.tolist()) == {8}


def test_a_complex_number_is_two():
    assert state_norms(LRU(4), steps=32).numbers.unique().tolist() == [2 * LRU(4).init_state(1).numel()]


def test_what_is_refused():
    with pytest.raises(ConfigError, match="state_norms: steps is 31, expected at least 32"):
        state_norms(LRU(4), steps=31)
    with pytest.raises(ConfigError, match="state_norms: layer is bidirectional, which reads the whole sequence"):
        state_norms(build("bidirectional", 4))
