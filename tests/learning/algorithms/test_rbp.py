"""Recurrent backpropagation in three forms, against direct solves, unrolled steps, and the authors' numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.layers.state import leaves
from scanl.learning.algorithms import CGRBP, RBP, NeumannRBP
from scanl.learning.algorithms.cg_rbp import conjugate_gradients
from scanl.learning.questions import answerer
from scanl.models import Stack
from scanl.ops.fixed_point import ConvergenceError

FIGURES = json.loads((Path(__file__).parents[2] / "outside" / "rbp.json").read_text())
TASK = answerer(Numbers(FeatureInputs(3), count=2))


def model_and_batch(layer="elman", depth=1):
    torch.manual_seed(0)
    model = TASK.model(Stack(4, depth, layer, channel_mixer="none")).double()
    with torch.no_grad():  # so that it converges in 120 applications
        for name, parameter in model.named_parameters():
            if "_hh" in name:
                parameter.mul_(0.5)
    return model, Batch(torch.randn(2, 3, 3).double(), torch.randn(2, 3, 2).double())


def gradients(algorithm, model, batch):
    model.zero_grad()
    loss, learner = algorithm.update(model, algorithm.init(model, batch.size), batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, learner


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-9 * value.abs().max().item())


def applied(model, x, state, count):
    """The answers to inputs that are held for `count` applications, all steps as rows of one batch."""
    rows = x.flatten(0, 1)[:, None]
    y = rows
    for _ in range(count):
        y, state = model(rows, state)
    return y.view(*x.shape[:2], -1), state


def unrolled(model, batch, start, applications):
    """The loss and the gradient of backpropagation through the last applications, from `start`."""
    model.zero_grad()
    loss = F.mse_loss(applied(model, batch.inputs, start, applications)[0], batch.targets)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@torch.no_grad()
def settled(model, x):
    return applied(model, x, None, 120)[1]


@pytest.mark.parametrize(("layer", "depth"), [("elman", 1), ("gru", 2)])
@pytest.mark.parametrize("algorithm", [RBP, CGRBP])
def test_it_is_the_unrolled_gradient_at_convergence(algorithm, layer, depth):
    model, batch = model_and_batch(layer, depth)
    loss, expected = unrolled(model, batch, None, 120)
    value, found, _ = gradients(algorithm(TASK.loss, tolerance=1e-14), model, batch)
    assert value == pytest.approx(loss, rel=1e-12)
    assert_close(found, expected)


@pytest.mark.parametrize("terms", [0, 1, 5])
def test_k_terms_are_backpropagation_through_k_more_applications(terms):
    model, batch = model_and_batch()
    _, expected = unrolled(model, batch, settled(model, batch.inputs), terms + 1)
    _, found, _ = gradients(NeumannRBP(TASK.loss, terms=terms, tolerance=1e-14), model, batch)
    assert_close(found, expected)


class Autonomous(nn.Module):
    """s <- tanh(W s + b); the answer is the state."""

    def __init__(self, W, b):
        super().__init__()
        self.W, self.b = (nn.Parameter(torch.tensor(values, dtype=torch.float64)) for values in (W, b))

    def init_state(self, batch_size, *, device=None, dtype=None) -> Any:
        return torch.zeros(batch_size, len(self.b), dtype=torch.float64)

    def forward(self, x, state):
        state = torch.tanh(state @ self.W.T + self.b)
        return state[:, None], state


def squared(model, batch, state):
    y, state = model(batch.inputs, state)
    return F.mse_loss(y, batch.targets), state


@pytest.mark.parametrize("growth", [1.001, 1.5, 3.0, 1e40])
def test_a_gradient_that_grows_is_none(growth):
    """Up to where its square is infinite, in fewer steps than `max_iterations` or in more."""
    model = Autonomous([[growth, 0.0], [0.0, 0.5]], [0.0, 0.0])
    batch = Batch(torch.zeros(1, 1, 1), torch.tensor([[[0.3, -0.4]]]).double())
    with pytest.raises(ConvergenceError, match="rbp: the step does not contract, so z has no limit; take cg_rbp"):
        gradients(RBP(squared), model, batch)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("algorithm", [RBP, CGRBP, NeumannRBP])
def test_a_gradient_has_the_size_of_its_loss(algorithm, size):
    """In float32, whose squares are then zero or infinite."""
    model, batch = model_and_batch()
    model, batch = model.float(), Batch(batch.inputs.float(), batch.targets.float())
    _, expected, _ = gradients(algorithm(TASK.loss), model, batch)

    def scaled(*arguments):
        loss, state = TASK.loss(*arguments)
        return size * loss, state

    _, found, _ = gradients(algorithm(scaled), model, batch)
    for name, value in expected.items():
        torch.testing.assert_close(found[name] / size, value, rtol=1e-4, atol=1e-5 * value.abs().max().item())


@pytest.mark.parametrize("algorithm", [RBP(squared, tolerance=1e-14), NeumannRBP(squared, terms=6), CGRBP(squared)])
def test_it_has_the_numbers_of_the_authors_program(algorithm):
    model = Autonomous(FIGURES["W"], FIGURES["b"])
    batch = Batch(torch.zeros(1, 1, 1), torch.tensor([[FIGURES["target"]]], dtype=torch.float64))
    _, found, _ = gradients(algorithm, model, batch)
    for name, values in FIGURES[algorithm.name].items():
        torch.testing.assert_close(found[name], torch.tensor(values, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_conjugate_gradients_need_no_contraction():
    """Against (I - J) solved directly, at an unstable equilibrium: 0, where J = W has a spectral radius above 1."""
    W = [[0.5, 2.0], [-1.5, 0.1]]
    model = Autonomous(W, [0.0, 0.0])
    batch = Batch(torch.zeros(1, 1, 1), torch.tensor([[[0.3, -0.4]]]).double())
    assert torch.linalg.eigvals(model.W).abs().max() > 1
    _, found, _ = gradients(CGRBP(squared), model, batch)
    last = -batch.targets[0, 0]  # the mean of two squares at 0
    z = torch.linalg.solve((torch.eye(2) - model.W.detach()).T, last)
    torch.testing.assert_close(found["b"], z, rtol=1e-9, atol=1e-9)
    with pytest.raises(ConvergenceError, match="rbp: the step does not contract, so z has no limit; take cg_rbp"):
        gradients(RBP(squared), model, batch)


def test_eta_is_added_to_the_normal_equations():
    """Against ((I - J)(I - J^T) + η I) z = (I - J) g, solved directly at the equilibrium 0, where J = W.

    The loss is read one application later, so g is J^T times its derivative.
    """
    model, eta = Autonomous([[0.5, 0.2], [-0.4, 0.1]], [0.0, 0.0]), 0.3
    batch = Batch(torch.zeros(1, 1, 1), torch.tensor([[[0.3, -0.4]]]).double())
    _, found, _ = gradients(CGRBP(squared, eta=eta), model, batch)
    apart, slope = torch.eye(2) - model.W.detach(), -batch.targets[0, 0]
    z = torch.linalg.solve(apart @ apart.T + eta * torch.eye(2).double(), apart @ model.W.detach().T @ slope)
    torch.testing.assert_close(found["b"], slope + z, rtol=1e-9, atol=1e-9)


def test_the_penalty_bounds_the_column_sums_and_its_gradient_is_exact():
    model, batch = Autonomous([[0.6, 0.2], [0.5, 0.3]], [0.1, -0.2]), Batch(torch.zeros(1, 1, 1), torch.ones(1, 1, 2))
    algorithm = RBP(squared, penalty=10.0, tolerance=1e-14)

    def by_hand():
        s = torch.zeros(1, 2, dtype=torch.float64)
        for _ in range(300):
            s = torch.tanh(s @ model.W.T + model.b)
        J = (1 - s.square()).T * model.W
        return F.mse_loss(s, torch.ones_like(s)) + 10 * (J.sum(0) - 0.9).clamp_min(0).square().mean()

    expected = by_hand()
    expected.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    value, found, _ = gradients(algorithm, model, batch)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert_close(found, grads)
    assert gradients(RBP(squared, limit=0.9), model, batch)[0] < value


def test_the_next_search_starts_at_the_equilibrium_and_steps_do_not_depend_on_each_other():
    model, batch = model_and_batch("gru")
    algorithm = RBP(TASK.loss)
    whole, _, learner = gradients(algorithm, model, batch)
    single = [algorithm.update(model, learner, batch.steps(t, t + 1, targets=True))[0].item() for t in range(3)]
    assert whole == pytest.approx(sum(single) / 3, rel=1e-9)
    last = settled(model, batch.inputs[:, 2:])
    for (_, leaf), (_, expected) in zip(leaves(learner), leaves(last), strict=True):
        torch.testing.assert_close(leaf, expected, rtol=1e-9, atol=1e-9)


def test_a_state_that_counts_steps_is_refused():
    class Counting(Autonomous):
        def init_state(self, batch_size, *, device=None, dtype=None) -> Any:
            return torch.zeros(batch_size, 2), torch.zeros(batch_size, dtype=torch.int64)

    message = "rbp: the model's state has integers at state.1, expected numbers that converge"
    with pytest.raises(ConfigError, match=message):
        RBP(squared).init(Counting([[0.5]], [0.0]), 1)


def test_conjugate_gradients_that_do_not_converge_say_so():
    A = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="cg_rbp: the gradient did not converge in 1 iterations"):
        conjugate_gradients(lambda z: z @ A, torch.ones(1, 2, dtype=torch.float64), 1e-9, 1)
