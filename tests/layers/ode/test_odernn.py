"""ODERNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, shaken, sigmoid
from scanl.layers import GRU
from scanl.layers.ode.odernn import ODERNN
from tests.layers.ode.equations import along, moved, ones

pytestmark = pytest.mark.cells_by_loop


def odernn(layer, xs, spans=None):
    h, gru, ys = torch.zeros(DIM), layer.GRU_update, []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        h = moved(lambda h: along(layer.ode_func, h), h, span, layer.method, layer.substeps)
        (r, z, n), (to_r, to_z, to_n) = (
            (gru.weight_ih @ x + gru.bias_ih).chunk(3), (gru.weight_hh @ h + gru.bias_hh).chunk(3)
        )  # fmt: skip
        z = sigmoid(z + to_z)
        h = (1 - z) * torch.tanh(n + sigmoid(r + to_r) * to_n) + z * h
        ys.append(h)
    return ys


EQUATIONS = {
    "odernn": (lambda: ODERNN(DIM, 6), odernn),
    "odernn_midpoint": (lambda: ODERNN(DIM, 5, 0, "midpoint", 2), odernn),
    "odernn_rk4": (lambda: ODERNN(DIM, 5, 2, "rk4", 1), odernn),
}

REFUSED = [
    (lambda: ODERNN(8, method="eulr"), "odernn: unknown method 'eulr'; did you mean 'euler'"),
    (lambda: ODERNN(8, substeps=0), "odernn: substeps is 0, expected at least 1"),
    (lambda: ODERNN(8, depth=-1), "odernn: depth is -1, expected at least 0"),
]


@pytest.mark.usefixtures("double")
def test_an_ode_rnn_without_time_is_a_gru():
    layer, gru, x = shaken(ODERNN(DIM, 6)), GRU(DIM), torch.randn(2, T, DIM)
    gru.load_state_dict({f"{name}_l0": value for name, value in layer.GRU_update.state_dict().items()})
    torch.testing.assert_close(layer(x, timespans=torch.zeros(2, T))[0], gru(x)[0])
