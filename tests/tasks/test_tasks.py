"""Synthetic tasks: examples as specified, solvable, no better guessed than claimed; trained, resumed, scored."""

import csv
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from making.filling import DOCS, filled
from scanl import tasks
from scanl.cli import main
from scanl.cli.train import prepare
from scanl.data.questions import Class, FeatureInputs, Flags, Number, Numbers, TokenLabel
from scanl.errors import ConfigError
from scanl.layers.state import cat, leaves
from scanl.learning import RunFolder, TrainConfig, score
from scanl.learning.evaluation import measure
from scanl.learning.questions import answerer
from scanl.learning.run.config import seeded_model
from scanl.options import options
from scanl.tasks import IGNORED, FreshExamples, listops, phonebook
from scanl.tasks.base import draw_distinct

COVERS = ["cli/tasks", "tasks/*"]

SMALL = {  # options with which a sample shows every answer often
    "adding": {"length": 7},
    "associative_recall": {"length": 10, "vocab_size": 9},
    "capacity": {"length": 20},
    "copy": {"length": 5, "num_symbols": 3},
    "copy_vectors": {"length": 4, "width": 3},
    "formal_language": {"length": 6},
    "induction": {"length": 9},
    "irregular": {"length": 7},
    "listops": {"length": 60, "least": 8},
    "mqar": {"length": 20, "vocab_size": 24},
    "parity": {"length": 6},
    "pass_key": {"length": 70},
    "phonebook": {"length": 3},
    "segments": {"length": 5},
    "selective_copy": {"length": 8, "num_symbols": 4},
    "t_maze": {"length": 6, "distractors": 2},
    "task_2b": {"length": 6, "width": 5},
    "word_problem": {"length": 6},
}
# Where an answer is likelier than another, or chance is measured. Those have tests of their own.
UNEVEN = {"capacity", "listops", "phonebook"}
STEPS = {  # of a length n, where they are not n and a number that does not depend on n
    "capacity": lambda n: 5 * n // 2,
    "copy_vectors": lambda n: 2 * n,
    "segments": lambda n: 2 * n,
    "phonebook": lambda n: phonebook.MAX_LINE_LENGTH * (n + 3),
}
LONGER = {  # than the default, or shorter where the default is long
    "selective_copy": {"length": 100},
    "listops": {"length": 200, "least": 40},
    "t_maze": {"length": 100},
    "task_2b": {"length": 90},
}
TINY = "--accelerator cpu --layer lru --dim 16 --depth 1 --steps 24 --eval-examples 8 --log-every 1".split()  # noqa: SIM905
each_task = pytest.mark.parametrize("name", tasks.names())
SOME = {"adding", "capacity", "copy_vectors", "listops", "parity", "pass_key", "selective_copy"}  # of each question


def small(name: str) -> tasks.Task:
    return tasks.build(name, **SMALL[name])


def asked(task: tasks.Task, targets: np.ndarray) -> np.ndarray:
    return targets[~np.isnan(targets)] if targets.dtype == np.float32 else targets[targets != IGNORED]


def assert_best(task: tasks.Task, scores: np.ndarray) -> None:
    """Tokens are right. Numbers are rounded to float32, as the inputs are, and so is what is found from them."""
    whole = task.best == 1
    np.testing.assert_allclose(scores, task.best, rtol=0, atol=0 if whole else (64 * 2.0**-24) ** 2)


# Examples.


VARIANTS = {
    **{f"segments_{kind}": tasks.build("segments", length=5, kind=kind) for kind in ("copy", "retrieve")},
    "cycle_navigation": tasks.build("formal_language", length=7, language="cycle_navigation"),
    "even_arithmetic": tasks.build("formal_language", length=8, language="modular_arithmetic"),
    "odd_arithmetic": tasks.build("formal_language", length=9, language="modular_arithmetic"),
    "t_maze_without_distractors": tasks.build("t_maze", length=1, distractors=0),
    "task_2b_without_the_first": tasks.build("task_2b", length=9, width=3, exclude_first=True),
    "mqar_with_zeros": tasks.build("mqar", length=20, vocab_size=24, random_non_queries=False),
    "irregular_without_a_drop": tasks.build("irregular", length=7, keep=1.0),
    "irregular_of_a_quarter": tasks.build("irregular", length=9, keep=0.25),
    "parity_at_the_last_step": tasks.build("parity", length=6, last_only=True),
    "associative_recall_of_ten_tokens": tasks.build("associative_recall", length=20, vocab_size=10),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_solver_is_right_of_variants_too(name):
    task = VARIANTS[name]
    inputs, targets, *_ = task.generate(200, 0)
    assert_best(task, task.scores(task.solve(inputs), targets))


def test_what_fills_the_rest_of_mqar_is_an_option():
    """The same pairs and queries; every other step after the pairs is 0, or one of all tokens."""
    empty, full = VARIANTS["mqar_with_zeros"], small("mqar")
    inputs, targets, *_ = empty.generate(500, 0)
    rest = (targets == IGNORED) & (np.arange(empty.length) >= 2 * empty.num_pairs)
    assert not inputs[rest].any()
    assert inputs[~rest].all()
    inputs, targets, *_ = full.generate(500, 0)
    rest = (targets == IGNORED) & (np.arange(full.length) >= 2 * full.num_pairs)
    assert set(inputs[rest].tolist()) == set(range(24))


def test_parity_may_be_asked_for_at_the_last_step_alone():
    every, last = small("parity").generate(100, 0), VARIANTS["parity_at_the_last_step"].generate(100, 0)
    np.testing.assert_array_equal(every.inputs, last.inputs)
    np.testing.assert_array_equal(every.targets[:, -1], last.targets[:, -1])
    assert (last.targets[:, :-1] == IGNORED).all()


def test_what_is_seen_in_the_t_maze():
    """The sign at the first place alone, a code of which one bit changes from place to place, and noise after it."""
    inputs, targets, *_ = tasks.build("t_maze", length=256, distractors=3).generate(200, 0)
    assert inputs.shape == (200, 256, 13)
    np.testing.assert_array_equal(inputs[:, 0, :2], np.where(targets[:, None] == 0, [0, 1], [1, 0]))
    assert not inputs[:, 1:, :2].any()
    code = inputs[0, :, 2:10]
    assert (np.abs(np.diff(code, axis=0)).sum(1) == 1).all()
    assert code[:5, 5:].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 1, 0], [1, 1, 0]]
    assert (inputs[:, :, 2:10] == code).all()
    assert not inputs[:, 0, 10:].any()
    assert 0.45 < inputs[:, 1:, 10:].mean() < 0.55


