"""Demonstrations by the bot of minigrid, in the form of BabyAI's files, and missions that a model is to fulfil.

This module needs minigrid when it is used: `pip install 'scanl[babyai]'`.
"""

import importlib.util
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scanl.errors import ConfigError
from scanl.files import written_whole

LEVEL = "BabyAI-GoToObj-v0"
TRAINING, EPISODES = 1000, 512  # demonstrations to learn from; to measure on, and missions that are played
FIRST_SEED = 10**9  # seed of the first one to measure on, as in the authors' scripts; those to learn from begin at 1


def has_game() -> bool:
    """Whether minigrid is installed."""
    return importlib.util.find_spec("minigrid") is not None


def make(folder: Path) -> None:
    """Write the two files of the level GoToObj: 1,000 demonstrations to learn from and 512 to measure on."""
    for ending, count, seed in (("agent", TRAINING, 1), ("agent_valid", EPISODES, FIRST_SEED)):
        content = pickle.dumps(list(demonstrations(LEVEL, count, seed)), 3)
        with written_whole(folder / f"{LEVEL}_{ending}.pkl") as temporary:
            temporary.write_bytes(content)


def demonstrations(level: str, count: int, seed: int) -> Iterator[tuple[str, bytes, list[int], list[int]]]:
    """Yield missions that the bot fulfils: the mission, the packed images (T, 7, 7, 3), the directions, the actions.

    The first world has the seed, and the next ones have the seeds that follow. A world in which the bot fails is left
    out.
    """
    game = _game(level)
    import blosc
    from minigrid.utils.baby_ai_bot import BabyAIBot  # pyright: ignore[reportMissingImports]

    while count:
        observation, _ = game.reset(seed=seed)
        bot, over, reward, steps = BabyAIBot(game.unwrapped), False, 0.0, []
        action: Any = None
        while not over:
            action = bot.replan(action)
            steps.append((observation["image"], int(observation["direction"]), int(action)))
            observation, reward, ended, cut, _ = game.step(action)
            over = ended or cut
        seed += 1
        if reward > 0:
            count -= 1
            images, directions, actions = zip(*steps, strict=True)
            yield str(observation["mission"]), blosc.pack_array(np.stack(images)), list(directions), list(actions)


@torch.no_grad()
def fulfilled(model: Any, source: Any, episodes: int, seed: int = FIRST_SEED) -> float:
    """Return the share of missions that a `SequenceLabeler` fulfils, which reads one step at a time.

    source: the `BabyAIDemonstrations` that the model has learned from; it makes the inputs.

    Each step takes the action of the largest logit. The worlds have the seed and those that follow.
    """
    game, rows = _game(source.level), source.demonstrations[0]
    kind, device, won = next(model.parameters()).dtype, next(model.parameters()).device, 0
    model.eval()
    for number in range(episodes):
        observation, _ = game.reset(seed=seed + number)
        state, over, reward, last = None, False, 0.0, None
        while not over:
            mission = str(observation["mission"]) if last is None else ""
            images, directions, actions = [observation["image"]], [int(observation["direction"])], [0]
            if last is not None:
                images, directions, actions = [images[0], *images], [0, *directions], [last, 0]
            row = rows.row(mission, np.stack(images), directions, actions)
            inputs = source.inputs(row)[0 if last is None else 1 :]
            logits, state = model(torch.from_numpy(inputs).to(device, kind)[None], state)
            last = int(logits[0, -1].argmax())
            observation, reward, ended, cut, _ = game.step(last)
            over = ended or cut
        won += reward > 0
    return won / episodes


def _game(level: str) -> Any:
    if not has_game():
        raise ConfigError(
            "babyai: minigrid is not installed, expected it because it has the game: pip install 'scanl[babyai]'"
        )
    import gymnasium  # pyright: ignore[reportMissingImports]
    import minigrid  # noqa: F401  # pyright: ignore[reportMissingImports]: names the levels

    return gymnasium.make(level)
