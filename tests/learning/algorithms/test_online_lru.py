"""Online LRU, against a plain loop of its traces and against the authors' program."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.layers import build
from scanl.learning.algorithms import BPTT, OnlineLRU
from scanl.learning.questions import answerer
from scanl.models import Stack

TASK = answerer(Numbers(FeatureInputs(3), count=2))
FIGURES = json.loads((Path(__file__).parents[2] / "outside" / "online_lru.json").read_text())


def learn(algorithm, model, x, y, cuts):
    """Return the gradient of the mean loss over all steps, from updates of `cuts` steps."""
    model.zero_grad()
    learner, at = algorithm.init(model, len(x)), 0
    for cut in cuts:
        loss, learner = algorithm.update(model, learner, Batch(x[:, at : at + cut], y[:, at : at + cut]))
        (loss * cut / x.shape[1]).backward()
        at += cut
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


def drawn(layer: str, depth: int, steps: int = 12):
    torch.manual_seed(0)
    model = TASK.model(Stack(4, depth, layer)).double()
    return model, torch.randn(2, steps, 3).double(), torch.randn(2, steps, 2).double()


class Alone(nn.Module):
    """The layer as a model by itself: what `OnlineLRU` asks of a model, without norms and residual connections."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.stack = layer, self

    def mixers(self):
        return [self.layer]

    def init_state(self, batch_size, device=None):
        return self.layer.init_state(batch_size, device=device)


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["variant"])
@pytest.mark.parametrize("cuts", [[9], [1] * 9, [4, 5]])
def test_authors_program(case, cuts):
    """The gradients of ||y||²/2 that the authors' LRU computes online, in float64, its complex64 widened.

    Its "full_rec" has a trace for γ too, which is a part of the input map here: it is not compared.
    """
    layer = build("lru", 4).double()
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(torch.sin(1.3 * torch.arange(parameter.numel()).double() + index).view(parameter.shape) / 2)
    x = torch.cos(0.7 * torch.arange(36).double()).view(1, 9, 4)

    def loss(model, batch, state):
        y, state = model.layer(batch.inputs, state)
        return y.square().sum() / 2, state

    model = Alone(layer)
    algorithm, at = OnlineLRU(loss, case["variant"]), 0
    learner = algorithm.init(model, 1)
    for cut in cuts:
        value, learner = algorithm.update(model, learner, Batch(x[:, at : at + cut], x[:, at : at + cut]))
        value.backward()
        at += cut
    for name, figure in case["gradients"].items():
        if (case["variant"], name) == ("full_rec", "gamma_log"):
            continue
        grad = layer.get_parameter(name).grad
        found = torch.zeros(len(figure)).double() if grad is None else grad.flatten()
        torch.testing.assert_close(found, torch.tensor(figure, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layer", ["lru", "mingru", "indrnn"])
def test_for_one_layer_all_traces_give_the_whole_gradient(layer):
    model, x, y = drawn(layer, 1)
    expected = learn(BPTT(TASK.loss), copy.deepcopy(model), x, y, [12])
    found = learn(OnlineLRU(TASK.loss), model, x, y, [5, 1, 6])
    for name in (each for each in expected if ".mixer." in each):
        assert (found[name] - expected[name]).abs().max() < 1e-9 * expected[name].abs().max()


def test_an_update_of_many_steps_is_as_many_updates_of_one():
    """In a stack too, where errors go through no recurrent link."""
    model, x, y = drawn("lru", 2)
    whole, single = (learn(OnlineLRU(TASK.loss), model, x, y, cuts) for cuts in ([12], [1] * 12))
    for name, value in whole.items():
        assert (single[name] - value).abs().max() <= 1e-12 * value.abs().max()


def test_without_traces_it_is_backpropagation_truncated_after_one_step():
    model, x, y = drawn("mingru", 2)
    expected = learn(BPTT(TASK.loss), copy.deepcopy(model), x, y, [1] * 12)
    found = learn(OnlineLRU(TASK.loss, "one_step"), model, x, y, [4, 8])
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max()
