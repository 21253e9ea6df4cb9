"""Policies: what they read at a step, and that they reach the return that is asked for."""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import published
from scanl.data.base import IGNORED
from scanl.errors import ConfigError, ShapeError
from scanl.export import write
from scanl.layers import state as states
from scanl.learning import TrainConfig
from scanl.models import Features, Policy, SequenceLabeler, Stack, Tokens

UP, DOWN, RIGHT = range(3)
PLACES = 6


class Maze:
    """A T-maze with Gymnasium's interface: a sign at the first place says which turn at the last one is worth 4."""

    def reset(self, *, seed=None):
        self.sign = int(np.random.default_rng(seed).integers(2))
        self.place = 0
        return self._seen(), {}

    def step(self, action):
        if self.place == PLACES - 1 and action != RIGHT:
            return self._seen(), (4.0 if action == self.sign else -1.0), True, False, {}
        self.place = min(self.place + (action == RIGHT), PLACES - 1)
        return self._seen(), -0.1, False, False, {}

    def _seen(self):
        sign = np.eye(2)[self.sign] * (self.place == 0)
        return np.concatenate([sign, [float(self.place == PLACES - 1)]])


def episodes(count):
    """Episodes of a player who goes straight on and turns at random: inputs (N, T, 1 + 3 + 3), actions (N, T)."""
    random, rows, answers = np.random.default_rng(0), [], []
    for turn in random.integers(0, 2, count):
        maze = Maze()
        seen, _ = maze.reset(seed=int(random.integers(2**31)))
        actions, rewards, looks = [*[RIGHT] * (PLACES - 1), int(turn)], [], []
        for action in actions:
            looks.append(seen)
            seen, reward, *_ = maze.step(action)
            rewards.append(reward)
        to_go = np.cumsum(rewards[::-1])[::-1]
        before = np.vstack([np.zeros(3), np.eye(3)[actions[:-1]]])
        rows.append(np.column_stack([to_go / 2, before, np.array(looks)]))
        answers.append(actions)
    return torch.tensor(np.array(rows), dtype=torch.float32), torch.tensor(answers)


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    model = SequenceLabeler(3, Stack(16, 1, "lru"), Features(7))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, actions = episodes(256)
    for step in range(150):
        some = torch.arange(32) + 32 * (step % 8)
        loss = F.cross_entropy(model(inputs[some])[0].flatten(0, 1), actions[some].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return Policy(model, unit=2.0)


@pytest.mark.parametrize("last", [4.0, -1.0], ids=["the right turn", "the other turn"])
def test_the_return_that_is_asked_for_is_reached(policy, last):
    target = -0.1 * (PLACES - 1) + last
    found = [policy.play(Maze(), target, max_steps=20, temperature=0, seed=seed) for seed in range(12)]
    np.testing.assert_allclose(found, target)
    assert {Maze().reset(seed=seed)[0].argmax() for seed in range(12)} == {0, 1}


def test_another_episode_begins_in_one_row(policy):
    seen = torch.randn(5, 2, 3)
    state = policy.start(torch.tensor([3.5, -1.5]), 2)
    for t in range(3):
        _, state = policy.act(seen[t], state, 0.5, temperature=0)
    action, both = policy.act(seen[3], state, 7.0, starts=torch.tensor([False, True]), temperature=0)
    new, alone = policy.act(seen[3, 1:], policy.start(-1.5), temperature=0)
    assert (action[1], both.to_go[1], both.target[1]) == (new[0], -1.5, -1.5)
    torch.testing.assert_close(states.index(both.stack, [1]), alone.stack)
    _, kept = policy.act(seen[3], state, 7.0, temperature=0)
    torch.testing.assert_close(states.index(both, [0]), states.index(kept, [0]))
    with pytest.raises(ShapeError, match=r"policy: starts is of shape \(2, 1\), expected torch.bool \(2,\)"):
        policy.act(seen[3], state, starts=torch.zeros(2, 1, dtype=torch.bool))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, cc, is there")
def test_its_model_as_a_file_in_c_chooses_the_same_actions(policy, tmp_path):
    write(policy.model, tmp_path / "agent.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "agent.c", "-o", "agent.so", "-lm"], cwd=tmp_path, check=True)
    library, memory, y = (
        ctypes.CDLL(str(tmp_path / "agent.so")),
        ctypes.create_string_buffer(1 << 16),
        np.zeros(3, "f4"),
    )
    chosen = []

    def also_in_c(_, given, answer):
        x = given[0][0, 0].numpy()
        library.agent_step(x.ctypes.data_as(ctypes.c_void_p), memory, y.ctypes.data_as(ctypes.c_void_p))
        chosen.append((answer[0].argmax().item(), y.argmax()))

    with policy.model.register_forward_hook(also_in_c):
        for seed, target in itertools.product(range(4), (3.5, -1.5)):
            library.agent_start(memory)
            policy.play(Maze(), target, max_steps=20, temperature=0, seed=seed)
    taken, same = np.transpose(chosen)
    np.testing.assert_array_equal(taken, same)
    assert {*taken} == {UP, DOWN, RIGHT}


def test_an_episode_ends_at_the_limit_of_steps(policy):
    assert policy.play(Maze(), 3.5, max_steps=2, temperature=0) == pytest.approx(-0.2)
    drawn = [policy.play(Maze(), 3.5, max_steps=9, temperature=9.0, seed=seed) for seed in (1, 2, 3, 4, 1, 2, 3, 4)]
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) > 1


class Cut(Maze):
    """An environment that ends an episode after its third step."""

    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        seen, _, _, _, info = super().step(RIGHT)
        return seen, 1.0, False, self.steps == 3, info


def test_an_episode_that_is_cut_is_over(policy):
    returns = []
    with policy.model.register_forward_pre_hook(lambda _, given: returns.append(float(given[0][0, 0, 0]))):
        assert policy.play(Cut(), 3.5) == 3.0
    assert returns == [3.5 / 2, 2.5 / 2, 1.5 / 2]


def test_a_policy_drops_nothing():
    assert not Policy(SequenceLabeler(3, Stack(8, 1, "lru", dropout=0.5), Features(7))).model.training


def test_several_episodes_go_on_at_once_as_each_alone(policy):
    """With a return, a reward and an observation of its own."""
    targets, looks = torch.tensor([3.5, -1.5]), torch.eye(3)[:2]
    rewards = torch.tensor([-0.1, 0.3])
    one, state = policy.act(looks, policy.start(targets, 2), temperature=0)
    two, state = policy.act(looks, state, rewards, temperature=0)
    torch.testing.assert_close(state.to_go, targets.double() - rewards.double())
    for row in range(2):
        alone = policy.start(float(targets[row]))
        first, alone = policy.act(looks[row : row + 1], alone, temperature=0)
        second, alone = policy.act(looks[row : row + 1], alone, float(rewards[row]), temperature=0)
        assert (int(first), int(second)) == (int(one[row]), int(two[row]))
        torch.testing.assert_close(alone.to_go, state.to_go[row : row + 1], atol=1e-6, rtol=0)


def test_actions_are_drawn_with_the_temperature(policy):
    def drawn(temperature, seed):
        generator = torch.Generator().manual_seed(seed)
        looks, state = torch.zeros(200, 3), policy.start(0.0, 200)
        return policy.act(looks, state, temperature=temperature, generator=generator)[0]

    assert torch.equal(drawn(1.0, 1), drawn(1.0, 1))
    assert len(drawn(100.0, 1).unique()) == 3
    assert len(drawn(0, 1).unique()) == 1


def test_a_step_is_that_of_the_source(tmp_path, monkeypatch):
    """Returns to go, the action before and the screens of recorded Atari games."""
    root = published.root(tmp_path, monkeypatch)
    published.written(root, "atari")
    options = {**published.OPTIONS["atari"], "unit": 3.0}
    source = TrainConfig.of(data=["atari"], data_options=options).open_source()
    inputs, targets, *_ = source.batch(0, 1).tensors()
    steps = int((targets[0] != IGNORED).sum())
    assert steps > 2
    actions = source.question.classes
    assert actions
    model = SequenceLabeler(actions, Stack(8, 1, "lru"), Features(inputs.shape[2]))
    read = []
    model.register_forward_pre_hook(lambda _, given: read.append(given[0][0, 0]))
    policy = Policy(model, unit=3.0)
    returns = inputs[0, :steps, 0].double() * 3
    state, reward = policy.start(float(returns[0])), 0.0
    for step in range(steps):
        _, state = policy.act(inputs[:, step, 1 + actions :], state, reward)
        torch.testing.assert_close(read[-1], inputs[0, step], rtol=1e-5, atol=1e-5)
        state = state._replace(action=targets[:, step])
        reward = float(returns[step] - returns[step + 1]) if step + 1 < steps else 0.0


def test_recorded_episodes_are_read_as_played_ones(policy):
    """In rows that hold several, and one that a row cuts."""
    starts = torch.tensor([[True, False, False, True, False], [False, False, True, False, False]])
    seen, rewards, actions = torch.randn(2, 5, 3), torch.randn(2, 5), torch.randint(3, (2, 5))
    inputs, read = policy.inputs(seen, actions, rewards, starts), []
    with policy.model.register_forward_pre_hook(lambda _, given: read.append(given[0][0, 0])):
        for row, begin, end in ((0, 0, 3), (0, 3, 5), (1, 0, 2), (1, 2, 5)):
            state, reward = policy.start(rewards[row, begin:end].sum()), 0.0
            for t in range(begin, end):
                _, state = policy.act(seen[row, t][None], state, reward)
                state, reward = state._replace(action=actions[row, t][None]), rewards[row, t]
    torch.testing.assert_close(torch.stack(read).view_as(inputs), inputs)
    alone = policy.inputs(seen[1:, 2:], actions[1:, 2:], rewards[1:, 2:])  # without starts
    torch.testing.assert_close(alone, inputs[1:, 2:])


def test_wrong_arguments_are_refused(policy):
    with pytest.raises(ConfigError, match="the model reads tokens, expected features"):
        Policy(SequenceLabeler(3, Stack(8, 1, "lru"), Tokens(5)))
    with pytest.raises(ConfigError, match="reads 4 channels, expected at least 5: the return, 3 for the action before"):
        Policy(SequenceLabeler(3, Stack(8, 1, "lru"), Features(4)))
    with pytest.raises(ConfigError, match="unit is 0, expected above 0"):
        Policy(policy.model, unit=0)
    with pytest.raises(ShapeError, match=r"target has shape \(3,\), expected \(\) or \(2,\)"):
        policy.start(torch.zeros(3), 2)
    with pytest.raises(ShapeError, match=r"observation has shape \(1, 2\), expected \(1, ...\) with 3 numbers"):
        policy.act(torch.zeros(1, 2), policy.start(1.0))
    steps = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(
        ShapeError, match=r"observations has shape \(2, 4, 3\), expected \(2, 5\) of actions and 3 numb"
    ):
        policy.inputs(torch.zeros(2, 4, 3), steps, steps)
    with pytest.raises(
        ShapeError, match=r"rewards is torch.int64 \(5,\), expected torch.int64 \(2, 5\) because of actions"
    ):
        policy.inputs(torch.zeros(2, 5, 3), steps, steps[0])
    with pytest.raises(
        ShapeError, match=r"starts is torch.int64 \(2, 5\), expected torch.bool \(2, 5\) because of act"
    ):
        policy.inputs(torch.zeros(2, 5, 3), steps, steps, steps)
    with pytest.raises(ConfigError, match="policy: temperature is -1, expected at least 0"):
        policy.act(torch.zeros(1, 3), policy.start(1.0), temperature=-1)
