import numpy as np
from numpy.testing import assert_array_equal

from scanl.tasks.simulated_series import CALENDARS, simulate


def test_the_same_for_a_seed():
    one, other, third = (simulate(np.random.default_rng(seed), 20, 90).y for seed in (0, 0, 1))
    assert_array_equal(one, other)
    assert not np.array_equal(one, third)


def test_all_kinds_are_drawn():
    drawn = simulate(np.random.default_rng(0), 400, 400)
    y, known = drawn.y, ~np.isnan(drawn.y)
    assert y.shape == (400, 400)
    assert np.isfinite(y[known]).all()
    assert known.any(1).all()
    assert 0 < (~known).any(1).sum() < 100
    assert {1, 4, 7, 12, 24} <= set(drawn.first) & {m for m, *_ in CALENDARS}
    assert (2 * drawn.first <= 400).all()
    assert ((drawn.second == 1) | (drawn.second > drawn.first)).all()
    assert (drawn.second > 1).any()
    whole = np.nan_to_num(y) % 1 == 0
    assert 10 < whole.all(1).sum() < 200  # counts
    dead = (np.nan_to_num(y)[:, -20:] == np.nan_to_num(y)[:, -1:]).all(1)
    assert 1 < dead.sum() < 80


def test_a_short_series():
    assert simulate(np.random.default_rng(0), 50, 8).y.shape == (50, 8)
