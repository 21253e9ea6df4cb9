"""The prequential loop: its order, delay, bank, memory, and what it does with odd samples."""

import copy
import gc
import itertools
import math

import numpy as np
import pytest
import torch

from scanl.data.batch import Batch
from scanl.errors import ConfigError, DataError, DivergenceError
from scanl.learning.algorithms import BPTT
from scanl.learning.online import AnswerClass, AnswerNumbers, Online
from scanl.learning.online.scaling import MAX_DEVIATION, Innovation, Scaling
from scanl.models import Stack

COVERS = [
    "learning/online/answers",
    "learning/online/bank",
    "learning/online/learner",
    "learning/online/scaling",
]


def loop_of(kind, inputs=1, lr=(1e-2,), layer="lru", dropout=0.0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = Stack(4, 1, layer, channel_mixer="none", dropout=dropout)
        learner = Online(stack, kind, lr=lr, **options)
    return learner.begin(inputs)


def numbers(feedback=False):
    return AnswerNumbers(1, 10_000, feedback)


def wave(count):
    return [math.sin(0.5 * t) + 0.1 * math.cos(3 * t) for t in range(count + 1)]


def run(loop, series):
    answers = []
    for now, following in itertools.pairwise(series):
        answers.append(loop.answer([now]))
        loop.learn(following)
    return answers


class Order:
    """A scorer that writes down what happens."""

    def __init__(self):
        self.events, self.errors = [], []

    def update(self, truth, answer, naive, error):
        self.events.append("score")
        self.errors.append(error)


def test_answers_then_scores_then_learns(monkeypatch):
    order = Order()
    loop = loop_of(numbers(), scores=order)
    update = BPTT.update

    def watched(self, model, learner, batch):
        order.events.append("learn")
        return update(self, model, learner, batch)

    monkeypatch.setattr(BPTT, "update", watched)
    for value in (1.0, 2.0, 3.0):
        loop.answer([value])
        order.events.append("answer")
        loop.learn(value)
    assert order.events == ["answer", "score", "learn"] * 3


def test_a_truth_does_not_leak_into_its_own_answer():
    """Two streams that differ in the truth of one sample have the same answers up to and with that sample."""
    series = wave(12)
    answers = []
    for other in (0.0, 5.0):
        loop = loop_of(numbers(feedback=True))
        found = []
        for t in range(12):
            found.append(loop.answer([series[t]]))
            loop.learn(series[t + 1] + (other if t == 8 else 0.0))
        answers.append(found)
    assert answers[0][:9] == answers[1][:9]
    assert answers[0][9] != answers[1][9]


def test_at_rate_0_the_answers_are_those_of_the_frozen_model():
    series = wave(20)
    loop = loop_of(numbers(), lr=[0.0])
    (learner,) = loop.bank.learners
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    seen = []
    answer = learner.answer
    learner.answer = lambda x: seen.append((x, answer(x))) or seen[-1][1]
    run(loop, series)
    for name, value in learner.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    with torch.no_grad():
        whole, _ = learner.model(torch.cat([x for x, _ in seen], 1))
    # The loop steps through the sequence, in float32.
    torch.testing.assert_close(torch.cat([y for _, y in seen], 1), whole)


def test_a_step_of_the_loop_is_that_of_the_algorithm_by_hand():
    """Answers from a loop written with the model, the algorithm and the optimizer alone."""
    series = wave(8)
    loop, twin = loop_of(numbers()), loop_of(numbers())
    answers = run(loop, series)
    (learner,) = twin.bank.learners
    model, optimizer, algorithm = learner.model, learner.optimizer, learner.algorithm
    scaling, innovation = Scaling(1, 10_000), Innovation(1, 10_000)
    state, carried, last, expected = model.init_state(1), algorithm.init(model, 1), None, []
    for now, following in itertools.pairwise(series):
        x = np.array([now])
        step = torch.from_numpy(scaling.scaled(x).astype(np.float32)).view(1, 1, 1)  # by the samples before
        scaling.update(x)
        base = innovation.base(last)
        with torch.no_grad():
            y, state = model(step, state)
        expected.append(base[0] + innovation.scale[0] * y.item())
        z = innovation.update(np.array([following]), base, last)
        last = np.array([following])
        optimizer.zero_grad()
        target = torch.from_numpy(z.astype(np.float32)).view(1, 1, 1)
        loss, carried = algorithm.update(model, carried, Batch(step, target))
        if np.isfinite(z).all():
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    # The norm by which a gradient is cut is rounded in another order: by that much a weight and an answer differ.
    np.testing.assert_allclose(answers, expected, rtol=8 * len(series) * np.finfo(np.float32).eps)


def test_with_a_delay_the_passes_are_those_of_the_same_truths_later():
    """The answers at a delay are those of a loop by hand whose truths come three samples later."""
    series = wave(15)
    late, expected = loop_of(numbers()), loop_of(numbers())
    found, truths = [], []
    for t in range(15):
        found.append(late.answer([series[t]]))
        truths.append((t, series[t + 1]))
        if len(truths) > 3:
            late.learn(truths[0][1], truths.pop(0)[0])
    answers = [expected.answer([series[t]]) for t in range(4)]
    for t in range(4, 15):
        expected.learn(series[t - 3])
        answers.append(expected.answer([series[t]]))
    assert found == answers
    assert len(late.queue) == 3


def test_truths_may_come_in_another_order():
    """Samples are learnt in their order, so the answers are the same once both truths are known."""
    series, answers = wave(6), []
    for order in ((0, 1), (1, 0)):
        loop = loop_of(AnswerClass(2, feedback=False))
        loop.answer([series[0]])
        loop.learn("a")
        loop.answer([series[1]])
        loop.learn("b")
        for value in series[2:4]:
            loop.answer([value])
        for index in order:
            loop.learn("ab"[index], 2 + index)
        answers.append(loop.answer([series[4]]))
    assert answers[0] == answers[1]


def test_a_truth_that_never_comes_is_given_up():
    loop = loop_of(numbers(), waiting=4)
    for value in wave(20):
        loop.answer([value])
    assert (len(loop.queue), loop.given_up) == (4, 17)
    loop.learn(1.0)
    assert len(loop.queue) == 3
    loop.skip(20)  # the last
    loop.learn(1.0, 18)
    loop.learn(1.0, 19)
    assert not loop.queue


def test_a_block_makes_one_step(monkeypatch):
    loop = loop_of(numbers(), block=4)
    (learner,) = loop.bank.learners
    steps, step = [], learner.optimizer.step
    monkeypatch.setattr(learner.optimizer, "step", lambda: steps.append(loop.count) or step())
    run(loop, wave(12))
    assert steps == [4, 8, 12]


def test_a_gradient_is_cut_to_the_norm():
    loop = loop_of(numbers(), clip=1e-3)
    run(loop, wave(3))
    norm = sum(each.square().sum() for each in loop.bank.learners[0].flat.gradients.values()).sqrt().item()
    assert norm == pytest.approx(1e-3, rel=1e-2)


def test_a_sample_that_is_skipped_makes_no_step(monkeypatch):
    for kind, truth in ((numbers(), 1.0), (AnswerClass(2, feedback=False), "a")):
        loop = loop_of(kind)
        (learner,) = loop.bank.learners
        steps = []
        monkeypatch.setattr(learner.optimizer, "step", lambda loop=loop, steps=steps: steps.append(loop.count))
        for index in range(3):
            loop.answer([0.1 * index])
            if index == 1:
                loop.skip()
            else:
                loop.learn(truth)
        assert steps == ([3] if truth == 1.0 else [1, 3])  # the first number has nothing to be compared with


def test_the_best_rate_answers():
    series, order = wave(60), Order()
    bank = loop_of(numbers(), lr=[0.0, 1e-2], scores=order)
    weights = [list(learner.model.parameters()) for learner in bank.bank.learners]
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    alone = [run(loop_of(numbers(), lr=[rate]), series) for rate in (0.0, 1e-2)]
    together, chosen, sums = [], [], np.zeros(2)
    for t in range(60):
        chosen.append(int(sums.argmin()))
        together.append(bank.answer([series[t]]))
        bank.learn(series[t + 1])
        sums = 0.999 * sums + [abs(answers[t] - series[t + 1]) for answers in alone]
    assert together == [alone[i][t] for t, i in enumerate(chosen)]
    assert order.errors == [abs(answer - truth) for answer, truth in zip(together, series[1:], strict=True)]
    assert set(chosen) == {0, 1}


def test_an_answer_is_scored_as_it_was_given_though_the_best_rate_changes_before_its_truth():
    series, order = wave(60), Order()
    loop, answers, changed = loop_of(numbers(), lr=[0.0, 1e-2], scores=order), [], 0
    for t in range(60):
        answers.append(loop.answer([series[t]]))
        if t >= 3:
            changed += loop.bank.best != loop.queue[0].best
            loop.learn(series[t - 2])
    assert changed
    expected = [abs(answer - truth) for answer, truth in zip(answers[:57], series[1:58], strict=True)]
    np.testing.assert_allclose(order.errors, expected, rtol=1e-15)


def test_a_bank_goes_on_with_the_learner_that_answered_though_another_is_best():
    """A sample that waits is scored by its own answer, also in a stored loop; `peek` is of the best learner."""
    series, order = wave(40), Order()
    first, second = (loop_of(numbers(), lr=[0.0, 1e-2], scores=scores) for scores in (None, order))
    while not first.queue or first.queue[0].best != 1:
        if first.queue:
            first.learn(series[first.count])
        answer = first.answer([series[first.count]])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for loop in (first, second):
        loop.learn(answer)
    assert order.errors == [0.0]
    assert first.bank.best == 1
    assert first.peek([0.3]) == first.answer([0.3])


def test_a_learner_of_a_bank_that_diverges_answers_no_more():
    loop = loop_of(numbers(), lr=[1e-2, 1e38])
    answers = run(loop, wave(20))
    assert np.isfinite(answers[-5:]).all()
    assert math.isinf(loop.bank.sums[1])
    with pytest.raises(DivergenceError, match="try a smaller rate"):
        run(loop_of(numbers(), lr=[1e38]), wave(20))


def test_odd_samples_change_nothing():
    loop = loop_of(numbers())
    run(loop, wave(3))
    for call, message in (
        (lambda: loop.answer([1.0, 2.0]), r"shape \(2,\), expected \(1,\)"),
        (lambda: loop.answer([math.inf]), "inf, expected finite"),
        (lambda: loop.learn(1.0), "no sample waits"),
    ):
        with pytest.raises(DataError, match=message):
            call()
    twin = loop_of(numbers())
    run(twin, wave(3))
    assert loop.answer([0.3]) == twin.answer([0.3])
    for odd, message in (
        (math.nan, "expected a finite"),
        ("x", "expected a number"),
        ([1, 2], "2 numbers, expected 1"),
    ):
        with pytest.raises(DataError, match=message):
            loop.learn(odd)
    loop.learn(0.5)
    twin.learn(0.5)
    assert loop.answer([0.1]) == twin.answer([0.1])


def test_classes_are_known_once_they_have_been_seen():
    loop = loop_of(AnswerClass(3, feedback=True))
    assert loop.answer([0.0]) == {}
    loop.learn("b")
    assert loop.answer([0.0]) == {"b": 1.0}
    loop.learn("a")
    answer = loop.answer([0.0])
    assert list(answer) == ["b", "a"]
    assert math.isclose(sum(answer.values()), 1)
    loop.learn("c")
    loop.answer([0.0])
    with pytest.raises(DataError, match="'d', a class beyond the 3 of before"):
        loop.learn("d")
    for missing in (None, math.nan, np.float32("nan")):
        with pytest.raises(DataError, match="expected a class"):
            loop_of(AnswerClass(3, feedback=False)).kind.read(missing)


def test_peek_changes_nothing():
    loop = loop_of(numbers())
    run(loop, wave(5))
    first = loop.peek([0.7])
    assert loop.peek([0.7]) == first == loop.answer([0.7])


def test_answers_have_no_dropout():
    loop = loop_of(AnswerClass(2, feedback=False), dropout=0.5)
    for truth in "ab":
        loop.answer([0.5])
        loop.learn(truth)
    assert len({loop.peek([0.7])["a"] for _ in range(4)}) == 1
    assert loop.bank.learners[0].model.training


def test_scaling_is_the_mean_and_variance_of_the_past():
    values = np.random.default_rng(0).normal(3, 2, (50, 2))
    values[7, 1] = np.nan
    scaling = Scaling(2, 10_000)
    for t, x in enumerate(values):
        scaling.update(x)
        past = values[: t + 1]
        np.testing.assert_allclose(scaling.mean, np.nanmean(past, 0), rtol=1e-12)
        np.testing.assert_allclose(scaling.variance, np.nanvar(past, 0), rtol=1e-9, atol=1e-12)
    assert np.isnan(scaling.scaled(np.array([0, np.nan])))[1]
    assert scaling.scaled(np.array([1e9, 0]))[0] == MAX_DEVIATION


def test_after_the_span_the_past_fades():
    """With a span of 2 a number has half of the weight."""
    scaling = Scaling(1, 2)
    for x in (0.0, 4.0, 8.0):
        scaling.update(np.array([x]))
    assert (scaling.mean[0], scaling.variance[0]) == (5, 11)


def test_the_scale_is_the_root_of_the_mean_square_of_what_the_base_leaves():
    innovation = Innovation(1, 10)
    for y in (7.0, 3.0, 1.0):  # the first has nothing to be compared with
        innovation.update(np.array([y]), np.zeros(1), None)
    assert innovation.scale[0] == np.sqrt((9 + 1) / 2)


def test_an_outlier_is_learnt_as_the_largest_deviation():
    innovation = Innovation(1, 10_000)
    for t in range(400):
        innovation.update(np.array([(-1.0) ** t]), np.zeros(1), None)
    assert innovation.update(np.array([1e9]), np.zeros(1), None) == MAX_DEVIATION  # sqrt(400) of their root mean square


def test_the_last_truth_is_an_input_in_units_of_the_deviation():
    kind = numbers(feedback=True)
    assert np.isnan(kind.truths.as_input()).all()
    for truth in (1.0, 3.0):
        kind.truths.target(kind.read(truth), kind.truths.frame())
    assert kind.truths.as_input() == [1.0]


@pytest.mark.parametrize(("rho", "low", "high"), [(0.0, -0.1, 0.2), (1.0, 0.9, 1.0)])
def test_the_base_is_the_mean_or_the_last_value(rho, low, high):
    draw, y, last, innovation = np.random.default_rng(1), np.zeros(1), None, Innovation(1, 10_000)
    for _ in range(2000):
        y = rho * y + draw.normal(size=1)
        innovation.update(y, innovation.base(last), last)
        last = y
    slope = innovation.base(innovation.last_mean + 1) - innovation.base(innovation.last_mean)
    assert low <= slope[0] <= high


def test_memory_does_not_grow():
    """600 further samples leave as many objects, and as many tensors, as were there after those that compile."""
    loop, counts = loop_of(numbers(), block=50), []
    for samples in (300, 600):
        run(loop, wave(samples))
        gc.collect()
        objects = gc.get_objects()
        counts.append((len(objects), sum(type(each) is torch.Tensor for each in objects)))
        del objects
    assert counts[1][1] == counts[0][1]
    assert counts[1][0] - counts[0][0] < 50


def test_least_squares_learn_from_a_stream_and_go_on_after_what_would_be_compiled():
    """No parameter has a gradient: against recursive least squares with the features of the model."""
    loop = loop_of(numbers(), layer="elman", algorithm="force", algorithm_options={"penalty": 0.1}, compile_after=3)
    before = {name: each.clone() for name, each in loop.bank.learners[0].model.named_parameters()}
    run(loop, wave(20))
    model = loop.bank.learners[0].model
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {"head.weight", "head.bias"}


def test_an_algorithm_that_cannot_learn_from_the_stream_is_refused_before_it_is_read():
    with pytest.raises(ConfigError, match=r"force: batch\.targets is torch\.int64"):
        loop_of(AnswerClass(3, False), layer="elman", algorithm="force")
