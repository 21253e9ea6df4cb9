"""HiPPORNN: its equation step by step, how it starts, and what only it knows."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, linear, sigmoid
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers import HiPPORNN
from tests.layers.ssm.equations import discrete, system

pytestmark = pytest.mark.cells_by_loop("name")


def hippo_rnn(layer, xs, spans=None):
    A, B = system(layer.measure, layer.state_dim)
    s, c, ys = torch.zeros(layer.dim), torch.zeros(layer.state_dim), []
    time = 0.0
    for i, x in enumerate(xs):
        span = 1.0 if spans is None else spans[i].item()
        f = linear(layer.W_uxh, torch.cat([x, s]))
        if layer.measure != "legs":
            a, b = discrete(A, B, 0.01 * span, "zoh")
        elif i == 0:
            a, b = torch.zeros_like(A), torch.eye(layer.state_dim)[0]
        else:
            a, b = discrete(A, B, span / min(time, layer.max_length), "bilinear")
        time += span
        c = a @ c + b * f
        g = sigmoid(linear(layer.W_g, torch.cat([x, c])))
        s = (1 - g) * s + g * torch.tanh(linear(layer.W_hxm, torch.cat([x, c])))
        ys.append(s)
    return ys


EQUATIONS = {
    "hippo_rnn": (lambda: HiPPORNN(DIM, 5), hippo_rnn),
    "hippo_rnn_wide": (lambda: HiPPORNN(DIM, 37), hippo_rnn),
    "hippo_rnn_held": (lambda: HiPPORNN(DIM, 3, max_length=3), hippo_rnn),
    "hippo_rnn_legt": (lambda: HiPPORNN(DIM, measure="legt"), hippo_rnn),
    "hippo_rnn_lagt": (lambda: HiPPORNN(DIM, 4, "lagt"), hippo_rnn),
}


def test_init_of_hippo_rnn():
    layer = HiPPORNN(300, 500)
    assert_uniform(layer.W_uxh.weight, -math.sqrt(3 / 600), math.sqrt(3 / 600))
    assert_normal(layer.W_hxm.weight[:, :300], math.sqrt(2 / 600))
    assert_normal(layer.W_hxm.weight[:, 300:], math.sqrt(2 / 800))
    assert_normal(layer.W_g.weight, math.sqrt(1 / 800))
    assert_uniform(layer.W_g.bias, -1 / math.sqrt(800), 1 / math.sqrt(800))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "fourier"}, "hippo_rnn: unknown measure 'fourier'"),
        ({"state_dim": 0}, "hippo_rnn: state_dim is 0, expected at least 1"),
        ({"max_length": 0}, "hippo_rnn: max_length is 0, expected at least 1"),
    ],
)
def test_wrong_options_of_hippo_rnn_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        layers.build("hippo_rnn", DIM, **options)
