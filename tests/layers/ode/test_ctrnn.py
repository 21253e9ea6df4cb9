"""CTRNN: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, assert_uniform, shaken, softplus
from scanl.layers import Elman
from scanl.layers.ode.ctrnn import CTRNN
from tests.layers.ode.equations import ones

pytestmark = pytest.mark.cells_by_loop


def ctrnn(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        for _ in range(layer.substeps):
            feedback = 0 if layer.weight_hh is None else layer.weight_hh @ h
            h = h + layer.dt * span * (
                torch.tanh(layer.weight_ih @ x + feedback + layer.bias) - h / softplus(layer.raw_tau)
            )
        ys.append(h)
    return ys


EQUATIONS = {
    "ctrnn": (lambda: CTRNN(DIM), ctrnn),
    "ctrnn_linear": (lambda: CTRNN(DIM, 3, tau=2.0, global_feedback=False), ctrnn),
    "ctrnn_trained_tau": (lambda: CTRNN(DIM, 2, 0.3, trained=True), ctrnn),
}

REFUSED = [
    (lambda: CTRNN(8, 0), "ctrnn: substeps is 0, expected at least 1"),
    (lambda: CTRNN(8, dt=0.0), r"ctrnn: dt is 0.0, expected more than 0"),
    (lambda: CTRNN(8, tau=-1.0), r"ctrnn: tau is -1.0, expected more than 0"),
]


@pytest.mark.usefixtures("double")
def test_one_euler_step_of_length_one_is_an_elman_network():
    layer, elman, x = shaken(CTRNN(DIM, 1, 1.0)), Elman(DIM, bias=False), torch.randn(2, T, DIM)
    with torch.no_grad():
        layer.bias.zero_()
    elman.load_state_dict({"weight_ih_l0": layer.weight_ih, "weight_hh_l0": layer.weight_hh})
    torch.testing.assert_close(layer(x)[0], elman(x)[0])


@pytest.mark.usefixtures("double")
def test_euler_steps_converge_with_their_length():
    """Twice the steps of half the length: half the distance from the solution."""
    torch.manual_seed(0)
    x, ys = torch.randn(1, 3, DIM), []
    for unfolds in (10, 20, 40, 2000):
        torch.manual_seed(1)
        ys.append(CTRNN(DIM, unfolds, 1 / unfolds)(x)[0])
    coarse, middle, fine = ((y - ys[3]).abs().max() for y in ys[:3])
    assert 1.8 < coarse / middle < 2.2
    assert 1.8 < middle / fine < 2.2


def test_init_of_ctrnn():
    layer = CTRNN(64)
    for weight in (layer.weight_ih, layer.weight_hh):
        assert_uniform(weight, -((6 / 192) ** 0.5), (6 / 192) ** 0.5)
    assert not layer.bias.any()
    torch.testing.assert_close(layer.time_constant(), torch.ones(1))
    assert_uniform(CTRNN(64, global_feedback=False).weight_ih, -((6 / 128) ** 0.5), (6 / 128) ** 0.5)
