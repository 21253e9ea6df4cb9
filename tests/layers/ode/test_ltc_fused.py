"""LTCFused: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, shaken, sigmoid
from scanl.layers.ode.ltc_fused import LTCFused
from tests.layers.ode.equations import ones

pytestmark = pytest.mark.cells_by_loop


def ltc_fused(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        dt = span / layer.substeps
        for _ in range(layer.substeps):
            f = sigmoid(linear(layer.input_map, x) + layer.recurrent_map.weight @ h)
            h = (h + dt * f * layer.A) / (1 + dt * (1 / torch.exp(layer.log_tau) + f))
        ys.append(h)
    return ys


EQUATIONS = {"ltc_fused": (lambda: LTCFused(DIM, 3, 0.5), ltc_fused)}

REFUSED = [(lambda: LTCFused(8, tau=0.0), "ltc_fused: tau is 0.0, expected more than 0")]


@pytest.mark.usefixtures("double")
def test_state_of_a_fused_ltc_stays_between_zero_and_a():
    layer = shaken(LTCFused(DIM, 2))
    y, _ = layer(50 * torch.randn(3, 40, DIM), timespans=10 * torch.rand(3, 40))
    assert (y * layer.A.sign() >= 0).all()
    assert (y.abs() <= layer.A.abs()).all()
    assert (y.abs() > 0.5 * layer.A.abs()).any()