def test_the_two_forms_of_associative_recall_leave_the_chances_of_their_tables():
    assert tasks.build("associative_recall").chance == 1 / 9
    assert VARIANTS["associative_recall_of_ten_tokens"].chance == 1 / 4


@each_task
def test_the_solver_is_always_right(name):
    for task in (small(name), tasks.build(name, **LONGER.get(name, {}))):
        for seed in range(3):
            inputs, targets, *_ = task.generate(20, seed)
            scores = task.scores(task.solve(inputs), targets)
            assert len(scores) == len(asked(task, targets)) >= 20
            assert_best(task, scores)


@each_task
def test_a_wrong_answer_is_seen(name):
    task = small(name)
    inputs, targets, *_ = task.generate(50, 0)
    wrong = task.solve(inputs)
    wrong[0] += 1
    assert task.scores(wrong, targets).mean() != task.best
    wrong = task.solve(inputs)
    if targets.shape == inputs.shape:  # what is not asked for does not matter
        wrong[targets == IGNORED] += 1
        assert task.scores(wrong, targets).mean() == task.best


@each_task
def test_chance_is_what_a_guesser_gets(name):
    """Guesses that know which answers there are but not the inputs; the bounds are of 4 standard errors."""
    if name in UNEVEN:
        pytest.skip("an answer is likelier than another")
    task = small(name)
    _, targets, *_ = task.generate(20_000, 1)
    wanted = asked(task, targets)
    if task.metric != "accuracy":
        scores = task.scores(np.full_like(targets, round(wanted.mean())), targets)
        assert abs(scores.mean() - task.chance) < 4 * scores.std() / math.sqrt(len(scores))
        if task.metric == "mean squared error":
            mean = np.full_like(targets, wanted.mean())
            assert task.scores(mean, targets).mean() == pytest.approx(task.chance, rel=0.05)
        return
    answers = np.unique(wanted)
    guesses = np.random.default_rng(0).choice(answers, targets.shape)
    scores = task.scores(guesses, targets)
    error = math.sqrt(task.chance * (1 - task.chance))
    assert abs(scores.mean() - task.chance) < 4 * error / math.sqrt(len(scores))
    # Nor is an answer likelier than another at any step, which a constant guess would gain from.
    columns = targets.reshape(len(targets), -1)
    for step in np.flatnonzero((columns != IGNORED).sum(0) > 1000):
        column = columns[:, step][columns[:, step] != IGNORED]
        often = np.bincount(column, minlength=answers.max() + 1)[answers] / len(column)
        assert abs(often - task.chance).max() < 5 * error / math.sqrt(len(column))


@each_task
def test_examples_have_the_shapes_and_values_they_promise(name):
    task = tasks.build(name, **LONGER.get(name, {}))
    inputs, targets, *_ = batch = task.generate(4, 5)
    question = task.question
    if isinstance(question.inputs, FeatureInputs):
        assert inputs.dtype == np.float32
        assert inputs.shape[2] == question.inputs.count
    else:
        assert inputs.dtype == np.int64
        assert inputs.max() < question.inputs.size
        assert inputs.min() >= 0 or (batch.mask is not None and inputs.min() == IGNORED)
    answers = targets[targets != IGNORED]
    if isinstance(question, TokenLabel | Class):
        assert targets.dtype == np.int64
        assert targets.shape == (inputs.shape if isinstance(question, TokenLabel) else (4,))
        assert answers.min() >= 0
        assert answers.max() < (question.classes if isinstance(question, Class) else question.inputs.size)
    else:
        assert targets.dtype == np.float32
        assert targets.shape == ((4,) if isinstance(question, Number) else (*inputs.shape[:2], question.count))
    longer = replace(task, length=2 * task.length).generate(3, 5).inputs
    steps = STEPS.get(name, lambda n: n)
    assert longer.shape[1] == inputs.shape[1] + steps(2 * task.length) - steps(task.length)
    assert [len(part) for part in task.generate(0, 0) if part is not None][:2] == [0, 0]


