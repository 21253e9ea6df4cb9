"""Comba: its equation step by step, and how it starts."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform, sigmoid, unit
from scanl import layers
from tests.layers.memory.equations import assert_time_steps, gated_deltanet, undecayed

pytestmark = pytest.mark.cells_by_loop("name")


def comba(layer, xs):
    def step(layer, S, q, k, v, beta, alpha, g):
        p = sigmoid(layer.decay[g]) * k
        read = unit(q - layer.D[g] * p)
        S = alpha * S + beta * torch.outer(unit(k), v - S.T @ unit(p))
        return S, S.T @ read / math.sqrt(len(q))

    return gated_deltanet(layer, xs, step, sigmoid)


EQUATIONS = {
    "comba": (lambda: layers.build("comba", DIM, head_dim=3, num_heads=2, num_v_heads=4), comba),
    "comba_plain": (
        lambda: layers.build("comba", DIM, num_heads=2, output_gate=False, conv_size=None, correction_factor=0.02),
        comba,
    ),
}


def test_init_of_comba():
    layer = layers.build("comba", 64, head_dim=2, num_heads=4000, correction_factor=0.02)
    assert_uniform(layer.A_log.exp(), 0, 16)
    assert_time_steps(layer.dt_bias)
    assert_normal(layer.g_proj.weight, 0.02)
    assert (layer.decay == 1).all()
    assert (layer.D == 0.02).all()
    assert {"A_log", "dt_bias", "D"} <= undecayed(layer)
