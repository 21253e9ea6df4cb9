"""Streams: each by a solver or an invariant that shares no code with its generator."""

from itertools import islice, pairwise

import numpy as np
import pytest

from scanl.data import sources
from scanl.data.base import IGNORED
from scanl.errors import ConfigError
from scanl.tasks.lorenz import lorenz63, lorenz96, rk4
from scanl.tasks.mackey_glass import euler
from scanl.tasks.mackey_glass_regimes import regimes
from scanl.tasks.stream import StreamTask

NAMES = [name for name in sources.names() if issubclass(sources.get(name), StreamTask)]


def opened(name, **options):
    return sources.get(name).open({"data_options": options, "seed": 0, "eval_examples": 2})


def taken(name, count, **options):
    samples = list(islice(opened(name, **options).stream(), count))
    return np.array([x for x, _ in samples]), np.array([y for _, y in samples])


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_the_same_for_a_seed_and_fits_its_question(name):
    stream = opened(name, length=7)
    first, again = (list(islice(stream.stream(), 20)) for _ in range(2))
    assert first == again
    other = sources.get(name).open({"data_options": {}, "seed": 1, "eval_examples": 2})
    assert list(islice(other.stream(), 200)) != list(islice(stream.stream(), 200))
    batch = stream.batch(0, 3)
    assert batch.inputs.shape == (3, 7, stream.question.inputs.count)
    assert {len(x) for x, _ in first} == {stream.question.inputs.count}


def test_mackey_glass_is_the_fixed_one_before_the_first_change():
    random = np.random.default_rng(3)
    history = 1.2 + 0.2 * (np.random.default_rng(3).random(170) - 0.5)
    found = [x for x, _ in islice(regimes((17,), 2000, random), 200)]
    np.testing.assert_allclose(found, euler(history[None], 1.2, 200)[0], rtol=1e-12)


def test_mackey_glass_changes_its_delay_as_often_as_told():
    delays = [delay for _, delay in islice(regimes((5, 9), 20, np.random.default_rng(0)), 8000)]
    changes = np.count_nonzero(np.diff(delays))
    assert set(delays) == {5, 9}
    assert abs(changes - 400) < 4 * np.sqrt(400)


def test_mackey_glass_asks_for_a_later_value():
    x, y = taken("mackey_glass_regimes", 60, ahead=4)
    np.testing.assert_array_equal(y[:-4], x[4:])


def counted_back(events, cues, gamma):
    """The truths, from the last step to the first: what is announced in a trial, as the events show."""
    truth, truths = 0.0, []
    for event, cue in zip(events[::-1], cues[::-1], strict=True):
        truths.append(truth)
        truth = 1.0 if event else 0.0 if cue else gamma * truth
    return np.array(truths[::-1])


@pytest.mark.parametrize(("name", "cues"), [("trace_conditioning", 1), ("trace_patterning", 6)])
def test_a_cue_announces_an_event(name, cues):
    x, y = taken(name, 6000)
    begun, event = x[:, :cues].any(1), x[:, cues] > 0
    last = len(x) - 200  # whose event lies within
    expected = counted_back(event, begun, 0.9)[:last]
    np.testing.assert_allclose(y[:last, 0], expected, rtol=1e-12)
    starts = np.flatnonzero(begun)
    waits = [int(np.flatnonzero(event[a:b])[0]) for a, b in pairwise(starts) if event[a:b].any()]
    assert set(waits) <= set(range(24, 37))
    assert {min(np.diff(starts)) >= 24 + 80 + 1, max(np.diff(starts)) <= 36 + 120 + 1} == {True}
    if cues == 6:
        assert set(x[begun, :6].sum(1)) == {3}
        by_pattern = {}
        for a, b in pairwise(starts):
            by_pattern.setdefault(tuple(x[a, :6]), set()).add(bool(event[a:b].any()))
        assert {len(kinds) for kinds in by_pattern.values()} == {1}
        assert 0.05 < x[:, 7].mean() < 0.15


def test_a_pattern_is_copied():
    x, y = taken("copy_online", 4 * 28)
    for begin in range(0, len(x), 28):
        shown = x[begin : begin + 10].argmax(1)
        assert (y[begin : begin + 18] == IGNORED).all()
        assert x[begin + 17, -1] == 1
        np.testing.assert_array_equal(y[begin + 18 : begin + 28], shown)


def test_lorenz_rests_at_its_fixed_points():
    side = np.sqrt(8 / 3 * 27)
    assert np.abs(lorenz63(np.array([side, side, 27.0]))).max() < 1e-12
    assert np.abs(lorenz96(np.full(20, 8.0))).max() == 0


@pytest.mark.parametrize(("velocity", "start"), [(lorenz63, [1.0, 2.0, 20.0]), (lorenz96, np.arange(20) / 3.0)])
def test_runge_kutta_is_of_fourth_order(velocity, start):
    """Half the step makes the error 16 times smaller, against a method of eighth order."""
    from scipy.integrate import solve_ivp

    exact = solve_ivp(lambda _, x: velocity(x), (0, 0.2), start, method="DOP853", rtol=1e-12, atol=1e-12).y[:, -1]
    errors = []
    for count in (20, 40):
        x = np.array(start)
        for _ in range(count):
            x = rk4(velocity, x, 0.2 / count)
        errors.append(np.abs(x - exact).max())
    assert 12 < errors[0] / errors[1] < 20


@pytest.mark.parametrize("name", ["lorenz63", "lorenz96"])
def test_a_flow_goes_on_and_has_the_noise_that_is_asked_for(name):
    x, y = taken(name, 2000)
    np.testing.assert_array_equal(y[:-1], x[1:])
    assert np.abs(x.std(0) - 1).max() < 0.5
    noisy, _ = taken(name, 2000, noise=0.0)
    np.testing.assert_array_equal(noisy, x)


def test_digits_come_pixel_by_pixel():
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = taken("digits_stream", 64 * 30)
    for image, answers in zip(x.reshape(30, 64, 2), y.reshape(30, 64), strict=True):
        (match,) = np.flatnonzero((data.data == image[:, 0] * 16).all(1))[:1]
        assert (answers[:-1] == IGNORED).all()
        assert answers[-1] == data.target[match]
        assert image[:, 1].tolist() == [1.0] + [0.0] * 63


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lorenz63", {"step": 0.5}, "step is 0.5, expected more than 0 and at most 0.1"),
        ("lorenz96", {"noise": -1.0}, "noise is -1.0, expected at least 0"),
        ("trace_conditioning", {"least_wait": 40}, "least_wait is 40, expected 1 to most_wait=36"),
        ("trace_patterning", {"distractors": -1}, "distractors is -1, expected at least 0"),
        ("copy_online", {"symbols": 1}, "symbols is 1, expected at least 2"),
        ("mackey_glass_regimes", {"stay": 0}, "stay is 0, expected at least 1"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(name, **options)
