"""TRNN: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, linear, sigmoid, with_before
from scanl import layers
from scanl.layers.rnn.trnn import TRNN


def trnn(layer, xs):
    h, ys = torch.zeros(DIM), []
    for x, before in with_before(xs):
        seen = x if layer.variant == "rnn" else torch.cat([x, before])
        z, f = linear(layer.z_proj, seen), sigmoid(linear(layer.f_proj, seen))
        if layer.variant == "rnn":
            h = f * h + (1 - f) * z
            ys.append(h)
            continue
        o = torch.tanh(linear(layer.o_proj, seen))
        h = f * h + (z * o if layer.variant == "gru" else (1 - f) * z)
        ys.append(h if layer.variant == "gru" else h * o)
    return ys


EQUATIONS = {
    "trnn": (lambda: TRNN(DIM), trnn),
    "tgru": (lambda: layers.build("tgru", DIM), trnn),
    "tlstm": (lambda: layers.build("tlstm", DIM), trnn),
}

REFUSED = [
    (lambda: TRNN(0), "trnn: dim is 0, expected at least 1"),
    (lambda: TRNN(8, "lst"), r"trnn: unknown variant 'lst'; did you mean 'lstm'\?"),
]
