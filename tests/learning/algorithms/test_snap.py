"""The sparse n-step approximation: exact where it should be, and else the paper's equation with dense matrices."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from gradients import QUESTION, by_bptt, cosine, difference, learned, numbers, parts, tiny
from scanl.data.batch import Batch
from scanl.data.questions import NextToken, Vocabulary
from scanl.learning.algorithms import BPTT, SnAp
from scanl.learning.questions import answerer
from scanl.models import Stack

pytestmark = pytest.mark.cells_by_loop


@pytest.mark.parametrize(
    ("layer", "n"), [("indrnn", 1), ("lru", 1), ("mingru", 1), ("gru", 2), ("lstm", 2), ("gru", 3), ("gru", None)]
)
def test_exact_in_diagonal_recurrences_and_for_large_n(layer, n):
    model, batch = tiny(layer), numbers(12)
    gradients, _ = learned(SnAp(QUESTION.loss, n=n), model, parts(batch, 3))
    assert difference(gradients, by_bptt(model, batch)) < 1e-9


def by_definition(model, batch, masks):
    """The equation with dense matrices, one row: M is masked, and the gradient is that before the mask."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    state, total = model.init_state(1)[0].mixer, {name: torch.zeros_like(p) for name, p in named.items()}
    influence = {name: state.new_zeros(state.shape[1], *p.shape) for name, p in named.items()}
    form = model.init_state(1)

    def step(named, state, t):
        return functional_call(model, named, (batch.inputs[:, t : t + 1], (form[0]._replace(mixer=state),)))

    for t in range(batch.length):

        def after(named, state, t=t):
            return step(named, state, t)[1][0].mixer[0]

        def loss(named, state, t=t):
            return (step(named, state, t)[0][:, 0] - batch.targets[:, t]).square().mean() / batch.length

        by_parameter, by_state = (jacrev(loss, i)(named, state) for i in (0, 1))
        fresh, jacobian = (jacrev(after, i)(named, state) for i in (0, 1))
        for name in named:
            carried = influence[name]
            total[name] += by_parameter[name] + torch.einsum("e,e...->...", by_state[0], carried)
            new = torch.einsum("ef,f...->e...", jacobian[:, 0], carried) + fresh[name]
            influence[name] = new * masks.get(name, torch.ones(()))
        state = step(named, state, t)[1][0].mixer
    return total


def test_snap_1_follows_a_weight_in_its_own_unit():
    model, batch = tiny("elman", channel_mixer="none"), numbers(10, rows=1)
    layer = "stack.blocks.0.mixer."
    own = torch.eye(4, dtype=torch.float64)
    masks = {layer + name: own[:, :, None] for name in ("weight_ih_l0", "weight_hh_l0")}
    masks |= {layer + name: own for name in ("bias_ih_l0", "bias_hh_l0")}
    gradients, learner = learned(SnAp(QUESTION.loss), model, parts(batch, 5))
    expected = by_definition(copy.deepcopy(model), batch, masks)
    assert difference(gradients, {name: value for name, value in expected.items() if value.any()}) < 1e-9
    assert {tuple(leaf.shape) for leaf in learner.influence} == {(1, 1, 4, 20), (1, 4, 1, 10)}
    assert 0.5 < cosine(gradients, by_bptt(model, batch)) < 1 - 1e-6


def test_sparse_weights_keep_a_sparse_influence_whatever_the_input_is():
    model = tiny("elman", dim=6, channel_mixer="none")
    recurrent = model.stack.blocks[0].mixer.weight_hh_l0
    with torch.no_grad():
        recurrent.mul_(torch.eye(6) + torch.eye(6).roll(1, 0))  # a ring
    sizes = []
    for n in (1, 2, 3, None):
        learner = SnAp(QUESTION.loss, n=n).init(model, 1)
        own = [leaf for leaf in learner.influence if leaf.shape[1] == 6 or n is None]
        sizes.append(own[0].shape[2])
        _, other = learned(SnAp(QUESTION.loss, n=n), model, [numbers(2)._replace(inputs=torch.zeros(2, 2, 3).double())])
        assert [leaf.shape[1:] for leaf in other.influence] == [leaf.shape[1:] for leaf in learner.influence]
    assert sizes == [1, 2, 3, 6]
    assert isinstance(recurrent, nn.Parameter)


def test_every_row_of_an_embedding_reaches_the_state_though_no_probe_reads_it():
    """Of more tokens than the structure is read from; in a diagonal recurrence n = 1 is exact."""
    question = answerer(NextToken(Vocabulary(1000)))
    torch.manual_seed(0)
    model = question.model(Stack(2, 1, "mingru", channel_mixer="none")).double()
    tokens = torch.arange(9, 999, 99).view(2, 5)
    batch = Batch(tokens, tokens.roll(1, 1))
    gradients, _ = learned(SnAp(question.loss, n=1), model, parts(batch, 1))
    expected, _ = learned(BPTT(question.loss), model, [batch])
    assert difference(gradients, expected) < 1e-9
