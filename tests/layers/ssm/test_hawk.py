"""Hawk: its equation step by step."""

from by_hand import DIM, convolve, gelu_tanh
from scanl.layers import Hawk
from tests.layers.ssm.equations import rglru


def hawk(layer, xs):
    branch = convolve([layer.linear_x.weight @ x + layer.linear_x.bias for x in xs], layer.conv_1d.conv)
    gates = [gelu_tanh(layer.linear_y.weight @ x + layer.linear_y.bias) for x in xs]
    hs = rglru(layer.rg_lru, branch)
    return [layer.linear_out.weight @ (g * h) + layer.linear_out.bias for g, h in zip(gates, hs, strict=True)]


EQUATIONS = {"hawk": (lambda: Hawk(DIM, 2, 6), hawk)}