@each_task
def test_a_seed_gives_the_same_examples(name):
    task = small(name)
    one, same, other = (task.generate(30, seed) for seed in ((1, 2), (1, 2), (1, 3)))
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))


@each_task
def test_processes_share_the_batch_of_one_and_steps_share_nothing(name):
    order = FreshExamples(small(name), seed=3)
    for size, world, step in itertools.product((1, 3), (1, 2, 3), (0, 7)):
        whole = order.batch(step, size * world)
        parts = [order.batch(step, size, rank, world) for rank in range(world)]
        joined = cat([part.tensors() for part in parts])
        for (_, part), (_, expected) in zip(leaves(joined), leaves(whole.tensors()), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
    steps = [order.batch(step, 40).inputs for step in range(3)] + [FreshExamples(small(name), 4).batch(0, 40).inputs]
    assert not any(np.array_equal(one, other) for one, other in itertools.combinations(steps, 2))


def test_adding_marks_one_step_of_each_half():
    inputs, targets, *_ = tasks.build("adding", length=7).generate(7000, 0)
    numbers, marks = inputs[..., 0], inputs[..., 1]
    np.testing.assert_array_equal(np.unique(marks), [0, 1])
    np.testing.assert_array_equal(marks[:, :3].sum(1), 1)
    np.testing.assert_array_equal(marks[:, 3:].sum(1), 1)
    np.testing.assert_allclose(marks.mean(0), [1 / 3] * 3 + [1 / 4] * 4, atol=4 * 0.5 / math.sqrt(7000))
    assert 0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    np.testing.assert_array_equal(targets, (numbers * marks).sum(1))


def test_irregular_keeps_half_of_the_samples_of_a_wave():
    inputs, targets, *_ = tasks.build("irregular", length=8).generate(4000, 0)
    times = inputs[..., 2].cumsum(1)
    np.testing.assert_array_equal(inputs[:, :, 1], [[0] * 7 + [1]] * 4000)
    np.testing.assert_array_equal(inputs[:, -1, 0], 0)
    assert inputs[..., 2].min() == 1
    often = np.bincount(times.astype(int).ravel(), minlength=17)[1:] / 4000
    np.testing.assert_allclose(often, [0.5] * 16, atol=4 * 0.5 / math.sqrt(4000))
    np.testing.assert_allclose(np.append(inputs[:, :-1, 0], targets).var(), 1, atol=0.1)
    assert (np.diff(tasks.build("irregular", keep=1.0).generate(3, 0).inputs[..., 2]) == 0).all()


@pytest.mark.parametrize(("layer", "timed"), [("cfc", True), ("lru", True), ("gru", False), ("lru,gru", False)])
def test_durations_reach_a_stack_whose_layers_all_take_them(layer, timed, monkeypatch):
    """Other stacks read them as an input, and answer as they do without."""
    config = config_of("irregular", layer=layer, depth=2)
    model, task = seeded_model(config, config.open_source().question), small("irregular")
    seen, forward = [], model.stack.forward
    monkeypatch.setattr(
        model.stack, "forward", lambda *args, **kw: (seen.append(kw["timespans"]), forward(*args, **kw))[1]
    )
    batch = task.generate(3, 0).tensors()
    answerer(task.question).answers(model, batch)
    assert model.stack.timed == timed
    assert len(seen) == 1
    if timed:
        assert torch.equal(seen[0], batch.inputs[..., 2])
    else:
        assert seen == [None]


def test_copy_is_symbols_blanks_markers():
    inputs, targets, *_ = tasks.build("copy", length=6, num_symbols=3).generate(500, 0)
    assert inputs.shape == (500, 12)
    np.testing.assert_array_equal(np.unique(inputs[:, :3]), range(1, 9))
    np.testing.assert_array_equal(inputs[:, 3:9], 0)
    np.testing.assert_array_equal(inputs[:, 9:], 9)
    np.testing.assert_array_equal(targets[:, :9], IGNORED)
    np.testing.assert_array_equal(targets[:, 9:], inputs[:, :3])


def test_vectors_are_copied_after_the_mark_and_the_exam_has_the_longest():
    task = tasks.build("copy_vectors", length=3, width=2)
    inputs, targets, *_ = task.generate(3000, 0)
    marks = inputs[..., -1]
    lengths = marks.argmax(1)
    np.testing.assert_array_equal(marks.sum(1), 1)
    np.testing.assert_allclose(np.bincount(lengths)[1:] / 3000, [1 / 3] * 3, atol=4 * 0.5 / math.sqrt(3000))
    for row, answer, n in zip(inputs[:50], targets[:50], lengths[:50], strict=True):
        np.testing.assert_array_equal(answer[n + 1 : 2 * n + 1], row[:n, :2])
        assert np.isnan(answer[: n + 1]).all()
        assert np.isnan(answer[2 * n + 1 :]).all()
        assert not row[n + 1 :].any()
    assert set(task.exam.generate(100, 0).inputs[..., -1].argmax(1)) == {3}


def test_selective_copy_scatters_the_symbols_evenly():
    inputs, targets, *_ = tasks.build("selective_copy", length=8, num_symbols=4).generate(6000, 0)
    assert inputs.shape == (6000, 16)
    body = inputs[:, :12]
    np.testing.assert_array_equal((body > 0).sum(1), 4)
    np.testing.assert_allclose((body > 0).mean(0), 4 / 12, atol=4 * 0.5 / math.sqrt(6000))
    np.testing.assert_array_equal(np.unique(body), range(15))
    np.testing.assert_array_equal(inputs[:, 12:], 15)
    np.testing.assert_array_equal(targets[:, 12:].ravel(), body[body > 0])
    np.testing.assert_array_equal(targets[:, :12], IGNORED)


def test_induction_shows_the_special_token_once_before_it_asks():
    inputs, targets, *_ = tasks.build("induction", length=9).generate(7000, 0)
    np.testing.assert_array_equal(inputs[:, -1], 15)
    special = inputs[:, :-1] == 15
    np.testing.assert_array_equal(special.sum(1), 1)
    np.testing.assert_allclose(special.mean(0), [1 / 7] * 7 + [0], atol=4 * 0.35 / math.sqrt(7000))
    np.testing.assert_array_equal(np.unique(inputs[:, :-1][~special]), range(15))
    np.testing.assert_array_equal(targets[:, :-1], IGNORED)


def test_associative_recall_asks_for_a_key_that_was_seen():
    inputs, targets, *_ = tasks.build("associative_recall").generate(900, 0)
    assert inputs.shape == (900, 42)
    keys, values = inputs[:, :40:2], inputs[:, 1:40:2]
    np.testing.assert_array_equal(np.unique(keys), range(9))
    np.testing.assert_array_equal(np.unique(values), range(9, 18))
    np.testing.assert_array_equal(inputs[:, 40], 19)
    np.testing.assert_array_equal(targets[:, :-1], IGNORED)
    for row, question, wanted in zip(inputs[:, :40].reshape(900, 20, 2), inputs[:, -1], targets[:, -1], strict=True):
        pairs = dict(row.tolist())
        assert len(set(map(tuple, row.tolist()))) == len(pairs)  # a key has one value
        assert pairs[question] == wanted


def test_mqar_asks_for_each_key_once_at_even_places():
    task = tasks.build("mqar", length=24, num_pairs=4, vocab_size=64)
    inputs, targets, *_ = task.generate(3000, 0)
    keys, values = np.sort(inputs[:, :8:2]), np.sort(inputs[:, 1:8:2])
    assert (np.diff(keys) > 0).all()
    assert (np.diff(values) > 0).all()
    np.testing.assert_array_equal(np.unique(keys), range(1, 32))
    np.testing.assert_array_equal(np.unique(values), range(32, 64))
    rows, places = np.nonzero(targets != IGNORED)
    np.testing.assert_array_equal(np.bincount(rows), 4)
    assert set(places) == set(range(8, 24, 2))
    np.testing.assert_array_equal(np.sort(inputs[rows, places].reshape(-1, 4)), keys)
    np.testing.assert_array_equal(np.unique(inputs[:, 8:][targets[:, 8:] == IGNORED]), range(64))
    often = np.bincount((places - 8) // 2) / 3000
    assert (np.diff(often) < 0).all()  # nearer queries are likelier


def test_mqar_asks_soon_with_the_power_of_the_paper():
    """One pair: query i is drawn with probability in proportion to (i + 1)^(0.01 - 1)."""
    _, targets, *_ = tasks.build("mqar", length=20, num_pairs=1, vocab_size=64).generate(20_000, 0)
    often = (targets != IGNORED).mean(0)[2::2]
    expected = np.arange(1, 10) ** -0.99
    expected /= expected.sum()
    assert (abs(often - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000)).all()


def test_distinct_draws_are_those_without_replacement():
    """The first of a draw follows the weights; the second what they are without it."""
    weights = np.array([8.0, 4.0, 2.0, 1.0])
    drawn = draw_distinct(np.random.default_rng(0), 40_000, 4, 2, weights)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = np.bincount(drawn[:, 0]) / len(drawn)
    np.testing.assert_allclose(first, weights / 15, atol=4 * 0.5 / 200)
    second = drawn[drawn[:, 0] == 0, 1]
    often = np.bincount(second, minlength=4) / len(second)
    np.testing.assert_allclose(often, [0, 4 / 7, 2 / 7, 1 / 7], atol=4 * 0.5 / math.sqrt(len(second)))
    # Each a thousand times as likely as the next: hardly ever drawn in another order.
    order = np.random.default_rng(0).permutation(400)
    drawn = draw_distinct(np.random.default_rng(1), 50, 400, 80, 1000.0 ** -order.argsort().clip(max=99))
    assert (drawn == order[:80]).mean() > 0.99


def test_parity_is_the_running_sum_modulo_two():
    inputs, targets, *_ = tasks.build("parity", length=30).generate(50, 0)
    np.testing.assert_array_equal(inputs.cumsum(1) % 2, targets)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("addign", {}, "unknown task 'addign'; did you mean 'adding'?"),
        ("adding", {"lenght": 5}, "unknown option of adding 'lenght'; did you mean 'length'?"),
        ("adding", {"length": 1}, "adding: length is 1, expected at least 2 because two numbers are added"),
        ("adding", {"length": "long"}, "adding: length is 'long', expected an integer"),
        ("adding", {"length": True}, "adding: length is True, expected an integer"),
        ("adding", {"vocab_size": 3}, "unknown option of adding 'vocab_size'"),
        ("parity", {"vocab_size": 3}, "unknown option of parity 'vocab_size'"),
        ("parity", {"length": 0}, "parity: length is 0, expected at least 1"),
        ("copy", {"length": -1}, "copy: length is -1, expected at least 0 blanks"),
        ("copy", {"num_symbols": 0}, "copy: num_symbols is 0, expected at least 1"),
        ("copy", {"vocab_size": 2}, "copy: vocab_size is 2, expected at least 3 because of the blank and the marker"),
        ("selective_copy", {"length": -1}, "selective_copy: length is -1, expected at least 0 noise tokens"),
        ("selective_copy", {"num_symbols": 0}, "selective_copy: num_symbols is 0, expected at least 1"),
        ("selective_copy", {"vocab_size": 2}, "expected at least 3 because of the noise and the marker"),
        ("irregular", {"length": 4}, "irregular: length is 4, expected at least 5 because four samples determine"),
        ("irregular", {"keep": 0}, "irregular: keep is 0, expected above 0 and at most 1"),
        ("irregular", {"keep": 1.5}, "irregular: keep is 1.5, expected above 0 and at most 1"),
        (
            "induction",
            {"length": 2},
            "induction: length is 2, expected at least 3 because of the pair and the question",
        ),
        ("induction", {"vocab_size": 1}, "vocab_size is 1, expected at least 2 because of the special token"),
        (
            "associative_recall",
            {"length": 5},
            "length is 5, expected an even number of at least 2 because of the pairs",
        ),
        ("associative_recall", {"vocab_size": 3}, "vocab_size is 3, expected at least 4 because of a key, a value and"),
        ("mqar", {"length": 9}, "mqar: length is 9, expected an even number of at least 4"),
        (
            "mqar",
            {"vocab_size": 9},
            "mqar: vocab_size is 9, expected an even number of at least 4 because half are keys",
        ),
        ("mqar", {"num_pairs": 17}, "mqar: num_pairs is 17, expected from 1 to 16 because of length=64 and vocab_size"),
        ("mqar", {"power": 0}, "mqar: power is 0, expected above 0"),
        ("pass_key", {"length": 65}, "pass_key: length is 65, expected at least 66 because of the sentence and the"),
    ],
)
def test_options_out_of_range_are_refused(name, given, message):
    with pytest.raises(ConfigError) as refused:
        tasks.build(name, **given)
    assert message in str(refused.value)


