"""LayerNormElman: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, layer_norm
from scanl.layers.rnn.layernorm_elman import LayerNormElman


def layernorm_elman(layer, xs):
    h, ys = torch.zeros(DIM), []
    for x in xs:
        raw = layer_norm(layer.weight_ih @ x + layer.weight_hh @ h, layer.layernorm)
        h = torch.tanh(raw) if layer.activation == "tanh" else torch.where(raw > 0, raw, 0)
        ys.append(h)
    return ys


EQUATIONS = {
    "layernorm_elman": (lambda: LayerNormElman(DIM), layernorm_elman),
    "layernorm_elman_relu": (lambda: LayerNormElman(DIM, "relu"), layernorm_elman),
}

REFUSED = [
    (lambda: LayerNormElman(0), "layernorm_elman: dim is 0, expected at least 1"),
    (lambda: LayerNormElman(8, "rel"), r"layernorm_elman: unknown activation 'rel'; did you mean 'relu'\?"),
]
