"""Equations that several layers of this family are written with, and what their tests share."""

import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.ode.ltc import LTC


def ones(xs):
    return [1.0] * len(xs)


def masked(module, name, v):
    """One of the maps of a closed form, with its mask if it has one."""
    own = getattr(module, name)
    weight = own.weight if module.sparsity_mask is None or "time" in name else own.weight * module.sparsity_mask
    return weight @ v + own.bias


def closed(module, mode, v, span):
    """Equation (2), its form without the gate, or the solution that it approximates."""
    f = masked(module, "ff1", v)
    if mode == "pure":
        return module.A[0] - module.A[0] * torch.exp(-span * (module.w_tau[0].abs() + f.abs())) * f
    share = sigmoid(masked(module, "time_a", v) * span + masked(module, "time_b", v))
    g, k = torch.tanh(f), torch.tanh(masked(module, "ff2", v))
    return g + share * k if mode == "no_gate" else (1 - share) * g + share * k


def mixed(memory, x, h, c):
    z, i, f, o = (linear(memory.input_map, x) + memory.recurrent_map.weight @ h).chunk(4)
    c = sigmoid(f + 1) * c + sigmoid(i) * torch.tanh(z)
    return sigmoid(o) * torch.tanh(c), c


def cosine(layer):
    """The layer with every parameter made of cosines; those of an LTC are positive, so that none is constrained."""
    middle = 0.6 if isinstance(layer, LTC) else 0.0
    with torch.no_grad():
        for at, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.copy_((middle + 0.4 * torch.cos(numbers + at)).view(parameter.shape))
    return layer


def last_output(layer):
    """The last output for two rows of four inputs and time spans, the first and last channel of each row."""
    x = torch.cos(torch.arange(2.0 * 4 * DIM)).view(2, 4, DIM)
    y, _ = layer(x, timespans=1 + 0.5 * torch.sin(torch.arange(8.0)).view(2, 4))
    return y[:, -1, [0, -1]].flatten()


def phi(name, v):
    return torch.tanh(v) if name == "tanh" else torch.where(v > 0, v, 0)


def irnn(layer, xs, spans=None):
    before, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        h = before if layer.init == "state" else torch.zeros(DIM)
        for eta in layer.eta:
            if layer.rank is None:
                inner = layer.U.weight @ (h + before) + linear(layer.W, x)
            else:
                inner = h + before + (h + before) @ layer.V2 @ layer.V + linear(layer.W, x)
                inner = inner + inner @ layer.V2 @ layer.V
            moved = phi(layer.activation, inner) - layer.alpha * (h + before)
            h = h + span * eta * moved
        before = h
        ys.append(h)
    return ys


def along(field, v):
    """What the perceptron gives for v."""
    z = torch.tanh(linear(field.first, v))
    for each in field.deep:
        z = torch.tanh(linear(each, z))
    return linear(field.last, z)


def moved(flow, h, span, method, substeps):
    dt = span / substeps
    for _ in range(substeps):
        k1 = flow(h)
        k2 = flow(h + dt * k1 / 2)
        if method == "euler":
            h = h + dt * k1
        elif method == "midpoint":
            h = h + dt * k2
        else:
            k3 = flow(h + dt * k2 / 2)
            k4 = flow(h + dt * k3)
            h = h + dt * (k1 / 6 + k2 / 3 + k3 / 3 + k4 / 6)
    return h


def part_skew(m, beta, gamma):
    """The matrix that multiplies a row, element by element."""
    size = len(m)
    return torch.stack(
        [
            torch.stack(
                [(1 - beta) * (m[i, j] + m[j, i]) + beta * (m[i, j] - m[j, i]) - gamma * (i == j) for j in range(size)]
            )
            for i in range(size)
        ]
    )
