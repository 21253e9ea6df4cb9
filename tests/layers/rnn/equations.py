"""Equations that several layers of this family are written with, and what their tests share."""

import torch

from by_hand import DIM, linear, sigmoid


def gilr(layer, xs):
    s, ys = torch.zeros(DIM), []
    for x in xs:
        gate, impulse = linear(layer.linear, x).split(DIM)
        if layer.activation == "elu":
            impulse = torch.where(impulse > 0, impulse, torch.exp(impulse) - 1)
        elif layer.activation == "tanh":
            impulse = torch.tanh(impulse)
        s = sigmoid(gate) * s + (1 - sigmoid(gate)) * impulse
        ys.append(s)
    return ys


def gates(layer, x, h, count):
    """What reaches each gate from the input and from the state."""
    from_x, from_h = layer.weight_ih_l0 @ x, layer.weight_hh_l0 @ h
    if layer.bias:
        from_x, from_h = from_x + layer.bias_ih_l0, from_h + layer.bias_hh_l0
    return from_x.view(count, -1), from_h.view(count, -1)


def gru(layer, xs):
    h, ys = torch.zeros(DIM), []
    for x in xs:
        from_x, from_h = gates(layer, x, h, 3)
        r, z = sigmoid(from_x[0] + from_h[0]), sigmoid(from_x[1] + from_h[1])
        h = (1 - z) * torch.tanh(from_x[2] + r * from_h[2]) + z * h
        ys.append(h)
    return ys


def real_modrelu(z, b):
    return torch.where(z.abs() + b > 0, torch.sign(z) * (z.abs() + b), 0)


def skew(m):
    return torch.tensor([]) if not len(m) else torch.triu(m, 1) - torch.triu(m, 1).T


def exponential(a):
    """By its series, of a part of a that is small, squared again."""
    a, term, total = a / 2**10, torch.eye(len(a)), torch.eye(len(a))
    for n in range(1, 15):
        term = term @ a / n
        total = total + term
    for _ in range(10):
        total = total @ total
    return total
