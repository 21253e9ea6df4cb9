"""TARNN: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, assert_normal, assert_uniform, shaken, sigmoid, with_before
from scanl.layers.ode.irnn import IRNN
from scanl.layers.ode.tarnn import TARNN, TARNNState
from tests.layers.ode.equations import cosine, ones, phi

pytestmark = pytest.mark.cells_by_loop


def tarnn(layer, xs, spans=None):
    """The loops of the authors' program, with 0 before the first input."""
    before, ys = torch.zeros(DIM), []
    spans = spans if spans is not None else ones(xs)
    for (x, last), span in zip(with_before(xs), spans, strict=True):
        g = sigmoid(before @ layer.Ug + x @ layer.Wg + layer.bg)
        held = before @ layer.U2 + x @ layer.W1 + last @ layer.W2 + layer.b1
        h = before
        for a in layer.A1[:, 0] * span:
            flow = phi(layer.activation, h @ layer.U1 + held) - h - before + x @ layer.B1 + before @ layer.B2
            h = (1 - a) * h + a * flow if layer.variant == "b" else h + a * g * flow
        before = (1 - g) * before + g * h if layer.variant == "b" else h
        ys.append(before)
    return ys


OF_TARNN = {
    "tarnn": [0.030604279540, 0.043991528243, 0.021695526754, 0.023844234208],
    "tarnn_plain": [-0.152783140599, -0.086728493850, -0.144346668224, -0.090543228938],
}


EQUATIONS = {"tarnn": (lambda: TARNN(DIM), tarnn), "tarnn_plain": (lambda: TARNN(DIM, 3, "plain", "tanh"), tarnn)}

REFUSED = [
    (lambda: TARNN(8, 0), "tarnn: substeps is 0, expected at least 1"),
    (lambda: TARNN(8, variant="plan"), "tarnn: unknown variant 'plan'; did you mean 'plain'"),
    (lambda: TARNN(8, activation="tan"), "tarnn: unknown activation 'tan'; did you mean 'tanh'"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OF_TARNN)
def test_outputs_of_the_authors_tarnn(name):
    """Of their PyTorch program, with cosines as in `test_outputs_of_ncps`. It takes the first input twice."""
    x = torch.cos(torch.arange(2.0 * 4 * DIM)).view(2, 4, DIM)
    y, _ = cosine(EQUATIONS[name][0]())(x, TARNNState(torch.zeros(2, DIM), x[:, :1]))
    torch.testing.assert_close(y[:, -1, [0, -1]].flatten(), torch.tensor(OF_TARNN[name]), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("double")
def test_a_shut_gate_of_tarnn_keeps_the_state():
    for variant in ("b", "plain"):
        layer = shaken(TARNN(DIM, 2, variant))
        with torch.no_grad():
            layer.bg.fill_(-1000)
        state = TARNNState(torch.randn(2, DIM), torch.zeros(2, 1, DIM))
        y, last = layer(torch.randn(2, T, DIM), state)
        torch.testing.assert_close(last.h, state.h, rtol=0, atol=0)
        torch.testing.assert_close(y[:, 0], state.h, rtol=0, atol=0)


def test_init_of_irnn_and_tarnn():
    irnn = IRNN(64, 4)
    for weight in (irnn.W.weight, irnn.W.bias, irnn.U.weight):
        assert_uniform(weight, -1 / 8, 1 / 8)
    assert (irnn.eta == 0.01).all()
    low = IRNN(64, rank=20)
    assert (low.V2.shape, low.V.shape) == ((64, 20), (20, 64))
    for weight in (low.V2, low.V):
        assert_uniform(weight, -1 / 8, 1 / 8)
    for variant, start in (("b", -3), ("plain", 0)):
        layer = TARNN(64, 2, variant)
        for weight in (layer.W1, layer.W2, layer.Wg, layer.U1, layer.U2, layer.Ug, layer.B1, layer.B2):
            assert_normal(weight, 0.1)
        assert not layer.b1.any()
        assert (layer.bg == start).all()
        assert (layer.A1 == 0.01).all()