@each_task
def test_a_task_says_where_it_is_from_and_stays_as_it_is(name):
    task = tasks.build(name)
    assert type(task) is tasks.get(name)
    assert (task.name, task.id[:2], len(task.source) > 20) == (name, "B-", True)
    assert name in SMALL
    for option in options(type(task)).values():
        assert f"{option.name}:" in (type(task).__doc__ or "")
    with pytest.raises(FrozenInstanceError):
        task.length = 3  # type: ignore[misc]


# Training.


def config_of(name: str, **given) -> TrainConfig:
    small = {"data_options": SMALL[name], "layer": "lru", "dim": 8, "depth": 1, "batch_size": 4, "accelerator": "cpu"}
    return TrainConfig.of(data=[name], **{**small, **given})


@each_task
def test_the_loss_is_that_of_what_is_asked_for(name):
    config = config_of(name)
    question = config.open_source().question
    model, source = seeded_model(config, question), config.open_source()
    inputs, targets, mask, timespans, *_ = batch = source.batch(5, 4).tensors()
    found, _ = answerer(source.question).loss(model, batch)
    outputs = None if mask is not None else model(inputs)[0]
    if isinstance(source.question, Number):
        last = model.stack(model.input(inputs), timespans=timespans)[0][:, -1]
        expected = F.mse_loss(model.head.mean(model.head(last))[:, 0], targets)
    elif isinstance(source.question, Numbers):
        expected = F.mse_loss(outputs[targets.isfinite()], targets[targets.isfinite()])
    elif isinstance(source.question, Flags):
        known = targets.isfinite()
        expected = F.binary_cross_entropy_with_logits(outputs[known], targets[known])
    elif isinstance(source.question, Class):
        rows = [row if mask is None else row[mask[i]] for i, row in enumerate(inputs)]
        expected = F.cross_entropy(torch.cat([model(row[None])[0] for row in rows]), targets)
    else:
        expected = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(found, expected)
    for (_, again), (_, same) in zip(leaves(source.batch(5, 4).tensors()), leaves(batch), strict=True):
        torch.testing.assert_close(again, same, rtol=0, atol=0, equal_nan=True)


