"""The policy for RecurrentPPO learns in the environments of sb3-contrib's own tests; its segments are its rollouts."""

import pytest

pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed: pip install 'scanl[agents]'")

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy

from scanl.errors import ConfigError
from scanl.export import write_c
from scanl.learning.adapters.sb3 import RecurrentPolicy

pytestmark = pytest.mark.filterwarnings("ignore")  # of gymnasium and sb3
SMALL = {"layer": "lru", "width": 16}


def agent(env="CartPole-v1", n_steps=16, **options):
    return RecurrentPPO(
        RecurrentPolicy, env, policy_kwargs=SMALL | options, n_steps=n_steps, n_epochs=2, seed=0, device="cpu"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"layer": "hawk", "depth": 2, "channel_mixer": "gated_mlp"},
        {"shared_lstm": True, "enable_critic_lstm": False},
        {"enable_critic_lstm": False, "share_features_extractor": False},
    ],
)
@pytest.mark.parametrize("envs", [1, 16])
def test_one_environment_and_many(options, envs):
    model = agent(make_vec_env("CartPole-v1", envs, seed=0), **options).learn(64 * envs)
    evaluate_policy(model, model.get_env(), n_eval_episodes=2, warn=False)


class TwoRowsEnv(gymnasium.Env):
    """An action of 2 x 2 numbers."""

    observation_space = spaces.Box(-1, 1, (10,))
    action_space = spaces.Box(-1, 1, (2, 2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action.shape == (2, 2)
        return self.observation_space.sample(), 1.0, self.np_random.random() > 0.8, False, {}


def test_spaces():
    """Images, a dict of observations, actions of numbers, cut episodes, exploration that depends on the state."""
    for env in (FakeImageEnv(40, 40, n_channels=3), SimpleMultiObsEnv(), TwoRowsEnv()):
        agent(env).learn(32)
    model = RecurrentPPO(
        RecurrentPolicy, "Pendulum-v1", policy_kwargs=SMALL, n_steps=64, use_sde=True, sde_sample_freq=4, seed=0
    )
    model.learn(256)


@pytest.mark.parametrize("layer", ["lru", "retnet"])
def test_a_segment_is_the_rollout(layer):
    """What is evaluated over whole segments, from stored states, is what was chosen step by step."""
    model = agent(make_vec_env("CartPole-v1", 3, seed=0), n_steps=40, layer=layer)
    model.learning_rate = model.lr_schedule = lambda _: 0.0  # so that the policy stays as it is
    model.learn(240)
    buffer = model.rollout_buffer
    assert buffer.episode_starts.sum() > 3
    for batch in buffer.get(50):
        mask = batch.mask > 0
        values, log_prob, _ = model.policy.evaluate_actions(
            batch.observations, batch.actions.long().flatten(), batch.lstm_states, batch.episode_starts
        )
        torch.testing.assert_close(log_prob[mask], batch.old_log_prob[mask], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values.flatten()[mask], batch.old_values[mask], rtol=1e-4, atol=1e-5)


def test_saving(tmp_path):
    model = agent(layer="retnet", enable_critic_lstm=False).learn(32)
    model.save(tmp_path / "model")
    model.policy.save(tmp_path / "policy")
    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    for again in (RecurrentPPO.load(tmp_path / "model"), RecurrentPolicy.load(tmp_path / "policy")):
        state, other = None, None
        for observation in observations:
            action, state = model.predict(observation, state, deterministic=True)
            repeated, other = again.predict(observation, other, deterministic=True)
            assert action == repeated
            for half, half_of_other in zip(state, other, strict=True):
                np.testing.assert_array_equal(half, half_of_other)


def test_actor(tmp_path):
    """What chooses actions, as a model: the logits are those of the policy, and it has a file in C."""
    model = agent(n_steps=32).learn(64)
    actor, observations = model.policy.actor(), torch.randn(1, 6, 4)
    y, _ = actor(observations)
    states = (torch.zeros(1, 6, model.policy.lstm_actor.hidden_size),) * 2
    states = tuple(half[:, :1] for half in states)
    expected, _ = model.policy.get_distribution(observations[0], states, torch.zeros(6))
    torch.testing.assert_close(y[0].log_softmax(-1), expected.distribution.logits)
    write_c(actor, tmp_path / "agent.c", torch.randn(2, 8, 4))
    assert "agent_step" in (tmp_path / "agent.c").read_text()


def test_errors():
    with pytest.raises(ConfigError, match="bidirectional"):
        agent(layer="vim")
