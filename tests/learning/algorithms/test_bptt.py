"""Backpropagation through time with its segments, and truncated: against the undivided sequence and a plain loop."""

import copy

import pytest
import torch
from torch.nn import functional as F

from scanl.data.batch import Batch
from scanl.data.questions import Class, FeatureInputs, Label, NextToken, Vocabulary
from scanl.errors import ConfigError
from scanl.layers import auxiliary
from scanl.layers.state import leaves
from scanl.learning.algorithms import BPTT, TBPTT
from scanl.learning.questions import answerer
from scanl.models import Stack

pytestmark = pytest.mark.cells_by_loop
BYTES = answerer(NextToken(Vocabulary(7)))
EPS = torch.finfo(torch.float64).eps


def tiny(layer="gru", **options):
    torch.manual_seed(1)
    return BYTES.model(Stack(4, 2, layer, layer_options=options)).double()


def tokens(length, rows=2):
    x = torch.randint(7, (rows, length + 1), generator=torch.Generator().manual_seed(2))
    return Batch(x[:, :-1], x[:, 1:])


def learned(algorithm, model, *batches):
    """Return the gradient of all updates together, the losses, and the learner."""
    model = copy.deepcopy(model)
    learner, losses = algorithm.init(model, batches[0].size), []
    for batch in batches:
        loss, learner = algorithm.update(model, learner, batch)
        loss.backward()
        losses.append(loss.item())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, losses, learner


def assert_close(found, expected, terms=1000):
    for name, value in expected.items():
        bound = terms * EPS * max(1.0, value.abs().max().item())
        torch.testing.assert_close(found[name], value, rtol=0, atol=bound)


@pytest.mark.parametrize("segments", [2, 3, 5, 17])
def test_segments_change_neither_the_gradient_nor_the_state(segments):
    model, batch = tiny(), tokens(17)
    expected, losses, state = learned(BPTT(BYTES.loss), model, batch)
    gradient, same, last = learned(BPTT(BYTES.loss, segments=segments), model, batch)
    assert_close(gradient, expected)
    torch.testing.assert_close(same, losses)
    for (_, leaf), (_, value) in zip(leaves(last), leaves(state), strict=True):
        torch.testing.assert_close(leaf, value)


def test_losses_of_layers_are_added_once_however_the_steps_are_cut():
    """A part of the steps that runs again computes the layer's loss again, and it counts once."""
    options = {"num_heads": 1, "window": 2, "chunk_size": 2, "num_slots": 2}
    model, batch = tiny("compressive_transformer", **options), tokens(12)
    with auxiliary.collect() as losses:
        task, _ = BYTES.loss(model, batch)
    assert losses.total() > 0
    expected, (loss,), _ = learned(BPTT(BYTES.objective), model, batch)
    assert loss == pytest.approx((task + losses.total()).item())
    gradient, same, _ = learned(BPTT(BYTES.objective, segments=3), model, batch)
    assert_close(gradient, expected)
    torch.testing.assert_close(same, [loss])
    assert expected["stack.blocks.0.mixer.compress.weight"].any()


def test_a_segment_that_runs_twice_changes_running_statistics_once_and_repeats_dropout():
    model = BYTES.model(Stack(4, 1, "ligru", dropout=0.5)).double()
    batch = tokens(8, rows=3)
    expected = copy.deepcopy(model)
    for segments, net in ((2, model), (2, expected)):
        algorithm = BPTT(BYTES.loss, segments=segments)
        torch.manual_seed(3)
        loss, _ = algorithm.update(net, algorithm.init(net, 3), batch)
        if net is model:
            loss.backward()  # runs the segments again
    assert any("running" in name for name, _ in model.named_buffers())
    for (name, buffer), (_, value) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, value, msg=name)


def test_segments_keep_fewer_numbers_for_the_backward_pass():
    model, batch = tiny("elman"), tokens(64)

    def saved(segments):
        count = 0

        def pack(tensor):
            nonlocal count
            count += tensor.numel()
            return tensor

        algorithm = BPTT(BYTES.loss, segments=segments)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            algorithm.update(model, algorithm.init(model, 2), batch)
        return count

    assert saved(8) < saved(1) / 3


def test_a_mask_is_cut_with_its_segments():
    question = answerer(Label(FeatureInputs(2), classes=3))
    torch.manual_seed(0)
    model = question.model(Stack(4, 1, "gru")).double()
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    targets = torch.where(mask, torch.randint(3, (2, 9)), -100)
    batch = Batch(torch.randn(2, 9, 2, dtype=torch.float64), targets, mask)
    expected, _, _ = learned(BPTT(question.loss), model, batch)
    assert_close(learned(BPTT(question.loss, segments=3), model, batch)[0], expected)


