"""Limit cycles at the start: the state moves for ever, gradients last, and slower rotations die."""

import math

import pytest
import torch

from scanl.errors import ConfigError
from scanl.layers import build
from scanl.layers.parts.limit_cycle import FASTEST, SLOWEST, rotations

STEPS = 4000


def run(name, frequencies=None):
    """Return the states (T, E) of a layer without input, and the product of their Jacobians, by the equations."""
    torch.manual_seed(0)
    layer = build(name, 6, init="limit_cycle").double()
    candidate = layer.weight_hh_l0[-6:]
    if frequencies is not None:
        with torch.no_grad():
            candidate.copy_(rotations(torch.tensor(frequencies).double(), {"elman": 1.5, "gru": 3.0}[name]))
    start = 2 * torch.rand(1, 6).double() - 1
    with torch.no_grad():
        states, _ = layer(torch.zeros(1, STEPS, 6).double(), start)
    before = torch.cat([start, states[0, :-1]])
    u = candidate.detach() if name == "elman" else candidate.detach() / 2  # r = 1/2
    slope = 1 - (before @ u.T).tanh().square()
    product, eye = torch.eye(6).double(), torch.eye(6).double()
    for t in range(STEPS):
        jacobian = slope[t][:, None] * u
        product = (jacobian if name == "elman" else (jacobian + eye) / 2) @ product  # z = 1/2
    return states[0], product


@pytest.mark.parametrize("name", ["elman", "gru"])
def test_every_pair_turns_for_ever_and_gradients_along_its_phase_last(name):
    states, product = run(name)
    radius = states.unflatten(1, (3, 2)).norm(dim=2)
    assert radius.min() > 0.5
    assert radius.max() < math.sqrt(2)
    assert (states[1:] - states[:-1]).unflatten(1, (3, 2)).norm(dim=2).min() > 0.01
    norms = torch.linalg.matrix_norm(torch.stack([product[i : i + 2, i : i + 2] for i in (0, 2, 4)]), ord=2)
    assert norms.min() > 0.05
    assert norms.max() < 10


@pytest.mark.parametrize("name", ["elman", "gru"])
def test_below_the_critical_frequency_the_cycle_dies(name):
    states, product = run(name, [math.pi / 25, math.pi / 40, math.pi / 23])
    assert (states[-1] - states[-2]).norm() < 1e-12
    assert product.norm() < 1e-12


def test_other_weights_are_those_of_the_program():
    torch.manual_seed(0)
    layer = build("gru", 200, init="limit_cycle")
    assert not layer.weight_hh_l0[:400].any()
    assert not layer.bias_ih_l0.any()
    assert not layer.bias_hh_l0.any()
    pairs = torch.stack([layer.weight_hh_l0[400 + i : 402 + i, i : i + 2] for i in range(0, 200, 2)]).detach() / 3
    torch.testing.assert_close(pairs @ pairs.mT, torch.eye(2).expand(100, 2, 2))
    turns = torch.atan2(pairs[:, 1, 0], pairs[:, 0, 0])
    assert turns.min() >= SLOWEST
    assert turns.max() <= FASTEST
    assert turns.max() - turns.min() > 0.8 * (FASTEST - SLOWEST)
    assert layer.weight_ih_l0.std().item() == pytest.approx((2 / 200) ** 0.5, rel=0.02)
    assert build("elman", 3, width=4, init="limit_cycle").weight_hh_l0.count_nonzero() == 8


def test_what_does_not_turn_is_refused():
    with pytest.raises(ConfigError, match='gru: init is "limit_cycle" with 5 units, expected an even number'):
        build("gru", 5, init="limit_cycle")
    with pytest.raises(ConfigError, match="gru: t_max is 9, expected None because"):
        build("gru", 4, init="limit_cycle", t_max=9)
    with pytest.raises(ConfigError, match='elman: init is "limit_cycle", expected another one because activation'):
        build("elman", 4, init="limit_cycle", activation="relu")
