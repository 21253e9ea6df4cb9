"""GatedConvolution: its equation step by step, how it starts, and what it refuses."""

from by_hand import DIM, assert_normal, sigmoid
from scanl.layers.rnn.gated_convolution import GatedConvolution


def gated_convolution(layer, xs):
    ys = []
    for t in range(len(xs)):
        raw = layer.linear.bias.clone()
        for j, weight in enumerate(layer.linear.weight.split(DIM, 1)):
            raw = raw + (weight @ xs[t - j] if t >= j else 0)
        ys.append(raw[:DIM] * sigmoid(raw[DIM:]))
    return ys


EQUATIONS = {
    "gated_convolution": (lambda: GatedConvolution(DIM), gated_convolution),
    "gated_convolution_1": (lambda: GatedConvolution(DIM, 1), gated_convolution),
}

WRONG = [("gated_convolution", {"conv_size": 0}, "conv_size is 0, expected at least 1")]


def test_how_it_starts():
    layer = GatedConvolution(64, 4)
    assert_normal(layer.linear.weight, (2 / 256) ** 0.5)
    assert not layer.linear.bias.any()
