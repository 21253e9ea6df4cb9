"""eLSTM: its equation step by step, how it starts, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.rnn.elstm import ELSTM

pytestmark = pytest.mark.cells_by_loop


def elstm(layer, xs):
    c, ys = torch.zeros(DIM), []
    for x in xs:
        z = torch.tanh(layer.wm_z @ x + layer.wv_z[0] * c + layer.bias_z[0])
        f = sigmoid(layer.wm_f @ x + layer.wv_f[0] * c + layer.bias_f[0])
        c = f * c + (1 - f) * z
        gate = 1 if layer.out_gate_linear is None else sigmoid(linear(layer.out_gate_linear, torch.cat([x, c])))
        ys.append(c * gate)
    return ys


EQUATIONS = {
    "elstm": (lambda: ELSTM(DIM, forget_bias=1.0), elstm),
    "elstm_without_gate": (lambda: ELSTM(DIM, output_gate=False), elstm),
}

REFUSED = [(lambda: ELSTM(0), "elstm: dim is 0, expected at least 1")]


def test_init_of_elstm():
    layer = ELSTM(300, forget_bias=2.0)
    for weight in (layer.wm_z, layer.wm_f):
        assert abs(weight.std().item() - 0.1) < 0.1 * 4 / (2 * 90_000) ** 0.5
    assert abs(layer.bias_f.mean().item() - 2) < 0.1 * 4 / 300**0.5
    assert abs(layer.bias_z.mean().item()) < 0.1 * 4 / 300**0.5
    assert layer.hints["wv_z"].weight_decay is False