@each_task
def test_scoring_in_chunks_is_scoring_the_whole(name):
    task, model = small(name), seeded_model(config_of(name), small(name).question).train()
    lengths = []
    model.stack.register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))

    def found(count: int, seed: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            outputs, wanted, _ = answerer(task.question).answers(model, task.generate(count, seed).tensors())
        scores = {
            "accuracy": lambda: (outputs.argmax(-1) == wanted).double(),
            "bit error": lambda: ((outputs > 0).double() - wanted).abs(),
            "mean squared error": lambda: (outputs - wanted) ** 2,
        }
        return scores[task.metric]().tolist()

    whole = np.mean(found(30, (7, 0)))
    longest = lengths.pop()
    assert score(model, task, 30, (7,), chunk=2) == pytest.approx(whole)
    assert max(lengths) <= (30 * 2 if task.generate(1, 0).mask is not None else 2) < longest  # padded rows are packed
    assert score(model, task, 30, (7,), chunk=longest) == pytest.approx(whole)  # the last step ends a chunk
    assert model.training
    # Ten examples of which four fit at once are three parts, none like another.
    parts = [value for part, count in enumerate((4, 4, 2)) for value in found(count, (7, part))]
    assert score(model, task, 10, (7,), tokens=4 * task.generate(1, 0).length + 1) == pytest.approx(np.mean(parts))


def test_a_bidirectional_model_reads_a_task_in_one_piece():
    config = config_of("adding", layer="bidirectional", layer_options={"layer": "lru"}, depth=2)
    model, task = seeded_model(config, config.open_source().question), small("adding")
    assert score(model, task, 5, (0,), chunk=2) == score(model, task, 5, (0,), chunk=99)


def test_what_is_measured_is_never_trained_on(monkeypatch):
    seeds = []
    generate = tasks.Task.generate

    def record(self, count, seed):
        seeds.append(seed)
        return generate(self, count, seed)

    config = config_of("parity", seed=1)
    source = config.open_source()
    model = seeded_model(config, source.question)
    monkeypatch.setattr(tasks.Task, "generate", record)
    for step in range(20):
        source.batch(step, 4)
    trained = set(seeds)
    seeds.clear()
    for step in range(20):
        measure(model, source, source.unseen(step))
    assert len(trained) == 20
    assert trained.isdisjoint(seeds)
    assert {seed[1] for seed in trained} & {seed[1] for seed in seeds} == set()


@each_task
def test_the_fingerprint_of_a_task_is_of_what_is_asked_and_of_the_answer(name, monkeypatch):
    found, generate = [config_of(name).open_source().digest()], tasks.Task.generate
    for part in ("inputs", "targets"):

        def other(self, count, seed, part=part):
            examples = generate(self, count, seed)
            return examples._replace(**{part: getattr(examples, part) + 1})

        with monkeypatch.context() as patch:
            patch.setattr(tasks.Task, "generate", other)
            found.append(config_of(name).open_source().digest())
    assert len(set(found)) == 3


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def task_options(name: str) -> list[str]:
    given = [f"--data-options.{option}={value}" for option, value in SMALL[name].items()]
    return [*TINY, "--data", name, *given]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An uninterrupted run of a task, trained when first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def trained(name: str) -> Path:
        if not (folder / name).exists():
            assert main(["train", *task_options(name), "--out", str(folder / name)]) == 0
        return folder / name

    return trained


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SOME)) for name in tasks.names()]
)
def test_a_task_is_trained_scored_and_scored_at_another_length(name, runs, capfd):
    folder = runs(name)
    assert {path.name for path in folder.iterdir()} - {"classes.png"} == {
        "config.yaml", "metrics.csv", "loss.png", "model.safetensors", "checkpoint.ckpt"
    }  # fmt: skip
    found = rows(folder)
    assert [int(row["step"]) for row in found] == list(range(1, 25))
    assert len([row for row in found if row["score"]]) == 10
    assert found[-1]["score"]
    capfd.readouterr()
    model = RunFolder.open(folder).load_model()
    other = 90 if name == "pass_key" else 22  # a text with a pass key has at least 66 bytes
    for extra, count, length in (
        ([], 1000, SMALL[name]["length"]) if name == "parity" else (["--count", "40"], 40, SMALL[name]["length"]),
        (["--length", str(other), "--count", "7"], 7, other),
    ):
        assert main(["eval", str(folder), *extra]) == 0
        lines = capfd.readouterr().out.splitlines()
        task = replace(small(name), length=length).exam
        assert lines[0].startswith(f"{task.metric} on {count:,} fresh examples of {name} length={length}")
        expected = {"this model": score(model, task, count, (0, 2)), "chance": task.chance, "best": task.best}
        assert lines[1:] == [f"  {title:<12}{value:.4g}" for title, value in expected.items()]


