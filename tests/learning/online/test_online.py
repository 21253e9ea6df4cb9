"""`Online`: against its loop by hand, its samples of each form, and that it is stored and copied to the bit."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from scanl.errors import CheckpointError, ConfigError, DataError
from scanl.learning import Online, progressive
from scanl.learning.online import AnswerClass, AnswerNumbers
from scanl.models import Stack

WAVE = [math.sin(0.5 * t) + 0.1 * math.cos(3 * t) for t in range(31)]
PAIRS = list(itertools.pairwise(WAVE))


def made(kind=None, **options):
    return Online(Stack(4, 1, "lru", channel_mixer="none"), kind, **{"lr": 1e-2, **options})


def answered(learner, pairs):
    answers = []
    for x, y in pairs:
        answers.append(learner.predict_one(x))
        learner.learn_one(x, y)
    return answers


def test_the_answers_are_those_of_the_loop():
    learner, torch_state = made(lr=[1e-3, 1e-2]), torch.get_rng_state()
    twin = copy.deepcopy(learner)
    torch.rand(3)  # the weights are those of the generator when it was made
    answers = answered(learner, PAIRS)
    torch.set_rng_state(torch_state)
    loop, expected = twin.begin(1), []
    for x, y in PAIRS:
        expected.append(loop.answer([x]))
        loop.learn(y)
    assert answers == expected
    assert loop.bank.best == learner.loop.bank.best


def test_the_stack_is_copied_and_rates_begin_with_the_same_weights():
    stack = Stack(4, 1, "lru")
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    learner = Online(stack, lr=[0.0, 1e-2])
    answered(learner, PAIRS)
    frozen, moved = (one.model.stack.state_dict() for one in learner.loop.bank.learners)
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())
    assert all(torch.equal(before[name], value) for name, value in frozen.items())
    assert not all(torch.equal(before[name], value) for name, value in moved.items())


@pytest.mark.parametrize(
    "form", [lambda x: [x], np.array, torch.tensor, lambda x: np.array([x], np.float32).astype(float)]
)
def test_a_sample_is_a_number_or_a_sequence(form):
    expected = answered(made(), PAIRS[:4])
    torch.manual_seed(0)
    np.testing.assert_allclose(answered(made(), [(form(x), y) for x, y in PAIRS[:4]]), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0, math.inf], "a sample has inf, expected finite numbers"),
        ("text", "a sample is 'text', expected numbers"),
        ([[1.0]], r"a sample has shape \(1, 1\), expected a number or \(n,\)"),
    ],
)
def test_a_first_sample_that_is_refused_leaves_no_loop(x, message):
    learner = made()
    with pytest.raises(DataError, match=message):
        learner.learn_one(x, 0.5)
    assert learner.loop is None
    learner.learn_one(0.5, 0.5)
    with pytest.raises(DataError, match=message if x != [[1.0]] else "has shape"):
        learner.predict_one(x)
    assert learner.loop.count == 1


def test_a_sample_is_a_mapping_whose_features_take_places():
    learner, twin = made(), made()
    learner._random = twin._random
    loop = twin.begin(16)
    samples = [{"b": 1.0, "a": 2}, {"c": True, "word": "x"}, {"a": None, "b": np.float32(3.0)}]
    nan = math.nan
    for x, numbers in zip(samples, ([2, 1, nan], [nan, nan, 1], [nan, 3, nan]), strict=True):
        numbers = [*numbers, *[nan] * 13]
        assert learner.predict_one(samples[0]) == (twin.loop.peek([2, 1, *[nan] * 14]) if learner.loop else 0)
        learner.learn_one(x, 0.5)
        loop.answer(numbers)
        loop.learn(0.5)
    with pytest.raises(DataError, match="feature 'd' is inf, expected a finite number"):
        learner.learn_one({"d": math.inf}, 1.0)
    assert learner.predict_one({"c": 2.0, "d": 1.0}) == loop.peek([nan, nan, 2, *[nan] * 13])


def test_there_are_twice_as_many_places_as_the_first_sample_has_features():
    learner = made()
    learner.learn_one(dict.fromkeys("abcdefghi", 1.0), 0.5)
    assert learner.loop.inputs == 18


def test_a_feature_without_a_place_is_one_warning():
    learner = made()
    learner.begin(1)
    with pytest.warns(UserWarning, match="feature 'b' is not read because all 1 places are taken") as said:
        answered(learner, [({"a": 1.0}, 1.0), ({"b": 1.0}, 2.0), ({"c": 1.0}, 2.0)])
    assert [warning.filename for warning in said] == [__file__]


def test_classes():
    learner = made(AnswerClass(3))
    assert (learner.predict_one(0.5), learner.predict_proba_one(0.5)) == (None, {})
    answered(learner, [(x, "ab"[t % 2]) for t, (x, _) in enumerate(PAIRS)])
    found = learner.predict_proba_one(0.5)
    assert found.keys() == {"a", "b"}
    assert math.isclose(sum(found.values()), 1)
    assert learner.predict_one(0.5) == max(found, key=found.get)


def test_learners_of_one_kind_have_truths_of_their_own():
    kind = AnswerClass(3)
    answered(made(kind), [(0.5, "a")])
    assert made(kind).predict_proba_one(0.5) == {}


def test_truths_may_come_late():
    learner = made()
    with pytest.raises(DataError, match="no sample waits"):
        learner.learn(1.0)
    first, second = learner.answer(0.1), learner.answer(0.2)
    learner.learn(1.0, 1)
    learner.learn_one(0.3, 0.5)  # the truth is that of its own sample
    assert [sample.index for sample in learner.loop.queue] == [0, 1, 2]
    learner.loop.skip()
    assert (first, second, len(learner.loop.queue)) == (0.0, 0.0, 0)


def test_a_wrong_truth_changes_nothing():
    learner = made()
    answered(learner, [({"a": x}, y) for x, y in PAIRS[:3]])
    before = pickle.dumps(learner)
    with pytest.raises(DataError, match="the target is nan, expected a finite number"):
        learner.learn_one({"b": 0.5}, math.nan)
    assert pickle.dumps(learner) == before


@pytest.mark.parametrize("samples", [0, 12])
@pytest.mark.parametrize("form", [lambda x: x, lambda x: {"a": x}])
def test_it_goes_on_to_the_bit(samples, form, tmp_path):
    pairs = [(form(x), y) for x, y in PAIRS]
    learner = made(lr=[1e-3, 1e-2], block=3)
    answered(learner, pairs[:samples])
    learner.save(tmp_path / "learner")
    torch.manual_seed(0 if samples == 0 else 1)  # what has read no sample has no weights but those of its options
    others = [copy.deepcopy(learner), pickle.loads(pickle.dumps(learner)), made(lr=[1e-3, 1e-2], block=3)]
    others[2].load(tmp_path / "learner")
    expected = answered(learner, pairs[samples:])
    assert [answered(other, pairs[samples:]) for other in others] == [expected] * 3


def test_a_file_of_other_options_is_refused(tmp_path):
    learner = made(lr=[1e-3, 1e-2])
    answered(learner, PAIRS[:3])
    learner.save(tmp_path / "learner")
    with pytest.raises(CheckpointError, match="of another form"):
        made().load(tmp_path / "learner")
    (tmp_path / "learner").write_bytes((tmp_path / "learner").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"damaged or cut short, or was not written by `Online\.save`"):
        made(lr=[1e-3, 1e-2]).load(tmp_path / "learner")


class Kept:
    """A metric that keeps what it reads."""

    def __init__(self, labels):
        self.requires_labels, self.read = labels, []

    def update(self, truth, answer):
        self.read.append((truth, answer))


def test_a_progressive_score_reads_each_answer_before_its_truth():
    kept = progressive(PAIRS, made(), Kept(True))
    torch.manual_seed(0)
    assert kept.read == list(zip(WAVE[1:], answered(made(), PAIRS), strict=True))
    classes = progressive([(x, "a") for x, _ in PAIRS[:3]], made(AnswerClass()), Kept(False))
    assert classes.read == [("a", {}), ("a", {"a": 1.0}), ("a", {"a": 1.0})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": [1e-3, -1.0]}, r"Online: lr is \[0.001, -1.0\], expected rates of at least 0"),
        ({"lr": []}, "expected rates of at least 0"),
        ({"block": 0}, "Online: block is 0, expected at least 1"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'"),
        ({"algorithm": "bpt"}, "unknown algorithm 'bpt'; did you mean 'bptt'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        made(AnswerNumbers(), **options).begin(1)
