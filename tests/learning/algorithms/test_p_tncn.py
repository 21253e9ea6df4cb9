"""Local learning of a P-TNCN: the authors' numbers, and what its limits do."""

import json
from pathlib import Path

import pytest
import torch

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.learning.algorithms import PTNCNLearning
from scanl.models import PTNCN, Features, SequenceLabeler, Stack
from scanl.models.whole.ptncn import ptncn_loss

COVERS = ["models/whole/ptncn"]

FIGURES = json.loads((Path(__file__).parents[2] / "outside" / "ptncn.json").read_text())


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def by_name(model):
    """The parameters under the names of the authors' program, whose matrices are transposed."""
    return {f"{kind}{i + 1}": p for kind in "WEMVU" for i, p in enumerate(getattr(model, kind))}


@pytest.fixture
def model():
    model = PTNCN(3, 4, 2, output="sigmoid", beta=0.1, alpha=0.05).double()
    with torch.no_grad():
        for name, parameter in by_name(model).items():
            parameter.copy_(double(FIGURES["weights"][name]).T)
    return model


def test_it_has_the_numbers_of_the_authors_program(model):
    x = double(FIGURES["inputs"]).transpose(0, 1)
    algorithm = PTNCNLearning(ptncn_loss, radius=0.1)
    learner = algorithm.init(model, 2)
    for t in range(5):
        torch.testing.assert_close(model.expect(learner).predictions[0], double(FIGURES["predictions"][t]))
        model.zero_grad()
        loss, learner = algorithm.update(model, learner, Batch(x[:, t : t + 1], x[:, t : t + 1]))
        loss.backward()
        for name, parameter in by_name(model).items():
            torch.testing.assert_close(parameter.grad, double(FIGURES["updates"][t][name]).T / 2)
    for units, expected in zip(learner.units, FIGURES["corrected"], strict=True):
        torch.testing.assert_close(units, double(expected))


def test_steps_of_an_update_are_averaged_and_the_answers_are_of_the_next_input(model):
    x = double(FIGURES["inputs"]).transpose(0, 1)
    algorithm = PTNCNLearning(ptncn_loss, radius=0.1)
    loss, learner = algorithm.update(model, algorithm.init(model, 2), Batch(x[:, :-1], x[:, 1:]))
    predictions = double(FIGURES["predictions"]).transpose(0, 1)
    torch.testing.assert_close(loss, (predictions[:, 1:] - x[:, 1:]).square().mean())
    torch.testing.assert_close(model(x[:, :-1])[0], predictions[:, 1:])
    loss.backward()
    for name, parameter in by_name(model).items():
        expected = sum(double(FIGURES["updates"][t][name]) for t in range(4)).T / 8
        torch.testing.assert_close(parameter.grad, expected)
    assert not any(units.requires_grad for units in learner.units)


def test_without_correction_only_predictions_and_errors_learn(model):
    model.beta = 0.0
    x = double(FIGURES["inputs"]).transpose(0, 1)
    algorithm = PTNCNLearning(ptncn_loss)
    loss, _ = algorithm.update(model, algorithm.init(model, 2), Batch(x, x))
    loss.backward()
    learns = {name for name, p in by_name(model).items() if p.grad.abs().max() > 0}
    assert learns == {"W1", "E1"}  # v¹ is 0 too, so those of the upper layer stay


def test_it_learns_a_cycle_and_is_saved(tmp_path):
    torch.manual_seed(0)
    x = torch.eye(4)[torch.arange(41) % 4][None]
    model = PTNCN(4, 16, 2)
    algorithm = PTNCNLearning(ptncn_loss)
    learner, losses = algorithm.init(model, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for t in list(range(40)) * 7:
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, Batch(x[:, t : t + 1], x[:, t + 1 : t + 2]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.01 * sum(losses[:20])
    model.save(tmp_path)
    torch.testing.assert_close(PTNCN.load(tmp_path)(x)[0], model(x)[0])


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match="p_tncn: model is a SequenceLabeler"):
        PTNCNLearning(ptncn_loss).init(SequenceLabeler(2, Stack(4, 1, "lru"), Features(1)), 1)