def truncated(model, batch, every, window):
    """The definition: for each part, run all steps from the beginning, and cut the graph before the window."""
    total = torch.zeros((), dtype=torch.float64)
    for begin in range(0, batch.length, every):
        end, state = min(begin + every, batch.length), model.init_state(batch.size)
        start = max(0, begin + every - window)
        with torch.no_grad():
            for t in range(start):
                state = model(batch.inputs[:, t : t + 1], state)[1]
        for t in range(start, end):
            logits, state = model(batch.inputs[:, t : t + 1], state)
            if t >= begin:
                total = total + F.cross_entropy(logits[:, 0], batch.targets[:, t]) / batch.length
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("every", "window"), [(1, 1), (1, 4), (2, 5), (3, 3), (5, 12), (12, 12)])
def test_tbptt_is_the_gradient_through_the_window(every, window):
    model, batch = tiny("lstm"), tokens(12)
    gradient, _, _ = learned(TBPTT(BYTES.loss, every=every, window=window), model, batch)
    assert_close(gradient, truncated(copy.deepcopy(model), batch, every, window))
    if every == window == 12:
        assert_close(gradient, learned(BPTT(BYTES.loss), model, batch)[0])


LABELS = answerer(Label(FeatureInputs(2), classes=3))


@pytest.mark.parametrize(("every", "window"), [(2, 4), (1, 3), (3, 3)])
@pytest.mark.parametrize("short", [False, True])
def test_an_answer_of_tbptt_counts_once_wherever_others_are_missing(every, window, short):
    """Against a loop over the rows, steps and windows. short: rows end early, else the mask is absent."""
    torch.manual_seed(0)
    model, x = LABELS.model(Stack(4, 1, "gru")).double(), torch.randn(3, 7, 2).double()
    lengths = (7, 5, 2) if short else (7, 7, 7)
    known = {(0, 2), (0, 6), (1, 3), (1, 4), (2, 1)}
    targets = torch.full((3, 7), -100)
    for row, t in known:
        targets[row, t] = (row + t) % 3
    mask = torch.arange(7) < torch.tensor(lengths)[:, None] if short else None
    found, (loss,), _ = learned(TBPTT(LABELS.loss, every=every, window=window), model, Batch(x, targets, mask))
    total = torch.zeros((), dtype=torch.float64)
    for row, t in known:
        end = min(t - t % every + every, 7)
        start, state = max(0, t - t % every + every - window), model.init_state(1)
        with torch.no_grad():
            for s in range(min(start, end)):
                state = model(x[row : row + 1, s : s + 1], state)[1]
        logits, _ = model(x[row : row + 1, start : t + 1], state)
        total = total + F.cross_entropy(logits[0, -1:], targets[row, t : t + 1]) / len(known)
    assert loss == pytest.approx(total.item(), rel=1000 * EPS)
    named = dict(model.named_parameters())
    assert_close(found, dict(zip(named, torch.autograd.grad(total, [*named.values()]), strict=True)))


def test_tbptt_learns_one_answer_of_a_sequence_through_the_window_before_its_end():
    question = answerer(Class(FeatureInputs(2), classes=3))
    torch.manual_seed(0)
    model, x = question.model(Stack(4, 1, "gru")).double(), torch.randn(2, 6, 2).double()
    mask = torch.arange(6) < torch.tensor([[6], [3]])
    batch = Batch(x, torch.tensor([2, 0]), mask)
    found, _, _ = learned(TBPTT(question.loss, every=6, window=6), model, batch)
    assert_close(found, learned(BPTT(question.loss), model, batch)[0])
    found, (loss,), _ = learned(TBPTT(question.loss, every=2, window=8), model, batch)
    exact, (same,), _ = learned(BPTT(question.loss), model, batch)
    assert loss == pytest.approx(same, rel=1000 * EPS)
    assert_close(found, {"head.bias": exact["head.bias"]})


@pytest.mark.parametrize("layer", ["lstm", "mamba"])
def test_the_window_of_tbptt_goes_on_from_update_to_update(layer):
    model, batch = tiny(layer), tokens(12)
    parts = [batch.steps(t, t + 2, targets=True) for t in range(0, 12, 2)]
    algorithm = TBPTT(BYTES.loss, every=2, window=7)
    together, losses, _ = learned(algorithm, model, batch)
    split, parted, learner = learned(algorithm, model, *parts)
    assert_close({name: value / 6 for name, value in split.items()}, together)
    assert sum(parted) / 6 == pytest.approx(losses[0], rel=100 * EPS)
    assert learner.inputs.shape == (2, 5)
    assert learner.filled.tolist() == [5, 5]


def test_errors_of_a_window():
    with pytest.raises(ConfigError, match="window is 3, expected at least every=4"):
        TBPTT(BYTES.loss, every=4, window=3)
    algorithm = TBPTT(BYTES.loss, every=1, window=3)
    model, batch = tiny(), tokens(4)
    learner = algorithm.init(model, 2)
    learner = learner._replace(filled=torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match=r"kept \[0, 1\] samples"):
        algorithm.update(model, learner, batch)
