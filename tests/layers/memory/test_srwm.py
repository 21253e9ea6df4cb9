"""SRWM: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T, assert_normal, assert_uniform, linear, sigmoid
from scanl import layers

pytestmark = pytest.mark.cells_by_loop("name")


def srwm(layer, xs):
    """The four matrices apart, each changed with its own learning rate."""
    H, K, ys = layer.num_heads, layer.head_dim, []
    now = [[weight[0, h] for weight in (layer.W_y, layer.W_q, layer.W_k, layer.w_b)] for h in range(H)]
    for x in xs:
        o = []
        for h, part in enumerate(x.view(H, K)):
            part = torch.exp(part) / torch.exp(part).sum() if layer.softmax else part
            y, q, k, b = (weight.T @ part for weight in now[h])
            q, k = torch.exp(q) / torch.exp(q).sum(), torch.exp(k) / torch.exp(k).sum()
            now[h] = [
                weight + sigmoid(rate) * torch.outer(k, weight.T @ q - weight.T @ k)
                for weight, rate in zip(now[h], b, strict=True)
            ]
            o.append(y)
        ys.append(linear(layer.out_linear, torch.cat(o)))
    return ys


EQUATIONS = {
    "srwm": (lambda: layers.build("srwm", DIM, num_heads=2), srwm),
    "srwm_softmax": (lambda: layers.build("srwm", DIM, num_heads=1, softmax=True), srwm),
}

WRONG = [("srwm", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8")]


def test_init_of_srwm():
    layer = layers.build("srwm", 512)
    for weight in (layer.W_y, layer.W_q, layer.W_k, layer.w_b):
        assert_normal(weight, 1 / 8)
    assert_uniform(layer.out_linear.weight, -(512**-0.5), 512**-0.5)


@pytest.mark.usefixtures("double")
def test_srwm_that_does_not_learn_is_a_linear_layer():
    layer, x = layers.build("srwm", DIM, num_heads=1), torch.rand(1, T, DIM)
    torch.nn.init.constant_(layer.w_b, -1e4)  # times inputs above 0
    y, state = layer(x)
    torch.testing.assert_close(y, layer.out_linear(x @ layer.W_y[0, 0]))
    assert not state.any()
