"""LIF: its equation step by step, the pseudo-derivative of a spike, and how its weights start."""

import math

import pytest
import torch

from by_hand import DIM
from scanl.layers.rnn._spikes import spike
from scanl.layers.rnn.lif import LIF

pytestmark = pytest.mark.cells_by_loop


def made():
    layer = LIF(DIM, tau=3.0)
    torch.nn.init.constant_(layer.bias, 0.2)  # spikes are rare without
    return layer


def lif(layer, xs):
    v, z, ys = torch.zeros(DIM), torch.zeros(DIM), []
    for x in xs:
        from_others = torch.stack([sum(layer.weight_hh[j, i] * z[i] for i in range(DIM) if i != j) for j in range(DIM)])
        v = math.exp(-1 / 3) * v + layer.weight_ih @ x + layer.bias + from_others - z
        z = (v > 1).to(v.dtype)
        ys.append(z)
    return ys


EQUATIONS = {"lif": (made, lif)}

REFUSED = [
    (lambda: LIF(3, tau=0.0), "lif: tau is 0.0, expected more than 0"),
    (lambda: LIF(3, gamma=-0.1), "lif: gamma is -0.1, expected at least 0"),
]


def test_a_spike_is_0_or_1_and_its_derivative_is_a_triangle():
    u = torch.tensor([-3.0, -0.5, 0.0, 0.25, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    z = spike(u, 0.3)
    assert z.tolist() == [0, 0, 0, 1, 1, 1]
    (psi,) = torch.autograd.grad(z.sum(), u)
    torch.testing.assert_close(psi, torch.tensor([0, 0.15, 0.3, 0.225, 0, 0], dtype=torch.float64))


def test_a_steady_current_makes_a_neuron_spike_regularly():
    """Without decay, a current of a quarter of the threshold: one spike in four steps."""
    layer = LIF(1, tau=1e12)
    torch.nn.init.zeros_(layer.weight_ih)
    torch.nn.init.constant_(layer.bias, 0.25)
    y, _ = layer(torch.zeros(1, 41, 1))
    assert y.flatten().nonzero().flatten().tolist() == list(range(4, 41, 4))


def test_with_its_first_weights_v_has_about_the_variance_of_the_input():
    torch.manual_seed(0)
    layer = LIF(64, tau=5.0)
    assert abs(layer.weight_hh.std() - 1 / 8) < 0.01
    torch.nn.init.zeros_(layer.weight_hh)
    v, x = torch.zeros(64), torch.randn(2000, 64) @ layer.weight_ih.detach().T
    squares = []
    for current in x:
        v = layer.leak * v + current
        squares.append(v.square().mean().item())
    assert 0.8 < sum(squares[50:]) / 1950 < 1.2
