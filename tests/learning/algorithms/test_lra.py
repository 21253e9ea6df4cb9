"""Local representation alignment against a plain loop of the paper's equations, and against backpropagation."""

import pytest
import torch

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.learning.algorithms import BPTT, LRA
from scanl.learning.questions import answerer
from scanl.models import AlignedStack, SequenceLabeler, Stack

COVERS = ["models/whole/aligned"]

TASK = answerer(Numbers(FeatureInputs(3), count=2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TASK.model(AlignedStack(4, 2, std=0.5)).double()


@pytest.fixture
def batch():
    return Batch(torch.randn(2, 5, 3).double(), torch.randn(2, 5, 2).double())


def gradients(algorithm, model, batch):
    model.zero_grad()
    loss, learner = algorithm.update(model, algorithm.init(model, batch.size), batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, learner


def by_hand(model, batch, beta, gamma):
    """The sums over steps and rows of the paper's updates."""
    stack, past = model.stack, [torch.zeros(2, 4, dtype=torch.float64)] * 2
    updates = {}

    def add(name, value):
        updates[name] = updates.get(name, 0) + value

    for t in range(5):
        z, h = [model.input(batch.inputs[:, t])], []
        for layer in range(2):
            h.append(z[-1] @ stack.W[layer].T + past[layer] @ stack.V[layer].T + stack.b[layer])
            z.append(h[-1].tanh())
        e = model.head(z[-1]) - batch.targets[:, t]  # of the squared error, a mean over two numbers
        add("head.weight", e.T @ z[-1])
        pull = e @ model.head.weight
        for layer in (1, 0):
            e = z[layer + 1] - (h[layer] - beta * pull).tanh()
            add(f"stack.W.{layer}", e.T @ z[layer])
            add(f"stack.V.{layer}", e.T @ past[layer])
            add(f"stack.b.{layer}", e.sum(0))
            add(f"stack.E.{layer}", gamma * (e.T @ z[layer]).T)
            pull = e @ stack.E[layer].T
        add("input.weight", pull.T @ batch.inputs[:, t])
        past = z[1:]
    return updates


def test_it_is_the_plain_loop_of_the_paper(model, batch):
    _, changes, learner = gradients(LRA(TASK.loss, beta=0.3, gamma=0.5), model, batch)
    for name, value in by_hand(model, batch, 0.3, 0.5).items():
        torch.testing.assert_close(changes[name], value / 10)
    assert not any(units.requires_grad for units in learner)


def test_with_transposed_weights_and_a_small_pull_it_points_along_the_gradient_of_a_step(model, batch):
    """β φ'(h) g is the first order of a mismatch, so a layer's update is β, or β², times the gradient."""
    with torch.no_grad():
        for W, E in zip(model.stack.W, model.stack.E, strict=True):
            E.copy_(W.T)
    short = Batch(batch.inputs[:, :1], batch.targets[:, :1])
    _, exact, _ = gradients(BPTT(TASK.loss), model, short)
    _, changes, _ = gradients(LRA(TASK.loss, beta=1e-4), model, short)
    for layer, power in ((1, 1), (0, 2)):
        name = f"stack.W.{layer}"
        bound = 10 * 1e-4 * exact[name].abs().max().item()  # the second order in β
        torch.testing.assert_close(changes[name] / 1e-4**power, exact[name], rtol=0, atol=bound)


def test_it_learns(model, batch):
    algorithm = LRA(TASK.loss)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss, _ = algorithm.update(model, algorithm.init(model, 2), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_other_models_and_rows_of_several_lengths_are_refused(model, batch):
    with pytest.raises(ConfigError, match="lra: the model is a SequenceLabeler of a Stack, expected one of a"):
        LRA(TASK.loss).init(TASK.model(Stack(4, 1, "lru")), 1)
    with pytest.raises(ConfigError, match="aligned_stack: cu_seqlens"):
        model(batch.inputs, mask=torch.ones(2, 5, dtype=torch.bool))
    assert isinstance(model, SequenceLabeler)
