"""Train agents under partial observation with sb3-contrib's RecurrentPPO: layers of scanl beside its own LSTM.

    python benchmarks/quality/agents.py [NAME ...]     # control recall counting babyai
    python benchmarks/quality/agents.py control --models gru LSTM

Three tasks are the easy level of one of POPGym, with returns from -1 to 1: control (PositionOnlyCartPole: the
velocities are hidden), recall (RepeatPrevious: name the card of 4 steps before), counting (CountRecall: how often was
this card shown). babyai is the level GoToRedBallGrey of BabyAI, with returns from 0 to 1; its agent sees 7 x 7 cells.
All models have width 128, the same segments of 128 steps, batches and rates, which are those of sb3-contrib's tests for
its LSTM. The discount is 0.99; it is 0 in counting, where no action changes what comes after it. A run ends after
FRAMES frames or SECONDS of processor time. A row is a run so far: the mean return of the last 100 episodes, and frames
a second of the processor. `pip install 'scanl[agents,babyai,bench]'`. The rows are in benchmarks/results/agents.csv;
their curves are drawn in docs/agents.png.
"""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, parse, parser, picture

TASKS = {
    "control": ("popgym.envs.position_only_cartpole", "PositionOnlyCartPoleEasy", 0.99),
    "recall": ("popgym.envs.repeat_previous", "RepeatPreviousEasy", 0.99),
    "counting": ("popgym.envs.count_recall", "CountRecallEasy", 0.0),
    "babyai": ("minigrid.envs.babyai.goto", "GoToRedBallGrey", 0.99),
}
LSTM = "LSTM"  # that of sb3-contrib
MODELS = ("gru", "mingru", "lru", "mamba2", "gated_deltanet", LSTM)
FRAMES, SECONDS, PIECE = 50_000, 40 * 60, 5_000


def environment(task: str) -> Any:
    """Return an environment whose observations are numbers; a class is a column.

    sb3-contrib's LSTM has no size for several classes as they are: sb3 adds up integers of numpy.
    """
    from gymnasium.wrappers import FlattenObservation

    module, name, _ = TASKS[task]
    made = getattr(import_module(module), name)()
    if task == "babyai":
        from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

        made = ImgObsWrapper(OneHotPartialObsWrapper(made))
    return FlattenObservation(made)


def agent(task: str, model: str, seed: int) -> Any:
    """Return an agent that has not learnt yet."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    from scanl.learning.adapters.sb3 import RecurrentPolicy

    gamma = TASKS[task][2]
    environments = make_vec_env(lambda: environment(task), 8, seed=seed)
    environments = VecNormalize(environments, norm_obs=environments.observation_space.dtype.kind == "f", gamma=gamma)
    own = {"lstm_hidden_size": 128} if model == LSTM else {"layer": model, "width": 128}
    return RecurrentPPO(
        "MlpLstmPolicy" if model == LSTM else RecurrentPolicy,
        environments,
        n_steps=128,
        batch_size=256,
        n_epochs=10,
        learning_rate=7e-4,
        max_grad_norm=1,
        gamma=gamma,
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
    panels = []
    for task in TASKS:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in results.of(task=task, seed=0):
            lines.setdefault(row["model"], []).append((float(row["frames"]), float(row["mean_return"])))
        if lines:
            panels.append(Panel(task, "frames", "mean return of 100 episodes", lines))
    picture(results.pictures / "agents.png", panels)


if __name__ == "__main__":
    main()