def test_the_progress_line_shows_the_score(runs, tmp_path, capfd):
    assert main(["train", *task_options("parity"), "--out", str(tmp_path / "run")]) == 0
    shown = capfd.readouterr()
    last, next_command = shown.err.splitlines()[-2:]
    assert next_command.startswith("next: scanl inspect ")
    assert "step 24/24  loss " in last
    assert f"held-out accuracy {float(rows(tmp_path / 'run')[-1]['score']):.4g} (chance 0.5)" in last
    assert "bits per" not in shown.err
    assert "accuracy on 8 fresh examples of parity length=6" in shown.out


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("adding", "interrupted"),
        ("mqar", "killed"),
        pytest.param("adding", "killed", marks=pytest.mark.long),
        pytest.param("mqar", "interrupted", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(name, how, runs, tmp_path, capfd):
    from scanl.learning.run.module import Learning

    alone, folder, step = runs(name), tmp_path / "run", Learning.training_step

    def stopped_step(self, batch, batch_idx):
        if self.global_step == 9:
            if how == "killed":
                raise RuntimeError("killed")
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learning, "training_step", stopped_step)
        begin = ["train", *task_options(name), "--out", str(folder), "--save-seconds", "0"]
        if how == "killed":
            with pytest.raises(RuntimeError, match="killed"):
                main(begin)
        else:
            assert main(begin) == 130
            assert "interrupted after step 10; saved. Go on with:" in capfd.readouterr().err
    assert not (folder / "model.safetensors").exists() or how == "interrupted"
    assert main(["train", "--resume", str(folder), "--save-seconds", "30"]) == 0
    expected, found = (load_file(path / "model.safetensors") for path in (alone, folder))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert [(row["loss"], row["score"]) for row in rows(folder)] == [(row["loss"], row["score"]) for row in rows(alone)]


