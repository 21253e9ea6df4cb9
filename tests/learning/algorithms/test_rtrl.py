"""Real-time recurrent learning is exact: against backpropagation through time over the undivided sequence."""

import pytest
import torch
from torch import nn

from gradients import QUESTION, by_bptt, difference, learned, numbers, parts, tiny
from scanl.errors import ConfigError
from scanl.layers.registry import classes
from scanl.layers.state import index, leaves, load, save
from scanl.learning.algorithms import RTRL
from scanl.models import Features

pytestmark = pytest.mark.cells_by_loop


@pytest.mark.parametrize("layers", [("elman",), ("gru", "lru"), ("lstm",)])
def test_the_sum_of_64_single_steps_is_the_gradient_of_the_sequence(layers):
    model, batch = tiny(*layers), numbers(64)
    gradients, _ = learned(RTRL(QUESTION.loss), model, parts(batch, 1))
    assert difference(gradients, by_bptt(model, batch)) < 1e-9


@pytest.mark.parametrize(("size", "block"), [(2, None), (8, 3), (4, 1)])
@pytest.mark.parametrize("layers", [("gru",), ("hawk", "indrnn")])
def test_every_split_gives_the_same_sum(layers, size, block):
    model, batch = tiny(*layers), numbers(8)
    gradients, _ = learned(RTRL(QUESTION.loss, block=block), model, parts(batch, size))
    assert difference(gradients, by_bptt(model, batch)) < 1e-9


def test_a_state_with_positions_is_followed_to_every_place():
    """What a step writes, and so what a parameter reaches, is another part of the state in each step."""
    options = {"attention": {"num_heads": 2, "max_length": 12}}
    model, batch = tiny("attention", layer_options=options, channel_mixer="none"), numbers(12)
    gradients, _ = learned(RTRL(QUESTION.loss), model, parts(batch, 2))
    assert difference(gradients, by_bptt(model, batch)) < 1e-9


WIDTHS = {"gla": 8, "hgrn2": 8, "log_linear_mamba2": 8}  # what the heads of their samples divide
SHORT = ("diag_attention", "expdecay", "hippo")
LAYERS = [cls for cls in classes() if cls.preset_of is None and not cls.bidirectional]


@pytest.mark.parametrize(
    "layer", [pytest.param(cls, id=cls.name, marks=[pytest.mark.long] * (cls.name not in SHORT)) for cls in LAYERS]
)
def test_the_gradient_is_exact_for_every_layer(layer):
    options = {layer.name: layer.sample}
    model = tiny(layer.name, dim=WIDTHS.get(layer.name, 6), layer_options=options, channel_mixer="none")
    with torch.no_grad():  # none is 0 or 1 at the start, where an error would not show
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    batch = numbers(64, rows=1)
    gradients, _ = learned(RTRL(QUESTION.loss), model, parts(batch, 16))
    expected = {name: value for name, value in by_bptt(model, batch).items() if value is not None}
    for name, parameter in model.named_parameters():  # of a first state that is learned there is no gradient
        start = sum(leaf.sum() for _, leaf in leaves(model.init_state(1)) if leaf.requires_grad)
        if torch.is_tensor(start) and torch.autograd.grad(start, parameter, allow_unused=True)[0] is not None:
            expected.pop(name, None)
    # A gradient that is 0 by theory, as that of the bias of aft's keys, is rounding error in both.
    least = 64 * torch.finfo(torch.float64).eps * max(value.abs().max() for value in expected.values())
    rounding = {name for name, value in expected.items() if value.abs().max() <= least}
    assert all(gradients[name].abs().max() <= least for name in rounding)
    assert difference(gradients, {name: value for name, value in expected.items() if name not in rounding}) < 1e-9


def test_influence_is_dense_only_where_a_parameter_reaches_the_state():
    """LRU: two real numbers a channel, for its row of 2 x 4 weights, 1 scale and 2 numbers of the pole. GRU: 4."""
    model = tiny("gru", "lru", channel_mixer="none")
    learner = RTRL(QUESTION.loss).init(model, 3)
    inputs = 4 * (3 + 1) + 4  # the map of the features and the norm before the first layer
    second = 4  # the norm before the second
    recurrence = 2 * 3 * 4 * 4 + 2 * 3 * 4
    sizes = [leaf[0].numel() for leaf in learner.influence]
    assert sum(sizes) == (4 + 8) * (inputs + recurrence) + 8 * second + 4 * 2 * (2 * 4 + 1 + 2)


def test_memory_is_as_declared_for_a_dense_layer():
    model = tiny("gru", channel_mixer="none")
    learner = RTRL(QUESTION.loss).init(model, 3)
    reaching = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(("head", "stack.norm")))
    assert sum(leaf.numel() for _, leaf in leaves(learner)) == 3 * 4 * (reaching + 1)


def test_a_learner_that_was_saved_goes_on_to_the_bit(tmp_path):
    model, algorithm = tiny("lstm"), RTRL(QUESTION.loss)
    first, second = parts(numbers(6), 3)
    _, learner = algorithm.update(model, algorithm.init(model, 2), first)
    save(learner, tmp_path / "learner")
    restored = load(tmp_path / "learner", algorithm.init(model, 2))
    found = []
    for each in (learner, restored):
        model.zero_grad()
        loss, _ = RTRL(QUESTION.loss).update(model, each, second)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_rows_are_independent():
    model, batch = tiny("gru"), numbers(6, rows=3)
    _, learner = learned(RTRL(QUESTION.loss), model, parts(batch, 2))
    alone = [part.rows(slice(1, 2)) for part in parts(batch, 2)]
    _, single = learned(RTRL(QUESTION.loss), model, alone)
    for (_, leaf), (_, value) in zip(leaves(index(learner, [1])), leaves(single), strict=True):
        torch.testing.assert_close(leaf, value)


def test_parameters_that_are_frozen_have_no_influence():
    model = tiny("gru", channel_mixer="none")
    model.input.requires_grad_(False)
    model.stack.blocks[0].mixer.weight_ih_l0.requires_grad_(False)
    batch = numbers(8)
    gradients, learner = learned(RTRL(QUESTION.loss), model, parts(batch, 2))
    expected = by_bptt(model, batch)
    assert difference(gradients, expected) < 1e-9
    assert gradients["input.weight"] is None
    assert sum(leaf.shape[-1] for leaf in learner.influence) == 4 + 3 * 4 * 4 + 2 * 3 * 4


class Growing(nn.Module):
    """A model whose state is all that it has read."""

    inputs = Features(1)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def init_state(self, rows, **_):
        return torch.zeros(rows, 1)

    def forward(self, x, state):
        return x, torch.cat([state, (self.scale * x).flatten(1)], 1)


def test_models_without_a_state_of_constant_size_are_refused():
    model = tiny("gru")
    model.init_state = lambda *args, **kwargs: ()
    with pytest.raises(ConfigError, match="rtrl: the model carries no numbers"):
        RTRL(QUESTION.loss).init(model, 1)
    with pytest.raises(ConfigError, match="rtrl: the state grows from 1 numbers to "):
        RTRL(QUESTION.loss).init(Growing(), 1)
