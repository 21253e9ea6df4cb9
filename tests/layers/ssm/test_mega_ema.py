"""MegaEMA: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, silu
from scanl.layers import MegaEMA
from tests.layers.ssm.equations import mega_ema

EQUATIONS = {"mega_ema": (lambda: MegaEMA(DIM, 3), mega_ema)}


@pytest.mark.usefixtures("double")
def test_released_parameters_of_mega_give_released_numbers():
    """A step of 1/2 and a damping of 1/4: by hand, after one step h = x/2, after two (1 - 1/8) x/2 + x'/2."""
    layer, quarter = MegaEMA(1, 1), math.log(1 / 3)
    released = {"delta": [[[0.0]]], "alpha": [[[quarter]]], "beta": [[[1.0]]], "gamma": [[1.0]], "omega": [0.0]}
    layer.load_state_dict({name: torch.tensor(value) for name, value in released.items()}, strict=True)
    y, _ = layer(torch.tensor([[[1.0], [3.0]]]))
    torch.testing.assert_close(y.flatten(), silu(torch.tensor([0.5, 0.4375 + 1.5])))


def test_init_of_mega_ema():
    layer = MegaEMA(500, 16)
    assert_normal(layer.alpha, 0.2)
    assert_normal(layer.delta, 0.2)
    assert_normal(layer.beta[:, 0::2], 0.02, 1.0)
    assert_normal(layer.beta[:, 1::2], 0.02, -1.0)
    assert_normal(layer.gamma, 1.0)
    assert_normal(layer.omega, 1.0)
