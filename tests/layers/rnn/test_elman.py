"""Elman: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM
from scanl.layers import Elman
from tests.layers.rnn.equations import gates


def elman(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        raw = sum(gates(layer, x, h, 1))[0]
        h = torch.tanh(raw) if layer.activation == "tanh" else torch.where(raw > 0, raw, 0)
        ys.append(h if layer.readout is None else layer.readout.weight @ h + layer.readout.bias)
    return ys


EQUATIONS = {
    "elman": (lambda: Elman(DIM), elman),
    "elman_of_its_own_width": (lambda: Elman(DIM, width=5), elman),
    "elman_relu": (lambda: Elman(DIM, "relu", False, "orthogonal"), elman),
}

REFUSED = [
    (lambda: Elman(8, "rel"), r"elman: unknown activation 'rel'; did you mean 'relu'\?"),
    (lambda: Elman(8, init="identit"), r"elman: unknown init 'identit'; did you mean"),
]
