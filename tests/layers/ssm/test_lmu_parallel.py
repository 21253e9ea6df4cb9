"""LMUParallel: its equation step by step."""

import torch

from by_hand import DIM, linear
from scanl.layers import LMUParallel
from tests.layers.ssm.equations import window


def lmu_parallel(layer, xs, spans=None):
    m, ys = torch.zeros(layer.state_dim), []
    for i, x in enumerate(xs):
        a, b = window(layer, spans, i)
        m = a @ m + b * linear(layer.W_u, x).clamp(min=0)
        ys.append(linear(layer.W_h, torch.cat([m, x])).clamp(min=0))
    return ys


EQUATIONS = {"lmu_parallel": (lambda: LMUParallel(DIM, 5, 7.0), lmu_parallel)}
