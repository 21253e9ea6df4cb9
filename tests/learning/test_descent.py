"""The loop of fits in memory: steps by hand, a clipped gradient, and errors for what is not finite."""

import math

import pytest
import torch

from scanl.errors import DivergenceError
from scanl.learning.descent import descend


def descent(step_loss, steps=3, clip=math.inf, start=(1.0, -2.0), lr=0.25):
    """Descend with plain gradients and a rate that halves at every step; return the losses and the parameter."""
    weight = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return descend([weight], optimizer, schedule, steps, lambda step: step_loss(weight, step), clip), weight


def test_steps_are_those_of_gradient_descent_by_hand():
    losses, weight = descent(lambda w, step: (step + 1) * w.square().sum())
    # w becomes w (1 - 2 lr (step + 1)): factors 1 - 1/2, 1 - 1/2 and 1 - 3/8 of rates 1/4, 1/8 and 1/16
    assert losses == [5.0, 2 * 5 / 4, 3 * 5 / 16]
    assert weight.tolist() == [0.25 * 5 / 8, -0.5 * 5 / 8]


def test_a_step_can_be_the_last():
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    calls = []

    def after(step, loss):
        calls.append((step, loss))
        return step == 1

    losses = descend([weight], optimizer, schedule, 5, lambda _: weight.square().sum(), after=after)
    assert losses == [1.0, 0.25]  # w halves at each step
    assert calls == [(0, 1.0), (1, 0.25)]
    assert weight.item() == 0.25


def test_a_long_gradient_is_clipped():
    _, weight = descent(lambda w, step: 3 * w[0] + 4 * w[1], steps=1, clip=1.0, start=(0.0, 0.0))
    unit = torch.tensor([0.6, 0.8], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), -0.25 * unit, rtol=1e-6, atol=0)  # torch adds 1e-6 to the norm


def test_what_is_not_finite_raises_with_its_step():
    with pytest.raises(DivergenceError, match=r"^fit: the loss is nan at step 2; try a smaller lr$"):
        descent(lambda w, step: w.sum() * (math.nan if step else 1))
    with pytest.raises(DivergenceError, match=r"^fit: the gradient's norm is inf at step 1; try a smaller lr$"):
        descent(lambda w, step: w.sqrt().sum(), start=(0.0, 1.0))
    with pytest.raises(DivergenceError, match=r"^fit: a parameter is not finite after step 1; try a smaller lr$"):
        descent(lambda w, step: 10 * w.sum(), steps=1, lr=1e308)
