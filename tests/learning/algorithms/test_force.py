"""Recursive least squares: equal to ridge regression and to reservoirpy's, and a network that drives itself."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradients import QUESTION, numbers, parts, tiny
from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.layers import build
from scanl.layers.state import leaves
from scanl.learning.algorithms import FORCE
from scanl.learning.forecasting.readout import Ridge
from scanl.learning.questions import answerer

pytestmark = pytest.mark.cells_by_loop


class Readout(nn.Module):
    """A model whose features are its inputs, or those of a layer."""

    def __init__(self, head, layer=None):
        super().__init__()
        self.head, self.layer = head, layer

    def init_state(self, batch_size, device=None):
        return None if self.layer is None else self.layer.init_state(batch_size, device=device)

    def forward(self, x, state=None):
        return (self.head(x), state) if self.layer is None else self.layer(x, state)


def squared(model, batch, state):
    y, state = model(batch.inputs, state)
    return (y - batch.targets).square().mean(), state


def zero(head):
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def learn(algorithm, model, batches):
    learner = algorithm.init(model, batches[0].size)
    for batch in batches:
        loss, learner = algorithm.update(model, learner, batch)
        loss.backward()
    return learner


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
@pytest.mark.parametrize("size", [1, 7, 30])
def test_it_agrees_with_reservoirpy(forgetting, size):
    figures = json.loads((Path(__file__).parents[2] / "outside" / "reservoirpy_rls.json").read_text())
    t = torch.arange(30, dtype=torch.float64)
    r = torch.stack([(0.7 * t).cos(), (1.3 * t + 1).sin(), (t * t / 10).cos()], 1)
    y = torch.stack([(0.9 * t).sin(), (0.2 * t).cos() + r[:, 1]], 1)
    model = Readout(zero(nn.Linear(3, 2)).double())
    learn(FORCE(squared, penalty=0.5, forgetting=forgetting), model, parts(Batch(r[None], y[None]), size))
    weight = torch.cat([model.head.weight, model.head.bias[:, None]], 1)
    expected = torch.tensor(figures["weights"][str(forgetting)], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-13)


def test_several_rows_are_one_ridge_regression():
    """Each row comes with its opposite, so the mean is 0, and `Ridge` has the same solution."""
    model, half = Readout(zero(nn.Linear(3, 2)).double()), numbers(40, rows=3)
    batch = Batch(torch.cat([half.inputs, -half.inputs]), torch.cat([half.targets, -half.targets]))
    learner = learn(FORCE(squared, penalty=0.1), model, parts(batch, 11))
    weight, _ = Ridge(0.1).add(batch.inputs, batch.targets).solve()
    torch.testing.assert_close(model.head.weight.detach(), weight, rtol=1e-10, atol=0)
    products = torch.einsum("bti,btj->ij", batch.inputs, batch.inputs) + 0.1 * torch.eye(3).double()
    torch.testing.assert_close(learner.inverse[5, :3, :3], products.inverse(), rtol=1e-10, atol=1e-12)


def test_forgetting_weighs_each_step_once():
    model, batch = Readout(zero(nn.Linear(3, 2, bias=False)).double()), numbers(12, rows=2)
    learn(FORCE(squared, penalty=0.3, forgetting=0.8), model, [batch])
    age = 0.8 ** torch.arange(11, -1, -1).double()
    products = torch.einsum("t,bti,btj->ij", age, batch.inputs, batch.inputs) + 0.3 * 0.8**12 * torch.eye(3).double()
    targets = torch.einsum("t,bto,bti->oi", age, batch.targets, batch.inputs)
    torch.testing.assert_close(model.head.weight.detach(), targets @ products.inverse(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", ["esn", "gru"])
def test_the_readout_of_a_stack_learns_and_nothing_else_whatever_the_optimizer(layer):
    model, batch = tiny(layer), numbers(24)
    batch.targets[0, 3, 1] = torch.nan  # the row teaches nothing at this step
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    model(batch.inputs)
    hook.remove()
    zero(model.head)
    optimizer, algorithm = torch.optim.AdamW(model.parameters(), weight_decay=0.5), FORCE(QUESTION.loss, penalty=0.2)
    learner = algorithm.init(model, 2)
    for part in parts(batch, 5):
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, part)
        loss.backward()
        optimizer.step()
    known = batch.targets.isfinite().all(-1)
    r, y = features[0].detach()[known], batch.targets[known]
    r = torch.cat([r, torch.ones(len(r), 1).double()], 1)
    expected = torch.linalg.solve(r.T @ r + 0.2 * torch.eye(5).double(), r.T @ y).T
    torch.testing.assert_close(model.head.weight.detach(), expected[:, :4], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.head.bias.detach(), expected[:, 4], rtol=1e-10, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "head" not in name)


def test_weights_of_a_narrow_model_are_exact_but_for_the_last_rounding():
    model, batch = Readout(zero(nn.Linear(3, 2))), numbers(500)
    learn(FORCE(squared, penalty=0.1), model, parts(batch._replace(inputs=batch.inputs.float()), 100))
    r = torch.cat([batch.inputs.float().double(), torch.ones(2, 500, 1).double()], 2).flatten(0, 1)
    expected = torch.linalg.solve(r.T @ r + 0.1 * torch.eye(4).double(), r.T @ batch.targets.flatten(0, 1)).T
    torch.testing.assert_close(model.head.weight.detach().double(), expected[:, :3], rtol=2**-24, atol=0)


def test_the_loss_is_that_of_the_answers_before_they_were_learnt_from():
    model, batch = tiny("gru"), numbers(6)
    expected, _ = QUESTION.loss(model, batch)
    loss, _ = FORCE(QUESTION.loss).update(model, FORCE(QUESTION.loss).init(model, 2), batch)
    torch.testing.assert_close(loss.detach(), expected.detach())


def test_padding_is_not_learnt():
    model, batch = tiny("lru"), numbers(6)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    other, algorithm, padded = (
        tiny("lru"),
        FORCE(QUESTION.loss),
        batch.targets.clone(),
    )  # with numbers, as data has them
    batch.targets[0, 4:] = torch.nan
    algorithm.update(model, algorithm.init(model, 2), batch)
    algorithm.update(other, algorithm.init(other, 2), Batch(batch.inputs, padded, mask))
    torch.testing.assert_close(model.head.weight, other.head.weight, rtol=1e-10, atol=1e-12)


def test_memory_is_as_declared():
    model = tiny("gru", channel_mixer="none")
    learner = FORCE(QUESTION.loss).init(model, 3)
    assert sum(leaf.numel() for _, leaf in leaves(learner)) == 3 * (4 + (4 + 1) * (4 + 1 + 2))


def test_a_chaotic_network_is_forced_to_a_wave_that_it_then_makes_alone():
    """The network of the paper: what it reads is its own answer, and its own activity is chaotic at a radius of 1.5."""
    torch.manual_seed(0)
    options = {"spectral_radius": 1.5, "leak": 0.3, "input_connectivity": 1.0}
    layer = build("esn", 1, width=100, **options).double()
    model = Readout(zero(layer.readout), layer)
    wave = lambda steps: (2 * math.pi * torch.arange(steps).double() / 40).sin()[None, :, None]  # noqa: E731
    algorithm = FORCE(squared, penalty=0.01, feedback=True)
    learner = algorithm.init(model, 1)
    learner = learner._replace(state=torch.randn_like(learner.state))
    for part in parts(Batch(torch.zeros_like(wave(600)), wave(600)), 100):
        _, learner = algorithm.update(model, learner, part)
    y, state, answers = learner.output[:, None], learner.state, []
    with torch.no_grad():
        for _ in range(200):
            y, state = model(y, state)
            answers.append(y)
    errors = torch.cat(answers, 1) - wave(800)[:, 600:]
    assert errors.abs().max() < 0.05


def test_what_it_cannot_train_is_refused():
    batch = numbers(4)
    with pytest.raises(ConfigError, match="force: the model is a ESN, expected one whose `head` is a linear map"):
        FORCE(squared).init(build("esn", 3), 2)
    model = tiny("gru")
    algorithm = FORCE(QUESTION.loss, feedback=True)
    learner = algorithm.init(model, 2)
    with pytest.raises(ConfigError, match=r"force: batch.inputs has shape \(2, 4, 3\), expected \(2, 4, 2\) because"):
        algorithm.update(model, learner, batch)
    with pytest.raises(ConfigError, match=r"force: batch.targets is torch.int64 of shape \(2, 4, 2\), expected numb"):
        algorithm.update(model, learner, Batch(batch.inputs, batch.targets.long()))


def test_two_rows_with_feedback_read_answers_of_their_own():
    question = answerer(Numbers(FeatureInputs(2), count=2))
    torch.manual_seed(0)
    model = question.model(tiny("gru").stack).double()
    batch = numbers(5)._replace(inputs=torch.full((2, 5, 2), torch.nan).double())
    algorithm = FORCE(question.loss, feedback=True)
    learner = algorithm.init(model, 2)._replace(output=torch.randn(2, 2).double())
    with torch.no_grad():
        expected, _ = model(learner.output[:, None])
    loss, after = algorithm.update(model, learner, batch.steps(0, 1, targets=True))
    torch.testing.assert_close(after.output, expected[:, 0])
    torch.testing.assert_close(loss.detach(), (expected - batch.targets[:, :1]).square().mean())
    loss, after = algorithm.update(model, after, batch.steps(1, 5, targets=True))
    assert loss.isfinite()
    assert (after.output[0] - after.output[1]).abs().max() > 1e-3
