"""The policy for RecurrentPPO learns in the environments of sb3-contrib's own tests; its segments are its rollouts."""

import ctypes
import shutil
import subprocess

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
from scanl.export import start_state, write_c, write_onnx
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


class ClassesEnv(TwoRowsEnv):
    """An observation of two classes, which sb3-contrib's LSTM refuses."""

    observation_space = spaces.MultiDiscrete([2, 3])


def test_spaces():
    """Images, dicts, classes, actions of numbers, cut episodes, exploration that depends on the state."""
    for env in (FakeImageEnv(40, 40, n_channels=3), SimpleMultiObsEnv(), TwoRowsEnv(), ClassesEnv()):
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


def by_policy(model):
    """The action that the policy takes for an observation; the state is kept."""
    state = None

    def act(observation, first):
        nonlocal state
        action, state = model.predict(observation[None], state, np.array([first]), deterministic=True)
        return int(action[0])

    return act


def by_c(actor, folder):
    """The same from the actor's file in C."""
    write_c(actor, folder / "agent.c", torch.randn(2, 8, 4))
    flags = ("-std=c99", "-Wall", "-Werror", "-O1", "-shared", "-fPIC")
    subprocess.run(["cc", *flags, "agent.c", "-o", "agent.so", "-lm"], cwd=folder, check=True)
    library, state = ctypes.CDLL(str(folder / "agent.so")), ctypes.create_string_buffer(1 << 16)
    y = np.zeros(2, np.float32)

    def act(observation, first):
        if first:
            library.agent_start(state)
        x = np.ascontiguousarray(observation, np.float32)
        library.agent_step(x.ctypes.data_as(ctypes.c_void_p), state, y.ctypes.data_as(ctypes.c_void_p))
        return int(y.argmax())

    return act


def by_onnx(actor, folder):
    """The same from the actor's file of ONNX."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'scanl[export]'")
    write_onnx(actor, folder / "agent.onnx", torch.randn(2, 8, 4))
    session = runtime.InferenceSession(folder / "agent.onnx", providers=["CPUExecutionProvider"])
    start = start_state(session.get_modelmeta().custom_metadata_map["state"])
    state = start

    def act(observation, first):
        nonlocal state
        y, *last = session.run(None, {"x": observation[None, None], **(start if first else state)})
        state = dict(zip(start, last, strict=True))
        return int(y.argmax())

    return act


@pytest.mark.parametrize(("layer", "exported"), [("lru", by_c), ("hawk", by_c), ("hawk", by_onnx)])
def test_an_exported_policy_takes_the_same_actions(layer, exported, tmp_path):
    if exported is by_c and shutil.which("cc") is None:
        pytest.skip("no C compiler, cc, is there")
    model = agent(make_vec_env("CartPole-v1", 4, seed=0), n_steps=64, layer=layer).learn(1024)
    choices, environment = [by_policy(model), exported(model.policy.actor(), tmp_path)], gymnasium.make("CartPole-v1")
    observation, first, episodes = environment.reset(seed=0)[0], True, 0
    taken = []
    while episodes < 5:
        action, same = (choose(observation, first) for choose in choices)
        assert action == same
        taken.append(action)
        observation, _, ended, cut, _ = environment.step(action)
        first = ended or cut
        if first:
            observation, episodes = environment.reset()[0], episodes + 1
    assert {*taken} == {0, 1}


def test_errors():
    with pytest.raises(ConfigError, match="bidirectional"):
        agent(layer="vim")
