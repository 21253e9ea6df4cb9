"""Forward propagation through time: its averages, its fixed point, and its ends."""

import copy

import pytest
import torch

from gradients import QUESTION, by_bptt, learned, numbers, parts, tiny
from scanl.layers.state import leaves
from scanl.learning.algorithms import FPTT

pytestmark = pytest.mark.cells_by_loop


def test_a_sequence_in_one_update_is_bptt():
    """FPTT-1; θ̄ = θ and λ = 0, so the penalty has no gradient."""
    model, batch = tiny("gru"), numbers(8)
    gradients, _ = learned(FPTT(QUESTION.loss), model, [batch])
    for name, value in by_bptt(model, batch).items():
        assert torch.equal(gradients[name], value)


def test_at_the_minimum_the_average_is_the_parameter_and_the_slope_is_that_of_the_loss():
    """One repeated loss: θ - θ̄ and the gradient of the loss go to 0."""
    target = torch.tensor([1.0, -2.0], dtype=torch.float64)
    model = torch.nn.Linear(1, 2).double()
    model.init_state = lambda batch_size, device=None: ()
    algorithm = FPTT(lambda net, batch, state: ((net.bias - target).square().sum(), state), alpha=0.5)
    learner = algorithm.init(model, 1)
    model.weight.requires_grad_(False)
    learner = algorithm.init(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(400):
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, numbers(1, rows=1))
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(model.bias.detach(), target)
    torch.testing.assert_close(learner.means[0][0], target)


def test_new_sequences_go_on_with_the_averages_and_begin_with_a_new_state():
    model, algorithm = tiny("gru"), FPTT(QUESTION.loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    learner = algorithm.init(model, 2)
    for part in parts(numbers(4), 2):
        loss, learner = algorithm.update(model, learner, part)
        loss.backward()
        optimizer.step()
    renewed = algorithm.renew(model, learner, 3)
    assert all(not leaf.any() for _, leaf in leaves(renewed.state))
    assert all(torch.equal(a[0], b[2]) for a, b in zip(learner.means, renewed.means, strict=True))
    assert any(leaf.any() for leaf in renewed.slopes)
    before = copy.deepcopy(list(model.parameters()))
    settled = algorithm.settle(model, renewed)
    assert not any(leaf.any() for leaf in settled.slopes)
    assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
