"""CfC: its equation step by step, how it starts, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_orthogonal, assert_uniform, gelu, linear, silu
from scanl.layers.ode.cfc import CfC
from scanl.layers.ode.cfc_ncp import CfCNCP
from tests.layers.ode.equations import closed, mixed, ones

pytestmark = pytest.mark.cells_by_loop


def activated(name, v):
    if name == "lecun_tanh":
        return 1.7159 * torch.tanh(0.666 * v)
    return {"silu": silu, "gelu": gelu, "relu": lambda v: torch.where(v > 0, v, 0), "tanh": torch.tanh}[name](v)


def cfc(layer, xs, spans=None):
    h, c, ys = torch.zeros(layer.width), torch.zeros(layer.width), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        if layer.lstm is not None:
            h, c = mixed(layer.lstm, x, h, c)
        v = torch.cat([x, h])
        for each in layer.rnn_cell.backbone.values():
            v = activated(layer.activation, linear(each, v))
        h = closed(layer.rnn_cell, layer.variant, v, span)
        ys.append(h if layer.width == DIM else linear(layer.fc, h))
    return ys


def assert_xavier(weight):
    limit = (6 / sum(weight.shape)) ** 0.5
    assert_uniform(weight, -limit, limit)


EQUATIONS = {
    "cfc": (lambda: CfC(DIM, hidden_dim=6), cfc),
    "cfc_no_gate": (lambda: CfC(DIM, 5, "no_gate", 6, 2, "silu"), cfc),
    "cfc_pure": (lambda: CfC(DIM, variant="pure", hidden_dim=6, activation="gelu"), cfc),
    "cfc_without_backbone": (lambda: CfC(DIM, 5, depth=0, mixed_memory=True), cfc),
    "cfc_mixed": (lambda: CfC(DIM, 5, "pure", 6, 3, "tanh", True), cfc),
}

REFUSED = [
    (lambda: CfC(8, 0), "cfc: width is 0, expected at least 1"),
    (lambda: CfC(8, depth=-1), "cfc: depth is -1, expected at least 0"),
    (lambda: CfC(8, variant="nogate"), "cfc: unknown variant 'nogate'; did you mean 'no_gate'"),
    (lambda: CfC(8, activation="lecun"), "cfc: unknown activation 'lecun'; did you mean 'lecun_tanh'"),
]


def test_init_of_cfc():
    """Xavier-uniform matrices: sqrt(6 / (fan in + fan out))."""
    layer = CfC(64, 96, hidden_dim=32, mixed_memory=True)
    assert_xavier(layer.rnn_cell.backbone["0"].weight)
    for name in ("ff1", "ff2", "time_a", "time_b"):
        assert_xavier(getattr(layer.rnn_cell, name).weight)
        assert_uniform(getattr(layer.rnn_cell, name).bias, -(32**-0.5), 32**-0.5)
    assert_xavier(layer.lstm.input_map.weight)
    assert_uniform(layer.lstm.input_map.bias, -0.1, 0.1)
    assert_orthogonal(layer.lstm.recurrent_map.weight, 1)
    pure = CfC(256, variant="pure").rnn_cell
    assert_xavier(pure.w_tau)
    assert (pure.A == 1).all()
    for part in CfCNCP(64).rnn_cell.maps():
        assert_xavier(part.ff1.weight)
        below, own = part.sparsity_mask.split([part.sparsity_mask.shape[1] - len(part.ff1.bias), len(part.ff1.bias)], 1)
        assert 0.4 < below.mean() < 0.7
        assert (own == 1).all()
