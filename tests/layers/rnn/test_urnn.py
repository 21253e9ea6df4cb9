"""URNN: its equation step by step, how it starts, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_uniform
from scanl.layers.rnn.urnn import URNN

pytestmark = pytest.mark.cells_by_loop


def urnn(layer, xs):
    """Factor by factor, with the transform as a sum."""
    size = layer.width
    place = torch.arange(size)
    fourier = torch.exp(-2j * math.pi * place[:, None] * place / size) / math.sqrt(size)
    v = torch.complex(layer.reflection[:, :size], layer.reflection[:, size:])
    h, ys = torch.complex(layer.h_0[0, :size], layer.h_0[0, size:]), []
    for x in xs:
        h = fourier @ (torch.exp(1j * layer.theta[0]) * h)
        h = h - 2 * v[0].conj() * (v[0] * h).sum() / (v[0].abs() ** 2).sum()
        h = fourier.conj() @ (torch.exp(1j * layer.theta[1]) * h[layer.permutation])
        h = h - 2 * v[1].conj() * (v[1] * h).sum() / (v[1].abs() ** 2).sum()
        given = x @ layer.V
        z = torch.exp(1j * layer.theta[2]) * h + torch.complex(given[:size], given[size:])
        raised = z.abs() + layer.hidden_bias
        h = z * torch.where(raised > 0, raised, 0) / (z.abs() + 1e-5)
        ys.append(torch.cat([h.real, h.imag]) @ layer.U + layer.out_bias)
    return ys


EQUATIONS = {"urnn": (lambda: URNN(DIM), urnn), "urnn_wide": (lambda: URNN(DIM, 11), urnn)}

REFUSED = [(lambda: URNN(8, 0), "urnn: width is 0, expected at least 1")]


def test_a_learned_initial_state_is_trained():
    layer = URNN(DIM)
    layer(torch.randn(2, 3, DIM))[0].sum().backward()
    assert layer.h_0.grad.all()
    torch.testing.assert_close(layer.init_state(2).flatten(1), layer.h_0.expand(2, -1))


def test_init_of_urnn():
    layer = URNN(64, 32)
    limit = math.sqrt(6 / 128)
    assert_uniform(layer.V, -limit, limit)
    assert_uniform(layer.U, -limit, limit)
    assert_uniform(layer.reflection, -math.sqrt(6 / 66), math.sqrt(6 / 66))
    assert_uniform(layer.theta, -math.pi, math.pi)
    assert_uniform(layer.hidden_bias, -0.01, 0.01)
    assert_uniform(layer.h_0, -math.sqrt(3 / 64), math.sqrt(3 / 64))
    assert not layer.out_bias.any()
    assert sorted(layer.permutation.tolist()) == list(range(32))
