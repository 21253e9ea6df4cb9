"""QRNN: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, assert_uniform, shaken, sigmoid
from scanl.layers.rnn.qrnn import QRNN
from scanl.layers.rnn.trnn import TRNN

pytestmark = pytest.mark.cells_by_loop


def qrnn(layer, xs):
    c, ys = torch.zeros(DIM), []
    for t in range(len(xs)):
        raw = layer.linear.bias.clone()
        for j, weight in enumerate(layer.linear.weight.split(DIM, 1)):
            raw = raw + (weight @ xs[t - j] if t >= j else 0)
        z, f, *more = raw.split(DIM)
        f = sigmoid(f) if layer.variant == "old" else 1 - sigmoid(f)
        c = f * c + (sigmoid(more[1]) if layer.pooling == "ifo" else 1 - f) * torch.tanh(z)
        ys.append(sigmoid(more[0]) * c if more else c)
    return ys


EQUATIONS = {
    "qrnn": (lambda: QRNN(DIM), qrnn),
    "qrnn_f": (lambda: QRNN(DIM, "f", 1, "new"), qrnn),
    "qrnn_ifo": (lambda: QRNN(DIM, "ifo", 3), qrnn),
}

REFUSED = [
    (lambda: QRNN(0), "qrnn: dim is 0, expected at least 1"),
    (lambda: QRNN(8, "if"), r"qrnn: unknown pooling 'if'; did you mean 'ifo'\?"),
    (lambda: QRNN(8, conv_size=0), "qrnn: conv_size is 0, expected at least 1"),
    (lambda: QRNN(8, variant="nwe"), r"qrnn: unknown variant 'nwe'; did you mean 'new'\?"),
]


@pytest.mark.usefixtures("double")
def test_trnn_is_qrnn_of_a_linear_candidate():
    x, layer, other = torch.randn(2, T, DIM), shaken(TRNN(DIM)), QRNN(DIM, "f", 1)
    with torch.no_grad():
        other.linear.weight.copy_(torch.cat([1e-5 * layer.z_proj.weight, layer.f_proj.weight]))
        other.linear.bias.copy_(torch.cat([torch.zeros(DIM), layer.f_proj.bias]))
    torch.testing.assert_close(1e5 * other(x)[0], layer(x)[0])  # the tanh of small numbers is linear


def test_init_of_qrnn_and_trnn():
    assert_uniform(QRNN(64, conv_size=4).linear.weight, -1 / 16, 1 / 16)
    assert_uniform(TRNN(64).f_proj.weight, -1 / 8, 1 / 8)
    assert TRNN(64).z_proj.bias is None