def test_until_ends_a_run_early_and_for_good(tmp_path, capfd):
    folder = tmp_path / "run"
    assert main(["train", *task_options("parity"), "--out", str(folder), "--until", "0.1", "--eval-every", "5"]) == 0
    assert "the score is as good as --until 0.1 after step 5" in capfd.readouterr().err
    assert len(rows(folder)) == 5
    before = (folder / "model.safetensors").read_bytes()
    assert main(["train", "--resume", str(folder)]) == 0
    assert (folder / "model.safetensors").read_bytes() == before
    assert len(rows(folder)) == 5
    hard = tmp_path / "hard"
    assert main(["train", *task_options("adding"), "--out", str(hard), "--until", "0", "--eval-every", "5"]) == 0
    assert "--until" not in capfd.readouterr().err
    assert len(rows(hard)) == 24


def test_a_run_starts_from_the_weights_of_another(tmp_path, capfd):
    """A shorter task first; nothing else of that run counts, and afterwards it may be gone."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", *task_options("parity"), "--out", str(first)]) == 0
    trained = load_file(first / "model.safetensors")
    argv = ["train", *task_options("parity"), "--data-options.length", "9", "--init", str(first), "--out", str(second)]
    assert main([*argv, "--lr", "1e-12", "--weight-decay", "0"]) == 0
    for name, value in load_file(second / "model.safetensors").items():
        torch.testing.assert_close(value, trained[name], atol=1e-9, rtol=1e-6)
    killed = tmp_path / "killed"  # before its first checkpoint
    killed.mkdir()
    shutil.copy(second / "config.yaml", killed)
    assert main(["train", "--resume", str(killed)]) == 0
    assert (killed / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    shutil.rmtree(first)
    assert main(["train", "--resume", str(second)]) == 0
    capfd.readouterr()
    argv = ["train", *task_options("parity"), "--dim", "12", "--init", str(second), "--out", str(tmp_path / "third")]
    assert main(argv) == 2
    expected = r"train: init is .*second, in which .* has shape \(\d+.*\), expected \(\d+.*\) because of this"
    assert re.search(expected, capfd.readouterr().err)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_process_of_a_divided_run_starts_from_the_weights_of_another(processes, runs, tmp_path, alone_in_a_group):
    first, second = runs("parity"), tmp_path / "second"
    argv = ["train", *task_options("parity"), "--init", str(first), "--out", str(second), "--lr", "1e-12"]
    argv += ["--weight-decay", "0", "--devices", str(processes), "--strategy", "fsdp"]
    if processes == 1:
        assert main(argv) == 0
    else:
        done = subprocess.run([sys.executable, "-m", "scanl.cli", *argv], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    trained = load_file(first / "model.safetensors")
    for name, value in load_file(second / "model.safetensors").items():
        torch.testing.assert_close(value, trained[name], atol=1e-9, rtol=1e-6)


def test_better_is_higher_or_lower():
    assert small("parity").reaches(0.9, 0.9)
    assert not small("parity").reaches(0.8, 0.9)
    assert small("adding").reaches(0.01, 0.02)
    assert not small("adding").reaches(0.03, 0.02)


def test_other_examples_than_those_of_the_checkpoint_are_refused(runs, tmp_path, capfd, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(runs("parity"), folder)
    generate = tasks.Task.generate
    with monkeypatch.context() as patch:
        patch.setattr(tasks.Task, "generate", lambda self, count, seed: generate(self, count, (9, *np.ravel(seed))))
        assert main(["train", "--resume", str(folder)]) == 2
    assert "has changed since the checkpoint; put it back to resume" in capfd.readouterr().err
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("length: 6", "length: 7"))
    assert main(["train", "--resume", str(folder)]) == 2
    assert "data_options is {'length': 7}, expected {'length': 6} because of" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train --data addign",
            "data is 'addign', expected a file, a folder or a known name; did you mean 'adding'?",
        ),
        ("train --data adding --data-options.lenght 5", "unknown option of adding 'lenght'; did you mean 'length'?"),
        ("train --data adding --data-options.length 1", "adding: length is 1, expected at least 2"),
        ("train --data adding --data-options.length long", "adding: length is 'long', expected an integer"),
        ("train --data copy --layer lur", "unknown layer 'lur'; did you mean 'lru'?"),
        ("train --data copy --layer bidirectional", "bidirectional"),
        ("train --data copy --carry-state", "carry_state is True, but copy does not use it; leave out --carry-state"),
        ("train --data copy --sequence-length 8", "copy does not use it; give --data-options.length"),
        (
            "train --data adding --tie-embeddings",
            "tie_embeddings is True, but the answers are not tokens of the input; leave out",
        ),
        ("train --until -0.5", "until is -0.5, expected at least 0 because text is scored by bits per byte"),
        ("train --eval-examples 5", "eval_examples is 5, but text does not use it; give --eval-bytes"),
        ("train --data-options.length 5", "unknown option of text 'length'; did you mean 'length_doublings'?"),
        ("train adding", "train: unrecognized arguments: adding; give --data adding"),
        ("train --data copy --eval-examples 0", "eval_examples is 0, expected at least 1"),
        ("tasks --al", "unknown option of tasks '--al'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(command, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_eval_and_generate_refuse(runs, capfd):
    folder = str(runs("mqar"))
    for command, message in {
        f"eval {folder} --length 10": "mqar: num_pairs is 4, expected from 1 to 2 because of length=10",
        f"eval {folder} --length 9": "mqar: length is 9, expected an even number",
        f"eval {folder} --count 0": "eval: count is 0, expected at least 1",
        f"generate {folder}": "was trained on mqar, expected a run on text, a signal or a table; scanl eval scores it",
        f"train --resume {folder} --data-options.length 40": "because of the run to resume",
    }.items():
        capfd.readouterr()
        assert main(command.split()) == 2
        assert message in capfd.readouterr().err


def test_eval_of_text_has_neither_length_nor_count(tmp_path, capfd):
    config = TrainConfig.of(dim=8, depth=1, out=str(tmp_path / "run"))
    RunFolder.fresh(config).create(config)
    assert main(["eval", str(tmp_path / "run"), "--length", "5"]) == 2
    assert (
        "eval: length is 5, but the run was trained on text, which does not use it; leave out --length"
        in capfd.readouterr().err
    )


def test_tasks_are_listed(capfd):
    assert main(["tasks"]) == 0
    listed = capfd.readouterr().out
    for name in tasks.names():
        assert f"\n{name} " in f"\n{listed}"
        assert f"chance {tasks.build(name).chance:.4g}, best {tasks.build(name).best:g}" in listed


def test_a_run_without_a_name_is_called_after_its_task_and_layer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = prepare(config_of("copy", layer="hawk,lru", layer_options={}))
    assert run.folder.path == Path("runs", "copy-hawk-lru-1")


def test_the_page_of_tasks_names_every_task_and_its_example_runs():
    page = filled((DOCS / "tasks.md").read_text(encoding="utf-8"))
    listed = page[: page.index("\n## ")]  # the tables of scores that follow begin with the names of layers and of runs
    assert sorted(re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)) == tasks.names()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "tasks.md", "exec"), {})


def test_the_phone_book_is_that_of_its_page():
    inputs, targets, *_ = tasks.build("phonebook", length=4).generate(50, 0)
    for row, digits in zip(inputs.tolist(), targets, strict=True):
        text = bytes(row).decode().lstrip("\n") + chr(digits[-1])
        book, examples, question = (part.split("\n") for part in text.split("\n\n"))
        assert all(re.fullmatch(r"[A-Z][a-z]+ [A-Z][a-z]+: [6-9]\d{9}", line) for line in book)
        assert len({line.split(":")[0] for line in book}) == len(book) == 4
        assert len({*examples, *question}) == 3
        assert {*examples, *question} < set(book)
        assert bytes(digits[digits != IGNORED].tolist()).decode() == question[0].split(": ")[1]


def test_what_a_guesser_of_digits_gets():
    """The most frequent digit at each place: 0.25 for the first, 0.1 for the others."""
    task = tasks.build("phonebook", length=3)
    _, targets, *_ = task.generate(4000, 0)
    digits = targets[:, -10:] - ord("0")
    often = np.stack([np.bincount(column, minlength=10) for column in digits.T]) / 4000
    assert abs(often.max(1).mean() - task.chance) < 0.015
    np.testing.assert_array_equal(np.flatnonzero(often[0]), range(6, 10))


def test_lists_of_operations_have_the_published_lengths_and_answers():
    """The example of the sheet, with the median's integer part, and trees of more than `least` tokens."""
    tokens = {name: number for number, name in enumerate("0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM X".split())}  # noqa: SIM905
    example = [tokens[word] for word in "[MAX 4 3 [MIN 2 3 X 1 0 [MED 1 5 8 9 2 X X".split()]  # noqa: SIM905
    task = small("listops")
    np.testing.assert_array_equal(task.solve(np.array([example])), [5])
    assert [listops.value(12, numbers) for numbers in ([1, 2], [4, 9], [3, 1, 2])] == [1, 6, 2]
    inputs, targets, *_ = task.generate(400, 0)
    lengths = (inputs != IGNORED).sum(1)
    assert lengths.min() > task.least
    assert lengths.max() < task.length
    assert set(targets) == set(range(10))


def test_the_capacity_signal_is_limited_to_ten_cycles_in_a_window():
    task = tasks.build("capacity", length=40)
    inputs, targets, *_ = task.generate(30, 0)
    spectrum = np.abs(np.fft.rfft(inputs[..., 0], axis=1))
    np.testing.assert_allclose(spectrum[:, 26:], 0, atol=1e-4)  # 25 cycles in 2.5 windows
    assert (spectrum[:, 25] > 1e-2).all()
    np.testing.assert_array_equal(inputs[:, 0], 0)
    np.testing.assert_allclose(np.abs(inputs).max(1), 1, rtol=1e-6)
    assert np.nanvar(task.generate(2000, 1).targets) == pytest.approx(task.chance, rel=0.05)
    assert np.isnan(targets[:, :40]).all()
    for place, delay in enumerate((0, 10, 20, 30, 40)):
        np.testing.assert_array_equal(targets[:, 40:, place], inputs[:, 40 - delay : 100 - delay, 0])
