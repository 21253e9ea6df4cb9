"""Train agents under partial observation with sb3-contrib's RecurrentPPO: layers of scanl beside its own LSTM.

    python benchmarks/quality/agents.py [NAME ...]     # control recall counting
    python benchmarks/quality/agents.py control --models gru LSTM

Each task is the easy level of one of POPGym: control (PositionOnlyCartPole: the velocities are hidden), recall
(RepeatPrevious: name the card of 4 steps before), counting (CountRecall: how often was this card shown). All models
have width 128, the same segments of 128 steps, batches and rates, which are those of sb3-contrib's tests for its LSTM.
A run ends after FRAMES frames or SECONDS of processor time. A row is a run so far: the mean return of the last 100
episodes (from -1 to 1), and frames a second of the processor. `pip install 'scanl[agents,bench]'`. The rows are in
benchmarks/results/agents.csv.
"""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

TASKS = {
    "control": ("position_only_cartpole", "PositionOnlyCartPoleEasy"),
    "recall": ("repeat_previous", "RepeatPreviousEasy"),
    "counting": ("count_recall", "CountRecallEasy"),
}
LSTM = "LSTM"  # that of sb3-contrib
MODELS = ("gru", "mingru", "lru", "mamba2", "gated_deltanet", LSTM)
FRAMES, SECONDS, PIECE = 50_000, 240, 5_000


def agent(task: str, model: str, seed: int) -> Any:
    """Return an agent that has not learnt yet."""
    from gymnasium import spaces
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    from scanl.learning.adapters.sb3 import RecurrentPolicy

    module, name = TASKS[task]
    environments = make_vec_env(getattr(import_module(f"popgym.envs.{module}"), name), 8, seed=seed)
    environments = VecNormalize(environments, norm_obs=isinstance(environments.observation_space, spaces.Box))
    own = {"lstm_hidden_size": 128} if model == LSTM else {"layer": model, "width": 128}
    return RecurrentPPO(
        "MlpLstmPolicy" if model == LSTM else RecurrentPolicy,
        environments,
        n_steps=128,
        batch_size=256,
        n_epochs=10,
        learning_rate=7e-4,
        max_grad_norm=1,
        gae_lambda=0.98,
        policy_kwargs={"net_arch": [64], "ortho_init": False, **own},
        seed=seed,
        device="cpu",
    )


def pieces(write: Callable[..., object], frames: int) -> Callable[[dict[str, Any], Any], bool]:
    """Return what RecurrentPPO calls after each step: it writes a row after each piece, and ends the run in time."""
    begin, written = time.process_time(), 0

    def after_step(local: dict[str, Any], _: Any) -> bool:
        nonlocal written
        learner, seconds = local["self"], time.process_time() - begin
        before = learner.num_timesteps - learner.n_envs
        goes_on = before < frames and seconds < SECONDS
        if before // PIECE > written or not goes_on:
            written = before // PIECE
            returns = [episode["r"] for episode in learner.ep_info_buffer]
            speed = before / seconds
            write(
                frames=before,
                last=not goes_on,
                mean_return=float(np.mean(returns)),
                frames_per_second=speed,
                processor=seconds,
            )
        return goes_on

    return after_step


def main() -> None:
    made = parser(__doc__, TASKS, seeds=True)
    made.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    options = parse(made)
    results = Results("agents", options)
    for seed in range(options.seeds):
        for task in options.names:
            for model in options.models:
                key = {"task": task, "model": model, "seed": seed}
                if not results.has(**key, last=True):
                    agent(task, model, seed).learn(1024)  # kernels are compiled
                    learner = agent(task, model, seed)
                    frames = 1024 if options.quick else FRAMES
                    learner.learn(2 * frames, callback=pieces(lambda key=key, **row: results.add(**key, **row), frames))


if __name__ == "__main__":
    main()
