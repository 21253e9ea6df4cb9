"""MinGRU: its equation step by step, and how it starts."""

import torch
from torch.nn import functional as F

from by_hand import DIM, assert_uniform, sigmoid
from scanl.layers import HGRN, MinGRU


def mingru(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        v, z = (layer.to_hidden_and_gate.weight @ x + layer.to_hidden_and_gate.bias).split(layer.width)
        # log_g of the authors' appendix, exponentiated
        g = torch.exp(torch.where(v >= 0, torch.log(F.relu(v) + 0.5), -F.softplus(-v)))
        h = (1 - sigmoid(z)) * h + sigmoid(z) * g
        ys.append(layer.to_out.weight @ h + layer.to_out.bias)
    return ys


EQUATIONS = {"mingru": (lambda: MinGRU(DIM, 1.5), mingru)}


def test_init_of_hgrn_and_mingru():
    layer = HGRN(32)
    torch.testing.assert_close(layer.theta[0, 0], 10000 ** (-2 * torch.arange(32) / 32))
    gru = MinGRU(64, 2)
    assert_uniform(gru.to_hidden_and_gate.weight, -1 / 8, 1 / 8)
    assert gru.to_out.weight.shape == (64, 128)
