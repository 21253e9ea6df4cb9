"""MinLSTM: its equation step by step, the paper's form in log space, gates that vanish, and how it starts."""

import pytest
import torch
from torch.nn import functional as F

from by_hand import DIM, assert_uniform, sigmoid
from scanl.errors import ConfigError
from scanl.layers import MinLSTM


def minlstm(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        v, f, i = (layer.to_hidden_and_f_i_gate.weight @ x + layer.to_hidden_and_f_i_gate.bias).split(layer.width)
        g = torch.where(v >= 0, v + 0.5, sigmoid(v))
        f, i = sigmoid(f), sigmoid(i)
        h = f / (f + i) * h + i / (f + i) * g
        ys.append(layer.to_out.weight @ h + layer.to_out.bias)
    return ys


EQUATIONS = {"minlstm": (lambda: MinLSTM(DIM, 1.5), minlstm)}


def in_log_space(layer, x):
    """Return the states by the paper's appendix B: the logarithm of each state is a sum of exponentials' logarithm."""
    v, f, i = layer.to_hidden_and_f_i_gate(x).chunk(3, -1)
    ratio = F.softplus(-f) - F.softplus(-i)
    keep = -F.softplus(ratio)
    values = -F.softplus(-ratio) + torch.where(v >= 0, (F.relu(v) + 0.5).log(), -F.softplus(-v))
    total = keep.cumsum(1)
    return (total + (values - total).logcumsumexp(1)).exp()


def test_the_scan_equals_the_one_in_log_space():
    layer, x = MinLSTM(5, 2).double(), torch.randn(2, 30, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], layer.to_out(in_log_space(layer, x)))


def test_gates_that_vanish_keep_their_quotient():
    """Both gates are e^-200, which is 0 in float32: each has half of the sum."""
    layer = MinLSTM(1).float()
    with torch.no_grad():
        layer.to_hidden_and_f_i_gate.weight.zero_()
        layer.to_hidden_and_f_i_gate.bias.copy_(torch.tensor([1.5, -200.0, -200.0]))
    _, state = layer(torch.zeros(1, 2, 1))
    assert state.item() == 1.5  # g = 2; half of it, and then half of 1 and half of 2


def test_init():
    layer = MinLSTM(64, 2)
    assert_uniform(layer.to_hidden_and_f_i_gate.weight, -1 / 8, 1 / 8)
    assert layer.to_hidden_and_f_i_gate.weight.shape == (384, 64)
    assert layer.to_out.weight.shape == (64, 128)


def test_a_state_without_channels_is_refused():
    with pytest.raises(ConfigError, match=r"minlstm: expand is 0\.1, expected at least 1/8 because of dim=8"):
        MinLSTM(8, 0.1)
