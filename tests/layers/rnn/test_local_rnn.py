"""LocalRNN: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, sigmoid
from scanl.layers import LocalRNN

ELMAN, GRU, LSTM = 1, 3, 4  # gates


def last_output(rnn, xs):
    """Run the equations of the network over xs from zeros; return the last output."""
    h = c = torch.zeros(DIM)
    for x in xs:
        a = rnn.weight_ih_l0 @ x + rnn.bias_ih_l0
        b = rnn.weight_hh_l0 @ h + rnn.bias_hh_l0
        if rnn.gates == ELMAN:
            h = torch.tanh(a + b)
        elif rnn.gates == GRU:
            r, z = (sigmoid(u + v) for u, v in zip(a.chunk(3)[:2], b.chunk(3)[:2], strict=True))
            h = (1 - z) * torch.tanh(a.chunk(3)[2] + r * b.chunk(3)[2]) + z * h
        else:
            i, f, g, o = (a + b).chunk(4)
            c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
            h = sigmoid(o) * torch.tanh(c)
    return h


def local_rnn(layer, xs):
    padded = [torch.zeros(DIM)] * layer.past + xs
    return [last_output(layer.rnn, padded[t : t + layer.past + 1]) for t in range(len(xs))]


EQUATIONS = {
    "local_rnn": (lambda: LocalRNN(DIM, 3), local_rnn),
    "local_rnn_lstm": (lambda: LocalRNN(DIM, 4, "lstm"), local_rnn),
    "local_rnn_elman": (lambda: LocalRNN(DIM, 2, "elman"), local_rnn),
}

WRONG = [
    ("local_rnn", {"window": 0}, "window is 0, expected at least 1"),
    ("local_rnn", {"variant": "gruu"}, "unknown variant 'gruu'"),
]
