"""Jordan: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, linear, sigmoid
from scanl.layers.rnn.jordan import Jordan

pytestmark = pytest.mark.cells_by_loop


PHI = {"tanh": torch.tanh, "sigmoid": sigmoid, "identity": lambda v: v}


def jordan(layer, xs):
    u, ys = torch.zeros(DIM), []
    for x in xs:
        s = torch.tanh(layer.A @ u + linear(layer.B, x))
        y = PHI[layer.activation](linear(layer.C, s))
        u = layer.alpha * u + y
        ys.append(y)
    return ys


EQUATIONS = {
    "jordan": (lambda: Jordan(DIM), jordan),
    "jordan_units": (lambda: Jordan(DIM, 5, 0.6, "sigmoid"), jordan),
    "jordan_linear": (lambda: Jordan(DIM, activation="identity"), jordan),
}

REFUSED = [
    (lambda: Jordan(8, 0), "jordan: hidden_dim is 0, expected at least 1"),
    (lambda: Jordan(8, alpha=1.0), "jordan: alpha is 1.0, expected less than 1"),
    (lambda: Jordan(8, activation="tan"), r"jordan: unknown activation 'tan'; did you mean 'tanh'\?"),
]


@pytest.mark.usefixtures("double")
def test_jordan_without_feedback_sees_one_step():
    layer, x = Jordan(DIM, 5), torch.randn(2, T, DIM)
    with torch.no_grad():
        layer.A.zero_()
    torch.testing.assert_close(layer(x)[0], torch.tanh(layer.C(torch.tanh(layer.B(x)))))
