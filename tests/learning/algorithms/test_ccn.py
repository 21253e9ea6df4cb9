"""Columnar-constructive learning: which parameters learn, when, and from which gradient."""

import copy

import pytest
import torch

from gradients import LowRank
from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError
from scanl.learning.algorithms import BPTT, CCN
from scanl.learning.questions import answerer
from scanl.models import Stack

TASK = answerer(Numbers(FeatureInputs(3), count=2))
pytestmark = pytest.mark.cells_by_loop


def drawn(columns: int = 2):
    torch.manual_seed(0)
    options = {"columns": columns, "init_scale": 0.6, "decay": 0.9}
    model = TASK.model(Stack(4, 1, "columnar_constructive", layer_options=options)).double()
    return model, torch.randn(2, 24, 3).double(), torch.randn(2, 24, 2).double()


def part(x, y, start, stop):
    return Batch(x[:, start:stop], y[:, start:stop])


@pytest.mark.parametrize("adapted", [False, True])
def test_the_gradient_of_the_stage_that_learns_is_exact(adapted):
    model, x, y = drawn()
    if adapted:
        stage = model.stack.mixers()[0].stages[0]
        stage.gates = LowRank(stage.gates, 4)
    plain = copy.deepcopy(model)
    plain.stack.mixers()[0].grow(0)
    loss, _ = BPTT(TASK.loss).update(plain, BPTT(TASK.loss).init(plain, 2), part(x, y, 0, 24))
    loss.backward()
    algorithm = CCN(TASK.loss)
    learner = algorithm.init(model, 2)
    for start, stop in ((0, 1), (1, 6), (6, 24)):
        loss, learner = algorithm.update(model, learner, part(x, y, start, stop))
        (loss * (stop - start) / 24).backward()
    first, second = model.stack.mixers()[0].stages
    for found, expected in zip(first.parameters(), plain.stack.mixers()[0].stages[0].parameters(), strict=True):
        if found.requires_grad:
            assert (found.grad - expected.grad).abs().max() < 1e-9 * expected.grad.abs().max()
    assert all(each.grad is None for each in second.parameters())
    assert model.head.weight.grad is not None


def test_a_stage_is_constant_when_the_next_one_learns_and_the_layer_lets_it_through():
    model, x, y = drawn()
    layer = model.stack.mixers()[0]
    algorithm = CCN(TASK.loss, stage_updates=3)
    optimizer, learner = torch.optim.Adam(model.parameters(), 0.05), algorithm.init(model, 2)
    history = []
    for update in range(6):
        history.append({name: each.detach().clone() for name, each in model.named_parameters()})
        assert layer.grown.tolist() == ([1, 1, 0, 0] if update <= 3 else [1] * 4)
        optimizer.zero_grad()
        loss, learner = algorithm.update(model, learner, part(x, y, 4 * update, 4 * update + 4))
        loss.backward()
        optimizer.step()
    changed = [
        {name for name, each in model.named_parameters() if not torch.equal(later[name], earlier[name])}
        for earlier, later in ((history[0], history[3]), (history[3], dict(model.named_parameters())))
    ]
    stage = {f"stack.blocks.0.mixer.stages.{k}.{name}" for k in (0, 1) for name in ("recurrent", "gates.weight")}
    assert changed[0] & stage == {name for name in stage if ".0.mixer.stages.0." in name}
    assert changed[1] & stage == {name for name in stage if ".0.mixer.stages.1." in name}
    assert "head.weight" in changed[0] & changed[1]
    below = {
        name for name in changed[0] if not name.startswith(("head", "stack.norm", "stack.blocks.0.channel", *stage))
    }
    assert not {name for name in below if ".stages." not in name} & changed[1]
    assert layer.grown.tolist() == [1] * 4


def test_with_the_first_stage_all_learns_but_the_later_stages():
    """An update of the whole sequence has the gradient of backpropagation, also below the layer."""
    model, x, y = drawn()
    plain = copy.deepcopy(model)
    plain.stack.mixers()[0].grow(0)
    for net, algorithm in ((plain, BPTT(TASK.loss)), (model, CCN(TASK.loss))):
        loss, _ = algorithm.update(net, algorithm.init(net, 2), part(x, y, 0, 24))
        loss.backward()
    expected = dict(plain.named_parameters())
    assert expected["input.weight"].grad.any()
    for name, parameter in model.named_parameters():
        if ".stages.1." in name:
            assert parameter.grad is None
        elif parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_other_models_are_refused():
    for layers in ("columnar", ["columnar_constructive", "columnar_constructive"]):
        with pytest.raises(
            ConfigError, match=r"ccn: the model has the layers columnar.*, expected a single columnar_con"
        ):
            CCN(TASK.loss).init(TASK.model(Stack(4, 1 if isinstance(layers, str) else 2, layers)), 2)
