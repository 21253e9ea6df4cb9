"""GLRUScan: its equation step by step."""

import torch

from by_hand import DIM, linear, sigmoid, with_before
from scanl.layers.rnn.glru_scan import GLRUScan
from tests.layers.rnn.equations import gilr


def glru_scan(layer, xs):
    surrogate = gilr(layer.gilr, xs)
    c, ys = torch.zeros(DIM), []
    for x, (now, before) in zip(xs, with_before(surrogate), strict=True):
        f, i, o, z = linear(layer.linear, torch.cat([before if layer.shifted else now, x])).split(DIM)
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(z)
        ys.append(sigmoid(o) * (torch.tanh(c) if layer.activation == "tanh" else c))
    return ys


EQUATIONS = {
    "glru_scan": (lambda: GLRUScan(DIM), glru_scan),
    "glru_scan_as_released": (lambda: GLRUScan(DIM, False, "tanh"), glru_scan),
}
