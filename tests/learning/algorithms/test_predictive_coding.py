"""Predictive coding: errors reach the gradients of backpropagation through time, at the rate that is declared."""

import pytest
import torch

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.layers.state import leaves
from scanl.learning.algorithms import BPTT, PredictiveCoding
from scanl.learning.questions import answerer
from scanl.models import Stack

TASK = answerer(Numbers(FeatureInputs(3), count=2))


def gradients(algorithm, model, batch):
    model.zero_grad()
    loss, learner = algorithm.update(model, algorithm.init(model, batch.size), batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}, learner


@pytest.fixture(params=["elman", "lstm", "lru"])
def model(request):
    torch.manual_seed(0)
    return TASK.model(Stack(4, 2, request.param)).double()


@pytest.fixture
def batch():
    return Batch(torch.randn(2, 6, 3).double(), torch.randn(2, 6, 2).double())


def test_errors_reach_those_of_backpropagation(model, batch):
    loss, exact, state = gradients(BPTT(TASK.loss), model, batch)
    value, found, learner = gradients(PredictiveCoding(TASK.loss, iterations=200), model, batch)
    assert value == pytest.approx(loss, rel=1e-12)
    flat, expected = (torch.cat([grad.flatten() for grad in each.values()]) for each in (found, exact))
    assert torch.cosine_similarity(flat, expected, dim=0) > 0.999
    assert (flat - expected).norm() < 1e-5 * expected.norm()
    for (_, leaf), (_, same) in zip(leaves(learner), leaves(state), strict=True):
        torch.testing.assert_close(leaf, same)


def test_an_error_n_steps_back_is_damped_by_the_declared_factor(batch):
    """With a loss at the last step only, of a layer whose state alone carries it: the gradient by hand."""

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.8, 0.5))

        def init_state(self, batch_size, *, device=None, dtype=None):
            return torch.zeros(batch_size, 1, dtype=torch.float64)

        def forward(self, x, state):
            y = state[:, None]  # of the state before the step
            return y, self.a * state + self.b * x[:, 0]

    def last(model, batch, state):
        y, state = model(batch.inputs, state)
        return y[:, -1].sum(), state

    model, x = Line(), batch.inputs[:1, :, :1]
    _, found, _ = gradients(PredictiveCoding(last, iterations=3, rate=0.1), model, Batch(x, x))
    factor = 1 - 0.9**3
    expected = sum(factor ** (n + 1) * 0.8**n * x[0, 4 - n, 0] for n in range(5))
    torch.testing.assert_close(found["b"], expected)
