"""Forward propagation through time: its averages, its fixed point, and its ends."""

import copy

import pytest
import torch

from gradients import QUESTION, by_bptt, learned, numbers, parts, tiny
from scanl.data.batch import Batch
from scanl.data.questions import Class, FeatureInputs, Number
from scanl.layers.state import detach, leaves
from scanl.learning.algorithms import FPTT
from scanl.learning.questions import answerer
from scanl.models import Stack

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


def test_averages_move_only_with_the_optimizer():
    """Three updates without a step between them leave θ̄ and λ as they were after one."""
    model, algorithm = tiny("gru"), FPTT(QUESTION.loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, *others = parts(numbers(8), 2)
    loss, learner = algorithm.update(model, algorithm.init(model, 2), first)
    loss.backward()
    optimizer.step()
    _, learner = algorithm.update(model, learner, others[0])
    assert any(leaf.any() for leaf in learner.slopes)
    for part in others[1:]:
        _, after = algorithm.update(model, learner, part)
        pairs = zip((*learner.means, *learner.slopes), (*after.means, *after.slopes), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        learner = after


@pytest.mark.parametrize(
    "question", [Class(FeatureInputs(3), classes=4), Number(FeatureInputs(3))], ids=["class", "number"]
)
def test_each_part_of_a_sequence_with_one_answer_has_the_loss_of_the_paper(question):
    task = answerer(question)
    torch.manual_seed(0)
    model = task.model(Stack(4, 1, "gru")).double()
    x, classes = torch.randn(3, 6, 3).double(), torch.tensor([1, 3, 0])
    batch = Batch(x, classes if isinstance(question, Class) else classes.double())
    algorithm, state = FPTT(task.loss), model.init_state(3)
    learner, named = algorithm.init(model, 3), dict(model.named_parameters())
    for p, part in enumerate(batch.parts(2, gradual=True), 1):
        loss, learner = algorithm.update(model, learner, part)
        outputs, state = model(x[:, 2 * p - 2 : 2 * p], detach(state))
        if isinstance(question, Class):
            log = outputs.log_softmax(-1)
            expected = -(p / 3) * log[range(3), classes].mean() + (1 - p / 3) * (-0.25 * log).mean()
        else:
            expected = p / 3 * (outputs[:, 0, 0] - classes).square().mean()
        torch.testing.assert_close(loss.detach(), expected.detach())
        found, exact = (torch.autograd.grad(each, [*named.values()]) for each in (loss, expected))
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other)
