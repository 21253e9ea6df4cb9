"""Lipschitz: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.ode.antisym import AntisymmetricRNN
from scanl.layers.ode.lipschitz import Lipschitz
from tests.layers.ode.equations import part_skew

pytestmark = pytest.mark.cells_by_loop


def lipschitz(layer, xs):
    a, w = part_skew(layer.B, layer.beta, layer.gamma), part_skew(layer.C, layer.beta, layer.gamma)
    h, ys = torch.zeros(DIM), []

    def slope(h, x):
        change = layer.alpha * (h @ a) + torch.tanh(h @ w + linear(layer.E, x))
        return change * sigmoid(h @ w + linear(layer.E_gate, x)) if layer.config["gated"] else change

    for x in xs:
        half = h + layer.dt / 2 * slope(h, x)
        h = h + layer.dt * slope(half if layer.method == "midpoint" else h, x)
        ys.append(h)
    return ys


EQUATIONS = {
    "lipschitz": (lambda: Lipschitz(DIM, 0.3, 0.6, 0.2, 0.7), lipschitz),
    "lipschitz_midpoint": (lambda: Lipschitz(DIM, 0.3, method="midpoint"), lipschitz),
    "lipschitz_gated": (lambda: Lipschitz(DIM, 0.3, gated=True), lipschitz),
}

REFUSED = [
    (lambda: Lipschitz(8, beta=1.5), "lipschitz: beta is 1.5, expected 0 to 1"),
    (lambda: Lipschitz(8, method="midpont"), r"lipschitz: unknown method 'midpont'; did you mean 'midpoint'\?"),
]


@pytest.mark.usefixtures("double")
def test_lipschitz_without_a_linear_part_is_antisymmetric():
    ours, theirs, x = AntisymmetricRNN(DIM, 0.1, 0.2), Lipschitz(DIM, 0.1, 1.0, 0.2, 0.0), torch.randn(2, 9, DIM)
    with torch.no_grad():
        theirs.C.copy_(ours.W.T)
        theirs.E.load_state_dict(ours.V.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
