"""LSTM: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, sigmoid
from scanl.layers import LSTM
from tests.layers.rnn.equations import gates


def lstm(layer, xs):
    h, c, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        i, f, g, o = sum(gates(layer, x, h, 4))
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
        h = sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return ys


EQUATIONS = {"lstm": (lambda: LSTM(DIM, forget_bias=1.0), lstm), "lstm_without_bias": (lambda: LSTM(DIM, False), lstm)}

REFUSED = [
    (lambda: LSTM(8, False, 1.0), "lstm: forget_bias is 1.0, expected None because of bias=False"),
    (lambda: LSTM(8, forget_bias=1.0, t_max=9), "lstm: t_max is 9, expected None because of forget_bias=1.0"),
    (lambda: LSTM(8, t_max=2), "lstm: t_max is 2, expected at least 3"),
]
