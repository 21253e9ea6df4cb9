"""AntisymmetricRNN: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.ode.antisym import AntisymmetricRNN

pytestmark = pytest.mark.cells_by_loop


def antisym(layer, xs):
    h, ys = torch.zeros(DIM), []
    w = layer.W - layer.W.T - layer.gamma * torch.eye(DIM)
    for x in xs:
        gate = sigmoid(w @ h + linear(layer.V_z, x)) if layer.config["gated"] else 1
        h = h + layer.dt * gate * torch.tanh(w @ h + linear(layer.V, x))
        ys.append(h)
    return ys


EQUATIONS = {
    "antisym": (lambda: AntisymmetricRNN(DIM, 0.3, 0.2), antisym),
    "antisym_gated": (lambda: AntisymmetricRNN(DIM, 0.3, gated=True), antisym),
}

REFUSED = [(lambda: AntisymmetricRNN(8, gamma=-1), "antisym: gamma is -1, expected at least 0")]


@pytest.mark.usefixtures("double")
def test_antisym_has_nearly_imaginary_eigenvalues():
    w = AntisymmetricRNN(DIM, gamma=0.1).operands(torch.zeros(1, 1, DIM), torch.ones(1, 1, 1))[2]
    torch.testing.assert_close(torch.linalg.eigvals(w).real, torch.full((DIM,), -0.1))
