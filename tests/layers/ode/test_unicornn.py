"""UnICORNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.ode.unicornn import UnICORNN

pytestmark = pytest.mark.cells_by_loop


def unicornn(layer, xs):
    y, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        step = layer.dt * sigmoid(layer.c_)
        z = z - step * (torch.tanh(layer.weight_hh * y + linear(layer.fc, x)) + layer.alpha * y)
        y = y + step * z
        ys.append(y)
    return ys


EQUATIONS = {"unicornn": (lambda: UnICORNN(DIM), unicornn)}

REFUSED = [(lambda: UnICORNN(8, alpha=-1), "unicornn: alpha is -1, expected at least 0")]


@pytest.mark.usefixtures("double")
def test_unicornn_can_be_run_backwards():
    """From its last state and its inputs, the authors' backward pass has every earlier state."""
    layer, x = UnICORNN(DIM), torch.randn(1, 2000, DIM)
    inputs, step = layer.fc(x), layer.dt * layer.c_.sigmoid()
    y, z = layer(x)[1].unbind(1)
    for t in reversed(range(2000)):
        y = y - step * z
        z = z + step * (torch.tanh(layer.weight_hh * y + inputs[:, t]) + layer.alpha * y)
    torch.testing.assert_close(torch.stack([y, z]), torch.zeros(2, 1, DIM), atol=1e-9, rtol=0)
