"""S7Full: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, gelu, linear, sigmoid
from scanl.layers import S7Full


def s7_full(layer, xs):
    N, D, s, ys = layer.state_dim, layer.dim, torch.zeros(layer.state_dim), []
    for x in xs:
        A, B, C, skip, bias = linear(layer.x_proj, x).split([N, D * N, D * N, D, N])
        s = (1 - 1 / ((A + layer.base) ** 2 + 0.5)) * s + B.view(D, N).T @ x + bias
        z = C.view(D, N) @ s + skip * x
        ys.append(z * sigmoid(linear(layer.gate_proj, gelu(z))))
    return ys


EQUATIONS = {"s7_full": (lambda: S7Full(DIM, 3), s7_full)}

WRONG = [("s7_full", {"state_dim": 0}, "state_dim is 0, expected at least 1")]
