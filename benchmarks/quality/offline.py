"""Learn to act from recorded episodes alone, for a return that is wanted: layers of scanl beside attention and cloning.

    python benchmarks/quality/offline.py [NAME ...]     # control recall instruction
    python benchmarks/quality/offline.py control --layers lru

control is PositionOnlyCartPole of POPGym: the velocities are hidden. recall is its RepeatPrevious: name the card of 4
steps before. instruction is the level GoToLocalS6N2 of BabyAI: which of two things to go to is shown at the first step
alone, and a part of the room is seen. The players of the EPISODES are a controller that sees the velocities, one that
knows the cards, and minigrid's bot. In each episode they make mistakes at another share of the steps: a random action;
in recall the name of the last card, and most players make many.

A model is a labeler of DEPTH blocks of WIDTH that `models.Policy` plays with. learner: `return` reads the return to go
and plays for `wanted`; `clone` does without it; `clone of the best` has learnt from the tenth of the episodes with the
largest returns. A row has the mean return of PLAYED episodes whose actions are drawn (`reached`), and of as many with
the likeliest actions (`greedy`); the processor's seconds of training and its milliseconds of a step of one agent; and
the numbers of the agent's state at the end of the longest episode. The rows of the learner `recorded` are the data: the
mean return, and the mean `best` of the best tenth. `pip install 'scanl[agents,babyai,bench]'`. The rows are in
benchmarks/results/offline.csv.
"""

import contextlib
import io
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.data.published.babyai import KINDS
from scanl.layers import state as states
from scanl.models import Features, Policy, SequenceLabeler, Stack

LAYERS = ("lru", "gru", "gated_deltanet", "attention")
LEARNERS = ("return", "clone", "clone of the best")
EPISODES, ROWS, WIDTH, DEPTH, LR, PLAYED = 2000, 32, 64, 1, 3e-3, 50
PLAYED_SEED = 10**6  # of the first world that is played; those of the records begin at 0
WORDS = ("red", "green", "blue", "purple", "yellow", "grey", "ball", "box", "key")

Play = Callable[[Any, int | None], int]  # from an observation and the action before to an action


class Episode(NamedTuple):
    """observations: (T, C).   actions, rewards: (T,)."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor


class Task(NamedTuple):
    """environment: makes one.   player: of an environment, without mistakes.   observed: an observation as numbers, and
    whether it is the first.   actions: their number.   limit: of steps.   steps: of training.   wanted: returns.
    mistake: an action in the place of the player's, from the observation and a generator.   power: the share of steps
    without mistakes is this power of a number in [0, 1), drawn for each episode.
    """

    environment: Callable[[], Any]
    player: Callable[[Any], Play]
    observed: Callable[[Any, bool], Any]
    actions: int
    limit: int
    steps: int
    wanted: Sequence[float]
    mistake: Callable[[Any, np.random.Generator], int]
    power: int = 1


def of_popgym(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(import_module(f"popgym.envs.{module}"), name)()


def of_babyai() -> Any:
    import gymnasium
    import minigrid  # noqa: F401  # names the levels

    return gymnasium.make("BabyAI-GoToLocalS6N2-v0")


def controller(environment: Any) -> Play:
    def play(*_: object) -> int:
        place, speed, angle, turning = environment.unwrapped.state
        return int(angle + 0.5 * turning + 0.05 * place + 0.1 * speed > 0)

    return play


def recaller(_: object) -> Play:
    cards: list[int] = []

    def play(card: Any, *_: object) -> int:
        cards.append(card)
        return cards[-4:][0]

    return play


def bot(environment: Any) -> Play:
    from minigrid.utils.baby_ai_bot import BabyAIBot

    own = BabyAIBot(environment.unwrapped)
    return lambda _, last: int(own.replan(last))


def seen(observation: Any, first: bool) -> Any:
    """Return the thing, colour and state of each cell, the direction, and at the first step the mission's words."""
    cells = [np.eye(count)[observation["image"][..., kind]].ravel() for kind, count in enumerate(KINDS)]
    words = [first and word in observation["mission"].split() for word in WORDS]
    return np.concatenate([*cells, np.eye(4)[observation["direction"]], words])


TASKS = {
    "control": Task(
        of_popgym("position_only_cartpole", "PositionOnlyCartPoleEasy"), controller, lambda x, _: x, 2, 200, 300,
        (0.1, 0.25, 0.5, 0.75, 1.0), lambda _, random: int(random.integers(2)),
    ),
    "recall": Task(
        of_popgym("repeat_previous", "RepeatPreviousEasy"), recaller, lambda card, _: np.eye(4)[card], 4, 51, 300,
        (-0.5, -0.25, 0.25, 0.75, 1.0), lambda card, _: card, 2,
    ),
    "instruction": Task(
        of_babyai, bot, seen, 3, 36, 700, (0.0, 0.25, 0.5, 0.75, 0.95), lambda _, random: int(random.integers(3)),
    ),
}  # fmt: skip


def begun(environment: Any, seed: int) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):  # BabyAI prints how it drew a world
        return environment.reset(seed=seed)[0]


