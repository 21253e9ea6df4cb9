"""Lyapunov exponents beside those that are known."""

import math
from typing import ClassVar

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import lyapunov_exponents
from scanl.inspect.base import noise
from scanl.layers import LRU, Layer
from scanl.layers.initial_state import StateAxes


class Tent(Layer):
    """The tent map beside a contraction: the exponents are ln 2 and ln 1/4."""

    state: ClassVar = StateAxes("dim", fill=0.1234567)

    def __init__(self):
        super().__init__()
        self.dim, self.slope = 2, torch.nn.Parameter(torch.tensor(1.9999, dtype=torch.float64))

    def run(self, x, state, cu_seqlens):
        state = self._begin(x, state, cu_seqlens)
        outputs = []
        for _ in range(x.shape[1]):
            tent = self.slope * (0.5 - (state[:, :1] - 0.5).abs())
            state = torch.cat([tent, state[:, 1:] / 4], 1)
            outputs.append(state)
        return torch.stack(outputs, 1).to(x.dtype), state


class TanhMap(Tent):
    """s = tanh(2 s) ends at s* with tanh(2 s*) = s*, where the slope is 2 (1 - s*²). It begins near s*."""

    state: ClassVar = StateAxes("dim", fill=0.9575)

    def run(self, x, state, cu_seqlens):
        state = self._begin(x, state, cu_seqlens)
        outputs = []
        for _ in range(x.shape[1]):
            state = (2 * state).tanh()
            outputs.append(state)
        return torch.stack(outputs, 1).to(x.dtype), state


def test_those_of_a_linear_layer_are_the_logarithms_of_its_eigenvalues():
    """Its eigenvalues are complex, so each exponent is there twice. Over T steps a basis adds about 1 / T."""
    torch.manual_seed(0)
    layer = LRU(3)
    exponents = lyapunov_exponents(layer, noise(2, 200, 3)).exponents
    exact = -layer.nu_log.double().exp().repeat_interleave(2).sort().values.detach()
    torch.testing.assert_close(exponents, exact.expand_as(exponents), rtol=0, atol=0.02)
    two = lyapunov_exponents(layer, noise(1, 200, 3), count=2).exponents
    torch.testing.assert_close(two, exact[None, :2], rtol=0, atol=0.02)


def test_that_of_the_tent_map_is_the_logarithm_of_its_slope():
    exponents = lyapunov_exponents(Tent(), torch.zeros(1, 100, 2)).exponents
    expected = torch.tensor([[math.log(1.9999), -math.log(4)]], dtype=torch.float64)
    torch.testing.assert_close(exponents, expected, rtol=0, atol=1e-9)


def test_that_of_a_tanh_map_is_the_slope_at_its_fixed_point():
    fixed = 0.5
    for _ in range(200):
        fixed = math.tanh(2 * fixed)
    exponents = lyapunov_exponents(TanhMap(), torch.zeros(1, 400, 2)).exponents
    assert exponents.mean().item() == pytest.approx(math.log(2 * (1 - fixed**2)), abs=0.001)


def test_wrong_arguments():
    for count in (0, 13):
        with pytest.raises(ConfigError, match=rf"lyapunov_exponents: count is {count}, expected 1 to \d+, the numbers"):
            lyapunov_exponents(LRU(3), count=count)
    with pytest.raises(ConfigError, match="lyapunov_exponents: x has 9 steps, expected at least 10"):
        lyapunov_exponents(LRU(3), noise(1, 9, 3))
