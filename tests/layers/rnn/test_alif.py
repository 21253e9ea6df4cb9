"""ALIF: its equation step by step, and what the adaptation does."""

import math

import pytest
import torch

from by_hand import DIM
from scanl.layers.rnn.alif import ALIF

pytestmark = pytest.mark.cells_by_loop


def made():
    layer = ALIF(DIM, tau=3.0, decay=0.85, beta=0.4)
    torch.nn.init.constant_(layer.bias, 0.3)  # spikes are rare without
    return layer


def alif(layer, xs):
    v, a, z, ys = torch.zeros(DIM), torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        from_others = torch.stack([sum(layer.weight_hh[j, i] * z[i] for i in range(DIM) if i != j) for j in range(DIM)])
        v = math.exp(-1 / 3) * v + layer.weight_ih @ x + layer.bias + from_others - z
        a = 0.85 * a + z
        z = (v > 1 + 0.4 * a).to(v.dtype)
        ys.append(z)
    return ys


EQUATIONS = {"alif": (made, alif)}

REFUSED = [
    (lambda: ALIF(3, decay=1.5), "alif: decay is 1.5, expected 0 to 1"),
    (lambda: ALIF(3, beta=-1.0), "alif: beta is -1.0, expected at least 0"),
]


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_adaptation_lowers_the_rate_under_a_steady_current(beta):
    """Without decay the threshold rises by β with each spike, which costs a neuron 1 + β of the current in all."""
    layer = ALIF(1, tau=1e12, decay=1.0, beta=beta)
    torch.nn.init.zeros_(layer.weight_ih)
    torch.nn.init.constant_(layer.bias, 0.5)
    y, state = layer(torch.zeros(1, 120, 1))
    v, a = state[0]
    assert abs(y.sum().item() - 60 / (1 + beta)) <= 1
    assert a.item() == y[:, :-1].sum().item()  # the last step's spike enters in the next one
    assert v.item() == 60 - a.item()
