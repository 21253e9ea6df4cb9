"""How parameters learn: each algorithm against a plain loop over the steps, in float64."""

import copy

import pytest
import torch
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.data.questions import NextToken, Vocabulary
from scanl.layers.state import detach, leaves
from scanl.learning.algorithms import BPTT
from scanl.learning.questions import answerer
from scanl.models import LanguageModel, Stack

COVERS = ["learning/algorithms/*"]

BYTES = NextToken(Vocabulary(7))


def tiny() -> LanguageModel:
    return LanguageModel(7, Stack(6, 2, ["lru", "gru"])).double()


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(found, expected) -> None:
    """Of sums of fewer than 100 terms, in another order."""
    for name, value in expected.items():
        bound = 100 * torch.finfo(torch.float64).eps * max(1.0, value.abs().max().item())
        torch.testing.assert_close(found[name], value, rtol=0, atol=bound)


@pytest.mark.parametrize("length", [1, 5])
def test_bptt_of_whole_sequences_is_the_gradient_of_the_sum_over_their_steps(length):
    model, (x, target) = tiny(), torch.randint(7, (2, 3, length))
    plain, state, total = copy.deepcopy(model), None, torch.zeros((), dtype=torch.float64)
    for t in range(length):
        logits, state = plain(x[:, t : t + 1], state)
        total = total + F.cross_entropy(logits[:, 0], target[:, t]) / length
    total.backward()
    algorithm = BPTT(answerer(BYTES).loss)
    learner = algorithm.init(model, 3)
    found, learner = algorithm.update(model, learner, Batch(x, target))
    for (name, leaf), (same, expected) in zip(leaves(learner), leaves(state), strict=True):
        assert name == same
        torch.testing.assert_close(leaf, expected.detach())
    found.backward()
    torch.testing.assert_close(found, total, rtol=1e-14, atol=0)
    assert_same(gradients(model), gradients(plain))


def test_bptt_over_streams_carries_the_state_and_cuts_its_gradient():
    """Three updates, a step of the optimiser after each; the plain loop detaches the state where a chunk begins."""
    model, (x, target) = tiny(), torch.randint(7, (2, 3, 12))
    plain = copy.deepcopy(model)
    algorithm = BPTT(answerer(BYTES).loss)
    learner, state = algorithm.init(model, 3), None
    optimisers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for start in range(0, 12, 4):
        for optimiser in optimisers:
            optimiser.zero_grad()
        chunk = slice(start, start + 4)
        found, learner = algorithm.update(model, learner, Batch(x[:, chunk], target[:, chunk]))
        assert not any(leaf.requires_grad for _, leaf in leaves(learner))
        found.backward()
        state = detach(state)
        total = torch.zeros((), dtype=torch.float64)
        for t in range(start, start + 4):
            logits, state = plain(x[:, t : t + 1], state)
            total = total + F.cross_entropy(logits[:, 0], target[:, t]) / 4
        total.backward()
        assert_same(gradients(model), gradients(plain))
        for optimiser in optimisers:
            optimiser.step()
    for (name, leaf), (same, expected) in zip(leaves(learner), leaves(state), strict=True):
        assert name == same
        torch.testing.assert_close(leaf, expected)
