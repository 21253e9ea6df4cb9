"""Effective memory beside channels whose decay is known."""

import math
from typing import ClassVar

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import effective_memory
from scanl.inspect.base import noise
from scanl.layers import Layer
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_scan

DECAYS = [0.5, 0.9, 0.97, 1.0, 0.0]


class Leaky(Layer):
    """Channels that decay each at its own rate, and a copy of the input that must not count."""

    state: ClassVar = StateAxes("dim")

    def __init__(self):
        super().__init__()
        self.dim = len(DECAYS)
        self.decay = torch.nn.Parameter(torch.tensor(DECAYS, dtype=torch.float64))

    def run(self, x, state, cu_seqlens):
        h, last = linear_scan(x, self.decay, state, cu_seqlens=cu_seqlens)
        return h + 10 * x, last


@pytest.mark.parametrize("fraction", [1 / math.e, 0.5])
def test_each_channel_forgets_at_its_own_rate(fraction):
    """a^k, largest after step 0 at k = 1, is below f a from 1 + ln f / ln a on."""
    steps = effective_memory(Leaky(), noise(2, 64, 5), fraction=fraction).steps.tolist()
    expected = [math.floor(1 + math.log(fraction) / math.log(a)) + 1 for a in DECAYS[:3]]
    if fraction == 0.5:
        expected[0] = 2 if steps[0] == 2 else 3  # 0.5^2 is half of 0.5, up to rounding
    assert steps == [*expected, math.inf, 0]


def test_wrong_arguments():
    for fraction in (0, 1, -0.5):
        with pytest.raises(ConfigError, match=r"effective_memory: fraction is .*, expected between 0 and 1"):
            effective_memory(Leaky(), fraction=fraction)
    with pytest.raises(ConfigError, match="effective_memory: x has 1 step, expected at least 2"):
        effective_memory(Leaky(), noise(1, 1, 5))
