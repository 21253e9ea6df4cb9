"""Learn to act from recorded episodes alone, then play for a return that is wanted: a decision transformer's state.

    python offline_decisions.py --layer lru --export agent.c

Needs `pip install gymnasium`. Players of different skill have played CartPole. The model does not see the velocities
that they saw. At a step it reads the return to go, the action before and the observation.
"""

import argparse

import gymnasium
import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from scanl.export import write
from scanl.models import Features, Policy, SequenceLabeler, Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layer", default="lru", help="a layer of `scanl list`")
parser.add_argument("--episodes", type=int, default=1000, help="to learn from")
parser.add_argument("--steps", type=int, default=300, help="of training")
parser.add_argument("--played", type=int, default=20, help="episodes for each wanted return")
parser.add_argument("--export", metavar="FILE", help="a new file, .c or .onnx")


def recorded(environment, count):
    """Return observations, actions and rewards of episodes. Each has another share of actions drawn at random."""
    random, episodes = np.random.default_rng(0), []
    for seed in range(count):
        observation, _ = environment.reset(seed=seed)
        skill, steps, over = random.uniform(), [], False
        while not over:
            place, speed, angle, turning = environment.unwrapped.state
            action = int(angle + turning / 2 + place / 20 + speed / 10 > 0)
            if random.uniform() > skill:
                action = int(random.integers(2))
            after, reward, ended, cut, _ = environment.step(action)
            steps.append((observation, action, reward))
            observation, over = after, ended or cut
        episodes.append([torch.tensor(np.array(values)) for values in zip(*steps, strict=True)])
    return episodes


def main():
    options = parser.parse_args()
    torch.manual_seed(0)
    environment = gymnasium.make("CartPole-v1", max_episode_steps=200)
    environment = gymnasium.wrappers.TransformObservation(environment, lambda values: values[[0, 2]], None)
    episodes = recorded(environment, options.episodes)
    print(f"{len(episodes)} episodes, mean return {np.mean([float(rewards.sum()) for *_, rewards in episodes]):.0f}")
    model = SequenceLabeler(2, Stack(64, 1, options.layer), Features(1 + 2 + 2))  # return, action before, observation
    policy = Policy(model, unit=200)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps)
    for _ in range(options.steps):
        some = [episodes[number] for number in torch.randint(len(episodes), (32,))]
        observations, actions, rewards = (pad_sequence(values, True, 0) for values in zip(*some, strict=True))
        valid = pad_sequence([torch.ones(len(values)) for _, values, _ in some], True).bool()
        logits, _ = model(policy.inputs(observations, actions, rewards))
        optimizer.zero_grad()
        F.cross_entropy(logits[valid], actions[valid]).backward()
        optimizer.step()
        schedule.step()
    for wanted in (20, 50, 100, 150, 200):
        returns = [policy.play(environment, wanted, seed=10**6 + seed) for seed in range(options.played)]
        print(f"wanted {wanted}, reached {np.mean(returns):.0f}")
    if options.export:
        write(model, options.export)


if __name__ == "__main__":
    main()
