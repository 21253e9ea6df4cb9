"""How much a linear map reads from the states of a layer."""

from typing import ClassVar

import pytest
import torch

from scanl.errors import ConfigError, ShapeError
from scanl.inspect import MemoryCapacity, decoded, memory_capacity
from scanl.inspect.base import noise
from scanl.layers import GRU, LRU, Layer
from scanl.layers.initial_state import StateAxes


class Delays(Layer):
    """A state that holds the last four inputs of channel 0."""

    state: ClassVar = StateAxes("4")

    def __init__(self):
        super().__init__()
        self.dim, self.scale = 2, torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def run(self, x, state, cu_seqlens):
        state = self._begin(x, state, cu_seqlens)
        for step in x.unbind(1):
            state = torch.cat([self.scale * step[:, :1], state[:, :3]], 1)
        return x, state


def test_a_delay_line_holds_as_many_inputs_as_it_has_numbers():
    inspection = memory_capacity(Delays())
    torch.testing.assert_close(inspection.shares[:4], torch.ones(4).double(), rtol=0, atol=1e-4)
    assert inspection.shares[4:].max() < 0.1
    assert inspection.figures()["half is held for, steps"] == 4
    assert inspection.numbers == 4


def test_no_linear_system_holds_more_than_it_has_numbers():
    torch.manual_seed(0)
    inspection = memory_capacity(LRU(4))
    assert 1 < inspection.capacity() <= inspection.numbers + 1  # noise over finitely many steps adds to 100 lags


def test_its_figures_count_what_is_held():
    """Less than nothing is read by chance, and takes nothing away."""
    held = MemoryCapacity(torch.tensor([1.0, 0.75, -0.5, 0.6], dtype=torch.float64), 4)
    assert held.figures() == {"capacity": pytest.approx(2.35), "numbers": 4, "half is held for, steps": 2}
    assert MemoryCapacity(torch.ones(3), 4).figures()["half is held for, steps"] == 3


def test_a_sequence_that_is_too_short():
    with pytest.raises(ConfigError, match="memory_capacity: x has 15 steps, expected at least 16 because the state h"):
        memory_capacity(GRU(4), noise(1, 15, 4))


def test_wrong_input_of_decoded_is_refused():
    u = torch.randn(40)
    with pytest.raises(ShapeError, match=r"decoded: inputs has shape \(40,\) and states is torch.float32 \(39, 2\)"):
        decoded(u, torch.randn(39, 2), 3)
    with pytest.raises(ConfigError, match="decoded: lags is 11, expected 1 to a quarter of the 40 steps"):
        decoded(u, torch.randn(40, 2), 11)