def recorded(task: Task, count: int) -> list[Episode]:
    """Return episodes of players each of whom makes mistakes at another share of the steps."""
    environment, random, episodes = task.environment(), np.random.default_rng(0), []
    for seed in range(count):
        observation, steps, action, over = begun(environment, seed), [], None, False
        skill, play = random.uniform() ** task.power, task.player(environment)
        while not over:
            action = play(observation, action)
            if action >= task.actions or random.uniform() >= skill:
                action = task.mistake(observation, random)
            before = task.observed(observation, not steps)
            observation, reward, ended, cut, _ = environment.step(action)
            steps.append((torch.tensor(before, dtype=torch.float32), action, reward))
            over = ended or cut
        observations, actions, rewards = zip(*steps, strict=True)
        episodes.append(Episode(torch.stack(observations), torch.tensor(actions), torch.tensor(rewards).double()))
    return episodes


def trained(task: Task, layer: str, episodes: Sequence[Episode], learner: str, steps: int, seed: int) -> Policy:
    """Return a policy that has learnt from the episodes."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    options = {"max_length": task.limit} if layer == "attention" else {}
    channels = 1 + task.actions + episodes[0].observations.shape[1]
    model = SequenceLabeler(task.actions, Stack(WIDTH, DEPTH, layer, layer_options=options), Features(channels))
    policy, optimizer = Policy(model), torch.optim.AdamW(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps)
    for _ in range(steps):
        some = [episodes[number] for number in random.integers(len(episodes), size=ROWS)]
        observations, rewards = (pad_sequence([each[k] for each in some], True) for k in (0, 2))
        actions = pad_sequence([each.actions for each in some], True, padding_value=-1)
        logits, _ = model(policy.inputs(observations, actions, rewards * (learner == LEARNERS[0])))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), actions.flatten(), ignore_index=-1).backward()
        optimizer.step()
        schedule.step()
    return policy


def played(task: Task, policy: Policy, wanted: float | None, count: int, temperature: float) -> float:
    """Return the mean return of `count` episodes that are played side by side. wanted: None for a clone."""
    environments, generator = [task.environment() for _ in range(count)], torch.Generator().manual_seed(0)
    looks = [begun(environment, PLAYED_SEED + n) for n, environment in enumerate(environments)]
    state, first = policy.start(wanted or 0.0, count), True
    reward, total, over = np.zeros(count), np.zeros(count), np.zeros(count, bool)
    while not over.all():
        x = torch.tensor(np.stack([task.observed(look, first) for look in looks]), dtype=torch.float32)
        earned = torch.from_numpy(reward * (wanted is not None))
        action, state = policy.act(x, state, earned, temperature=temperature, generator=generator)
        reward, first = np.zeros(count), False
        for n in np.flatnonzero(~over):
            looks[n], reward[n], ended, cut, _ = environments[n].step(int(action[n]))
            over[n] = ended or cut
        total += reward
    return float(total.mean())


def step_of(task: Task, policy: Policy) -> tuple[float, int]:
    """Return the milliseconds of the processor of a step of one agent, and the numbers of its state, at the end."""
    x, state, begin = torch.zeros(1, policy.channels), policy.start(1.0), 0.0
    for step in range(task.limit):
        begin = time.process_time() if step == task.limit - 20 else begin
        _, state = policy.act(x, state)
    took = (time.process_time() - begin) / 20
    return 1e3 * took, sum(leaf.numel() * (1 + leaf.is_complex()) for _, leaf in states.leaves(state.stack))


def main() -> None:
    made = parser(__doc__, TASKS, seeds=True)
    made.add_argument("--layers", nargs="*", choices=LAYERS, default=LAYERS)
    made.add_argument("--learners", nargs="*", choices=LEARNERS, default=LEARNERS)
    options = parse(made)
    results = Results("offline", options)
    count, plays = (20, 2) if options.quick else (EPISODES, PLAYED)
    for name in options.names:
        task = TASKS[name]
        episodes = sorted(recorded(task, count), key=lambda episode: -float(episode.rewards.sum()))
        best, returns = episodes[: count // 10], [float(episode.rewards.sum()) for episode in episodes]
        if not results.has(task=name, learner="recorded"):
            mean, of_best = float(np.mean(returns)), float(np.mean(returns[: len(best)]))
            results.add(task=name, learner="recorded", reached=mean, best=of_best)
        for seed, layer, learner in itertools.product(range(options.seeds), options.layers, options.learners):
            key = {"task": name, "layer": layer, "learner": learner, "seed": seed}
            wanted = task.wanted if learner == LEARNERS[0] else (None,)
            if results.has(**key, **({} if wanted[-1] is None else {"wanted": wanted[-1]})):
                continue
            data = best if learner == LEARNERS[2] else episodes
            trained(task, layer, data, learner, 1, seed)  # kernels are compiled
            begin = time.process_time()
            policy = trained(task, layer, data, learner, 2 if options.quick else task.steps, seed)
            training = time.process_time() - begin
            milliseconds, numbers = step_of(task, policy)
            for target in wanted:
                greedy = None if target != wanted[-1] else played(task, policy, target, plays, 0.0)
                found = {"wanted": target, "reached": played(task, policy, target, plays, 1.0), "greedy": greedy}
                results.add(**key, **found, training=training, step=milliseconds, state=numbers)


if __name__ == "__main__":
    main()
