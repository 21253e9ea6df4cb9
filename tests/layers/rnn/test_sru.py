"""SRU: its equation step by step, how it starts, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform, layer_norm, sigmoid
from scanl import layers
from scanl.layers.rnn.sru import SRU

pytestmark = pytest.mark.cells_by_loop


def sru(layer, xs):
    columns = layer.weight.view(DIM, DIM, 3)
    (v_f, v_r), (b_f, b_r) = layer.weight_c.split(DIM), layer.bias.split(DIM)
    c, ys = torch.zeros(DIM), []
    for x in xs:
        given = x if layer.layer_norm is None else layer_norm(x, layer.layer_norm)
        new, f, r = (given @ columns[:, :, part] for part in range(3))
        f, r = sigmoid(f + v_f * c + b_f), sigmoid(r + v_r * c + b_r)
        c = f * c + (1 - f) * new
        ys.append(r * c + (1 - r) * x * layer.scale_x)
    return ys


EQUATIONS = {
    "sru": (lambda: SRU(DIM), sru),
    "sru_norm": (lambda: SRU(DIM, layer_norm=True, highway_bias=-3.0, rescale=False), sru),
    "sru_v1": (lambda: layers.build("sru_v1", DIM), sru),
}

REFUSED = [(lambda: SRU(0), "sru: dim is 0, expected at least 1")]


def test_init_of_sru():
    layer, limit = SRU(256, highway_bias=-3.0), math.sqrt(3 / 256)
    columns = layer.weight.view(256, 256, 3)
    assert_uniform(columns[..., 0], -limit, limit)
    for gate in (1, 2):
        assert_uniform(columns[..., gate], -limit * math.sqrt(0.5), limit * math.sqrt(0.5))
    assert_uniform(layer.weight_c, -math.sqrt(1.5), math.sqrt(1.5))
    assert layer.bias.tolist() == [0.0] * 256 + [-3.0] * 256
    torch.testing.assert_close(layer.scale_x, torch.tensor([math.sqrt(1 + 2 * math.exp(-3))]))
    assert SRU(8, rescale=False).scale_x == 1
    assert_uniform(SRU(256, "v1", layer_norm=True).weight, -0.1 * limit, 0.1 * limit)
    assert set(layer.state_dict()) == set(SRU(8, "v1").state_dict()) == {"weight", "weight_c", "bias", "scale_x"}
