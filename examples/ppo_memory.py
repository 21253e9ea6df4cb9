"""Train agents that need memory, by PPO in one file: CartPole whose velocities are hidden.

    python ppo_memory.py --layer lru --export agent.c

Needs `pip install gymnasium`. Agents act side by side, step by step. Then whole segments are read in one scan, with
`starts` where an episode begins, from the states that the segments began with.
"""

import argparse
from collections import deque

import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical

from scanl.export import write
from scanl.layers import state as states
from scanl.models import Features, SequenceLabeler, Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layer", default="gru", help="a layer of `scanl list`")
parser.add_argument("--env", default="CartPole-v1", help="with actions that are classes")
parser.add_argument("--shown", type=int, nargs="*", default=[0, 2], help="numbers of an observation; others are hidden")
parser.add_argument("--steps", type=int, default=100_000, help="of all agents together")
parser.add_argument("--export", metavar="FILE", help="a new file, .c or .onnx")
options = parser.parse_args()
AGENTS, SEGMENT, EPOCHS, LR, DISCOUNT, TRACE, CLIP = 8, 128, 10, 7e-4, 0.99, 0.98, 0.2
torch.manual_seed(0)
same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
envs = gymnasium.make_vec(options.env, AGENTS, "sync", vector_kwargs=same_step)
# A class for each action, and beside them the value of the state.
model = SequenceLabeler(envs.single_action_space.n + 1, Stack(128, 1, options.layer), Features(len(options.shown)))
optimizer = torch.optim.Adam(model.parameters(), LR)


def shown(observations):
    return torch.as_tensor(np.stack(list(observations))[:, options.shown], dtype=torch.float32)


x, start, state = shown(envs.reset(seed=0)[0]), torch.ones(AGENTS, dtype=torch.bool), model.init_state(AGENTS)
returns, total = deque(maxlen=100), np.zeros(AGENTS)
for step in range(0, options.steps, AGENTS * SEGMENT):
    first, segment = state, []
    with torch.no_grad():
        for _ in range(SEGMENT):
            y, state = model(x[:, None], state, starts=start[:, None])
            choice = Categorical(logits=y[:, 0, :-1])
            action = choice.sample()
            after, reward, ended, cut, about = envs.step(action.numpy())
            total += reward
            reward *= 1 - DISCOUNT  # so that values are about as large as rewards
            for row in np.flatnonzero(cut):  # the value of what would have followed stands for it
                beyond, _ = model(shown(about["final_obs"][[row]])[:, None], states.index(state, [row]))
                reward[row] += DISCOUNT * beyond[0, 0, -1].item()
            returns.extend(total[ended | cut])
            total[ended | cut], over = 0, torch.from_numpy(ended | cut)
            segment.append((x, start, action, choice.log_prob(action), torch.tensor(reward).float(), y[:, 0, -1], over))
            x, start = shown(after), over
        value_after = model(x[:, None], state)[0][:, 0, -1]
    xs, starts, action, log_prob, reward, value, over = (torch.stack(each, 1) for each in zip(*segment, strict=True))
    advantage, trace = torch.zeros_like(value), 0.0
    for t in reversed(range(SEGMENT)):
        error = reward[:, t] + DISCOUNT * ~over[:, t] * value_after - value[:, t]
        advantage[:, t] = trace = error + DISCOUNT * TRACE * ~over[:, t] * trace
        value_after = value[:, t]
    target, gain = advantage + value, (advantage - advantage.mean()) / advantage.std()
    for rows in (rows for _ in range(EPOCHS) for rows in torch.randperm(AGENTS).split(2)):
        y, _ = model(xs[rows], states.index(first, rows), starts=starts[rows])
        choice = Categorical(logits=y[..., :-1])
        ratio = (choice.log_prob(action[rows]) - log_prob[rows]).exp()
        surrogate = torch.minimum(ratio * gain[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * gain[rows])
        optimizer.zero_grad()
        ((y[..., -1] - target[rows]).square() / 2 - surrogate).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"step {step + AGENTS * SEGMENT}: mean return {np.mean(returns or [np.nan]):.1f}", flush=True)
if options.export:
    write(model, options.export)
