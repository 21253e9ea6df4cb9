"""Gradient norms beside a sum, whose gradient is the same at any distance, and beside a decay."""

from typing import ClassVar

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import gradient_norms
from scanl.inspect.base import noise
from scanl.layers import Layer
from scanl.layers.initial_state import StateAxes
from scanl.ops import linear_scan


class Sum(Layer):
    state: ClassVar = StateAxes("dim")

    def __init__(self, decay: float = 1.0):
        super().__init__()
        self.dim = 3
        self.decay = torch.nn.Parameter(torch.full((3,), decay, dtype=torch.float64))

    def run(self, x, state, cu_seqlens):
        return linear_scan(x, self.decay, state, cu_seqlens=cu_seqlens)


class Blind(Sum):
    def run(self, x, state, cu_seqlens):
        return torch.zeros_like(x), x[:, -1]


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_a_sum_keeps_the_gradient_and_a_decay_shrinks_it(decay):
    """|u| = 1 comes back as decay^k."""
    norms = gradient_norms(Sum(decay), noise(2, 30, 3)).norms
    expected = decay ** torch.arange(30, dtype=torch.float64)
    torch.testing.assert_close(norms, expected.expand(2, 30))


def test_an_output_that_reads_nothing_is_refused():
    with pytest.raises(ConfigError, match="gradient_norms: the last output has no gradient by the inputs, expected"):
        gradient_norms(Blind())
