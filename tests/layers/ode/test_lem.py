"""LEM: its equation step by step, and what it refuses."""

import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.ode.lem import LEM


def lem(layer, xs):
    y, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        v1, v2, v_y, v_z = linear(layer.inp2hid, x).split(DIM)
        w1, w2, w_z = linear(layer.hid2hid, y).split(DIM)
        long, short = layer.dt * sigmoid(v2 + w2), layer.dt * sigmoid(v1 + w1)
        z = (1 - long) * z + long * torch.tanh(w_z + v_z)
        y = (1 - short) * y + short * torch.tanh(linear(layer.transform_z, z) + v_y)
        ys.append(y)
    return ys


EQUATIONS = {"lem": (lambda: LEM(DIM, 0.7), lem)}

REFUSED = [(lambda: LEM(8, -0.5), "lem: dt is -0.5, expected more than 0")]
