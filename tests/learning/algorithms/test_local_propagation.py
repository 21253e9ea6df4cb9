"""States as variables: local propagation and lifted learning reach backpropagation's adjoint and gradient."""

import pytest
import torch

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.learning.algorithms import BPTT, Lifted, LocalPropagation
from scanl.learning.algorithms._split import Problem, Variables
from scanl.learning.questions import answerer
from scanl.models import Stack

TASK = answerer(Numbers(FeatureInputs(2), count=1))
STEPS = 4


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TASK.model(Stack(3, 1, "elman", channel_mixer="none")).double()


@pytest.fixture
def batch():
    return Batch(torch.randn(2, STEPS, 2).double(), torch.randn(2, STEPS, 1).double())


def gradients(algorithm, model, batch):
    model.zero_grad()
    loss, learner = algorithm.update(model, algorithm.init(model, batch.size), batch)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return loss.item(), flat, learner


def forward(model, batch):
    """The states of the forward pass (B, T, e), and what backpropagation brings to them, of the sum of the losses."""
    state, states, answers = model.init_state(batch.size), [], []
    for t in range(STEPS):
        y, state = model(batch.inputs[:, t : t + 1], state)
        answers.append(y)
        states.append(state[0].mixer)
    total = (torch.cat(answers, 1) - batch.targets).square().sum()
    adjoint = torch.autograd.grad(total, states, materialize_grads=True)
    return torch.stack(states, 1).detach(), torch.stack(adjoint, 1)


def optimized(algorithm, model, batch):
    states, adjoint = forward(model, batch)
    problem = Problem(TASK.loss, model, batch, model.init_state(batch.size))
    points, multipliers = algorithm.optimize(problem, Variables(states, torch.zeros_like(states)))
    return problem(points)[1].detach(), multipliers, adjoint


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalPropagation(TASK.loss, iterations=180),
        Lifted(TASK.loss, penalty=10.0, rounds=10),
        Lifted(TASK.loss, method="admm", penalty=10.0, rounds=30),
    ],
    ids=["local_propagation", "bregman", "admm"],
)
def test_multipliers_are_minus_the_adjoint_and_the_gradient_is_that_of_backpropagation(algorithm, model, batch):
    residual, multipliers, adjoint = optimized(algorithm, model, batch)
    torch.testing.assert_close(multipliers, -adjoint, rtol=0, atol=1e-6 * adjoint.abs().max().item())
    assert residual.abs().max() < 1e-6
    loss, exact, state = gradients(BPTT(TASK.loss), model, batch)
    value, approached, learner = gradients(algorithm, model, batch)
    assert value == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(learner, state)
    assert (approached - exact).norm() < 1e-6 * exact.norm()


def test_the_bias_of_auxiliary_coordinates_falls_as_one_over_the_penalty(model, batch):
    _, exact, _ = gradients(BPTT(TASK.loss), model, batch)
    weak, strong = (
        (gradients(Lifted(TASK.loss, method="mac", rounds=rounds), model, batch)[1] - exact).norm() for rounds in (4, 5)
    )
    assert weak / strong == pytest.approx(10, rel=0.1)


def test_the_penalty_grows_between_rounds_alone(model, batch):
    """One round of a factor of 10 has the penalty of the option, whatever the growth."""
    _, once, _ = gradients(Lifted(TASK.loss, method="mac", penalty=2.0, rounds=1, growth=10.0), model, batch)
    _, same, _ = gradients(Lifted(TASK.loss, method="mac", penalty=2.0, rounds=1, growth=1.0), model, batch)
    torch.testing.assert_close(once, same, rtol=0, atol=0)


@pytest.mark.parametrize(("method", "penalty"), [("mac", 1.0), ("bcd", 1.0), ("bregman", 1.0), ("admm", 100.0)])
def test_a_minimization_never_raises_the_objective_and_residuals_fall(method, penalty, model, batch, monkeypatch):
    algorithm, sizes = Lifted(TASK.loss, method=method, penalty=penalty, rounds=4, iterations=3), []
    minimize = algorithm.minimize

    def watched(problem, states, multipliers):
        after = minimize(problem, states, multipliers)
        first, last = (algorithm.objective(*problem(points), multipliers).item() for points in (states, after))
        assert last <= first
        sizes.append(problem(after)[1].norm().item())
        return after

    monkeypatch.setattr(algorithm, "minimize", watched)
    optimized(algorithm, model, batch)
    assert len(sizes) == 4
    assert sizes[-1] < 0.2 * sizes[0]


def test_residuals_within_epsilon_are_free():
    residual, multipliers = torch.tensor([0.4, -0.5, 2.0, -1.5]), torch.tensor([9.0, 9.0, 2.0, 3.0])
    value = LocalPropagation(TASK.loss, rho=4.0, epsilon=0.5).objective(torch.tensor(7.0), residual, multipliers)
    assert value.item() == 7.0 + (2.0 * 1.5 - 3.0 * 1.0) + 2.0 * (1.5**2 + 1.0**2)


@pytest.mark.parametrize("layer", ["gru", "elman"])
def test_the_defaults_of_lifted_learning_come_to_the_gradient_of_backpropagation(layer, batch):
    torch.manual_seed(0)
    model = TASK.model(Stack(3, 1, layer, channel_mixer="none")).double()
    _, exact, _ = gradients(BPTT(TASK.loss), model, batch)
    _, found, _ = gradients(Lifted(TASK.loss), model, batch)
    assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > 0.9999


def test_a_block_is_every_second_state_and_the_others_stay(model, batch):
    states, _ = forward(model, batch)
    problem, zeros = Problem(TASK.loss, model, batch, model.init_state(batch.size)), torch.zeros_like(states)
    algorithm = Lifted(TASK.loss, method="bcd", penalty=3.0)
    even = algorithm._minimize(problem, states, zeros, slice(0, None, 2))
    assert torch.equal(even[:, 1::2], states[:, 1::2])
    points = even.clone().requires_grad_()
    (slope,) = torch.autograd.grad(algorithm.objective(*problem(points), zeros), points)
    assert slope[:, ::2].abs().max() < 1e-5 < slope[:, 1::2].abs().max()


def test_a_state_that_counts_is_refused():
    model = TASK.model(Stack(4, 1, "attention", layer_options={"num_heads": 2, "max_length": 8}))
    with pytest.raises(ConfigError, match=r"lifted: the model's state has integers at .*, expected numbers"):
        Lifted(TASK.loss).init(model, 2)
