"""Pictures of dashed paths: the rules by which the paths grow, and what the answer means."""

import numpy as np
import pytest

from scanl.tasks import Pathfinder, PathX
from scanl.tasks.dashes import draw_paths

SMALL = {"gap": 2, "length": 5, "thickness": 1.5, "dashes": 9, "start": 8, "continuity": 1.0, "others": 6}


def drawn(seed, side=90, brightness=0.9, **changes):
    """A picture, and its two long paths."""
    picture = np.zeros((side, side), np.float32)
    numbers = {**SMALL, **changes, "brightness": brightness}
    return picture, draw_paths(np.random.default_rng(seed), picture, *numbers.values())


def points(dashes, each=50):
    """Points on dashes, and the number of the dash of each."""
    along = np.linspace(0, 1, each)[:, None]
    found = [tail + along * (head - tail) for tail, head in dashes.reshape(-1, 2, 2)]
    return np.concatenate(found), np.repeat(np.arange(len(dashes)), each)


@pytest.mark.parametrize("seed", range(6))
def test_dashes_of_a_path_follow_one_another_at_the_gap(seed):
    _, paths = drawn(seed)
    for tails, heads in (np.split(path, 2, 1) for path in paths):
        along = (heads - tails) / 5
        np.testing.assert_allclose(np.hypot(*along.T), 1)
        np.testing.assert_allclose(heads[:-1] + 2 * along[:-1], tails[1:] - 2 * along[1:], atol=1e-9)
        assert min(tails.min(), heads.min()) >= 0
        assert max(tails.max(), heads.max()) <= 89
    np.testing.assert_allclose(np.hypot(*(paths[0, 0, :2] - paths[1, 0, :2])), 8)


@pytest.mark.parametrize("seed", range(10))
def test_paths_keep_away_from_each_other_and_from_themselves(seed):
    """Surroundings of half a dash's thickness and a gap share no pixel, so their lines are about twice that apart."""
    _, paths = drawn(seed, side=44, start=7)
    (one, of_one), (other, of_other) = (points(path) for path in paths)
    between = np.hypot(*(one[:, None] - other).transpose(2, 0, 1))
    own = np.hypot(*(one[:, None] - one).transpose(2, 0, 1))
    apart = 2 * (2 + 0.75) - np.sqrt(2)
    began = (of_one[:, None] == 0) & (of_other == 0)  # the first dashes are where they are
    assert between[~began].min() > apart
    assert own[np.abs(of_one[:, None] - of_one) > 1].min() > apart


@pytest.mark.parametrize("continuity", [1.0, 1.8])
def test_turns_have_the_published_probability(continuity):
    """With the density cos²(c δ) for |c δ| < π/2, half of that range holds 1/2 + 1/π of all turns."""
    turns = []
    for seed in range(300):
        _, paths = drawn(seed, side=200, dashes=3, start=40, continuity=continuity, others=0)
        y, x = (paths[..., 2:] - paths[..., :2]).transpose(2, 0, 1)
        turns.append((np.diff(np.arctan2(y, x), axis=1).ravel() + np.pi) % (2 * np.pi) - np.pi)
    turns = np.abs(np.concatenate(turns)) * continuity
    assert turns.max() <= np.pi / 2 + 1e-9
    half = 0.5 + 1 / np.pi
    assert abs((turns < np.pi / 4).mean() - half) < 5 * np.sqrt(half * (1 - half) / len(turns)) + 0.02  # a pixel


def test_what_is_drawn():
    """Long paths, and in the room beside them shorter ones of the same brightness."""
    alone, paths = drawn(3, others=0)
    picture, same = drawn(3)
    assert np.array_equal(paths, same)
    assert (picture >= alone).all()
    assert picture.max() == alone.max() == np.float32(0.9)
    lines, _ = points(paths.reshape(-1, 4))
    rows, columns = np.indices(alone.shape)
    far = np.sqrt(((np.stack([rows, columns], -1)[:, :, None] - lines) ** 2).sum(-1).min(-1))
    np.testing.assert_allclose(alone, 0.9 * np.clip(0.75 + 0.5 - far, 0, 1), atol=0.02)
    added = (picture > alone).sum() / (alone > 0).sum()
    assert 0.5 < added < 1.2  # six paths of 3 dashes beside 18 dashes, where there was room


@pytest.mark.parametrize(("source", "most"), [(Pathfinder, 32), (PathX, 6)])
def test_the_answer_is_whether_the_dots_are_the_ends_of_one_path(source, most, monkeypatch):
    """The dots of a 1 are at both ends of one long path; those of a 0 at the first of one and the last of the other."""
    from scanl.tasks import dashes

    found = []

    def noted(random, picture, *numbers):
        found.append(draw_paths(random, picture, *numbers))
        return found[-1]

    monkeypatch.setattr(dashes, "draw_paths", noted)
    monkeypatch.setattr(dashes, "draw_dot", lambda picture, row, column, radius: ends.append((row, column)))
    ends = []
    batch = source(seed=1).batch(0, most)
    assert batch.inputs.shape == (most, source.rules.side**2, 1)
    assert set(batch.targets) == {0, 1}
    for paths, first, last, answer in zip(found, ends[::2], ends[1::2], batch.targets, strict=True):
        begins = [tuple(path[0, :2]) == first for path in paths]
        stops = [tuple(path[-1, 2:]) == last for path in paths]
        assert (sum(begins), sum(stops)) == (1, 1)
        assert (begins == stops) == bool(answer)


def test_dots_are_as_large_as_they_should_be():
    rules = PathX.rules
    batch = PathX(seed=1).batch(0, 2)
    for picture in batch.inputs.reshape(2, rules.side, rules.side):
        full = (picture == 1).sum()  # pixels within a dot's radius less a half
        assert 2 * 13 <= full <= 2 * np.pi * rules.radius**2
        assert picture.min() == 0
