"""LayerNormLSTM: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, layer_norm, sigmoid
from scanl.layers.rnn.layernorm_lstm import LayerNormLSTM


def layernorm_lstm(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        raw = layer_norm(layer.weight_ih @ x, layer.layernorm_i) + layer_norm(layer.weight_hh @ h, layer.layernorm_h)
        i, f, g, o = raw.split(DIM)
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        normed = layer_norm(c, layer.layernorm_c)
        h = sigmoid(o) * torch.tanh(normed)
        c = normed if layer.carry_normed else c
        ys.append(h)
    return ys


EQUATIONS = {
    "layernorm_lstm": (lambda: LayerNormLSTM(DIM), layernorm_lstm),
    "layernorm_lstm_carried": (lambda: LayerNormLSTM(DIM, carry_normed=True, norm_eps=1e-3), layernorm_lstm),
}

REFUSED = [
    (lambda: LayerNormLSTM(0), "layernorm_lstm: dim is 0, expected at least 1"),
    (lambda: LayerNormLSTM(8, t_max=2), "layernorm_lstm: t_max is 2, expected at least 3"),
]
