"""Training of the readout alone: its gradient, and none for anything else."""

import pytest

from gradients import QUESTION, by_bptt, difference, learned, numbers, parts, tiny
from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers import build
from scanl.learning.algorithms import Reservoir
from scanl.models import LanguageModel, Stack

pytestmark = pytest.mark.cells_by_loop


@pytest.mark.parametrize("size", [1, 5, 12])
def test_the_gradient_of_the_readout_is_exact_and_there_is_no_other(size):
    model, batch = tiny("esn", "gru"), numbers(12)
    model.input.requires_grad_(False)
    gradients, _ = learned(Reservoir(QUESTION.loss), model, parts(batch, size))
    exact = {name: value for name, value in by_bptt(model, batch).items() if "head" in name}
    assert difference(gradients, exact) < 1e-12
    assert {name for name, value in gradients.items() if value is not None} == {"head.weight", "head.bias"}


def test_the_parameters_are_left_as_they_were():
    model, batch = tiny("gru"), numbers(4)
    model.input.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    algorithm = Reservoir(QUESTION.loss)
    with pytest.raises(Exception, match="expected"):
        algorithm.update(model, algorithm.init(model, 2), Batch(batch.inputs[..., :2], batch.targets))
    assert [p.requires_grad for p in model.parameters()] == before


def test_a_model_without_a_readout_is_refused():
    with pytest.raises(ConfigError, match="reservoir: the model is a GRU, expected one whose `head` is a linear map"):
        Reservoir(QUESTION.loss).init(build("gru", 3), 2)
    with pytest.raises(ConfigError, match="reservoir: the model is a LanguageModel, expected one whose"):
        Reservoir(QUESTION.loss).init(LanguageModel(5, Stack(4, 1, "gru"), tie_embeddings=True), 2)
