"""A policy: a labeler of steps that chooses actions to reach a return."""

from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import renewed
from scanl.layers.state import State, loadable
from scanl.models.decoding.sampling import as_generator, as_limit, check_options, sample
from scanl.models.heads.labeler import SequenceLabeler
from scanl.models.inputs import Features
from scanl.ops import linear_scan
from scanl.options import above_zero, checked
from scanl.whole import whole_number


@loadable
class PolicyState(NamedTuple):
    """The state of a policy between two steps of B episodes.

    stack: the model's state.   to_go: (B,) the return to go when `action` was chosen.
    action: (B,) int64, the last action; -1 before the first step, where `to_go` is the target.   target: (B,) the
    return to reach in each episode.
    """

    stack: State
    to_go: Tensor
    action: Tensor
    target: Tensor


class Environment(Protocol):
    """An environment with Gymnasium's interface."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: int, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


class Policy:
    """Choose actions so that an episode reaches a return, with a model that has learnt from recorded episodes.

    A step t has the return to go, the action before, and the observation, in the layout of the source `atari`:

        R_1 = target,  R_{t+1} = R_t - r_t,    x_t = [R_t / unit, onehot(a_{t-1}), o_t],    a_t ~ softmax(model(x)_t)

    with zeros for the action before the first. The model predicts the action that players took when this return was
    still to come. A step costs the same, however long the episode is.

    Source: Chen et al., "Decision Transformer", arXiv:2106.01345, algorithm 1. There a step is three tokens and
    attention reads the last K steps again; here it is one step of a recurrence.

    Args:
        model: a labeler of features with one class for each action, such as `scanl train --data atari` trains.
            `Policy` puts it into evaluation mode.
        unit: returns are divided by it, as in training.
    """

    @checked("policy")
    def __init__(self, model: SequenceLabeler, *, unit: Annotated[float, above_zero] = 1.0) -> None:
        if not isinstance(model.inputs, Features):
            raise ConfigError("policy: the model reads tokens, expected features: a return, an action, an observation")
        self.actions: int = model.head.out_features
        self.channels = model.inputs.channels - 1 - self.actions
        if self.channels < 1:
            raise ConfigError(
                f"policy: the model reads {model.inputs.channels} channels, expected at least {2 + self.actions}: the "
                f"return, {self.actions} for the action before, and the observation"
            )
        self.model, self.unit = model.eval(), unit

    def inputs(self, observations: Tensor, actions: Tensor, rewards: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return what the model reads at each step of recorded episodes, (B, T, C), to learn their actions from.

        observations: (B, T, ...), each flattened.   actions: (B, T) int64, taken after the observations; -1 at padding.
        rewards: (B, T), of the actions.   starts: (B, T) bool, True at the first step of an episode; a row begins one
        whether its first is True or not. An episode counts the rewards up to its last step in the row.
        """
        first = torch.zeros_like(actions, dtype=torch.bool) if starts is None else starts
        if observations.shape[:2] != actions.shape or observations.shape[2:].numel() != self.channels:
            raise ShapeError(
                f"policy: observations has shape {tuple(observations.shape)}, expected {tuple(actions.shape)} of "
                f"actions and {self.channels} numbers for each step"
            )
        for name, values, kind in (("rewards", rewards, rewards.dtype), ("starts", first, torch.bool)):
            if values.shape != actions.shape or values.dtype != kind:
                raise ShapeError(
                    f"policy: {name} is {values.dtype} {tuple(values.shape)}, expected {kind} {tuple(actions.shape)} "
                    "because of actions"
                )
        goes_on = F.pad(~first, (0, 1))[:, 1:]  # whether the next step is of the same episode
        to_go, _ = linear_scan(rewards.double(), goes_on.double(), reverse=True)
        before = F.pad(actions, (1, 0), value=-1)[:, :-1].masked_fill(first, -1)
        return self._read(to_go, before, observations.reshape(*actions.shape, self.channels))

    def _read(self, to_go: Tensor, last_action: Tensor, observation: Tensor) -> Tensor:
        """Return the inputs (..., C) of steps. last_action: (...,), -1 where there is none."""
        one_hot = F.one_hot(last_action + 1, self.actions + 1)[..., 1:]  # zeros for -1
        parts = (to_go[..., None] / self.unit, one_hot, observation)
        return torch.cat([values.to(self.model.head.weight) for values in parts], -1)

    def start(self, target: float | Tensor, batch_size: int = 1) -> PolicyState:
        """Return the state before an episode. target: the return to reach, a number or (B,)."""
        weight = self.model.head.weight
        to_go = torch.as_tensor(target, dtype=torch.float64, device=weight.device)
        if to_go.shape not in ((), (batch_size,)):
            raise ShapeError(f"policy: target has shape {tuple(to_go.shape)}, expected () or ({batch_size},)")
        no_action = torch.full((batch_size,), -1, device=weight.device)
        stack = self.model.init_state(batch_size, device=weight.device)
        return PolicyState(stack, to_go.expand(batch_size), no_action, to_go.expand(batch_size))

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        state: PolicyState,
        reward: float | Tensor = 0.0,
        *,
        starts: Tensor | None = None,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, PolicyState]:
        """Return the next actions (B,) int64 and the state after them.

        observation: (B, ...), flattened to (B, C).   reward: of the action before, a number or one for each episode.
        starts: (B,) bool, True where the observation is the first of another episode, with the same target; the reward
        was that of the episode before, and counts no more.
        temperature: divides the logits; 0 takes the likeliest action.   generator: of random numbers.
        """
        check_options("policy", temperature)
        rows = len(state.action)
        if observation.shape[:1] != (rows,) or observation.shape[1:].numel() != self.channels:
            raise ShapeError(
                f"policy: observation has shape {tuple(observation.shape)}, expected ({rows}, ...) with "
                f"{self.channels} numbers for each episode"
            )
        weight = self.model.head.weight
        reward = torch.as_tensor(reward, dtype=torch.float64, device=weight.device)
        if starts is not None:
            state = renewed("policy", state, partial(self.start, state.target), starts, observation)
            reward = torch.where(starts, 0, reward)
        to_go = state.to_go - reward
        x = self._read(to_go, state.action, observation.reshape(rows, -1))
        logits, stack = self.model(x[:, None], state.stack)
        action = sample(logits[:, 0], temperature, generator=generator)
        return action, PolicyState(stack, to_go, action, state.target)

    def play(
        self,
        environment: Environment,
        target: float,
        *,
        max_steps: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> float:
        """Play one episode of an environment with Gymnasium's interface, and return its return.

        max_steps: None for no limit.   seed: of the environment and of the choice of actions.
        """
        device = self.model.head.weight.device
        seed = None if seed is None else whole_number("policy", "seed", seed)
        max_steps, generator = as_limit("policy", "max_steps", max_steps), as_generator("policy", seed, device)
        observation, _ = environment.reset(seed=seed)
        state, reward, total, step, over = self.start(target), 0.0, 0.0, 0, False
        while not over and (max_steps is None or step < max_steps):
            observations = torch.as_tensor(observation, device=device)[None]
            action, state = self.act(observations, state, reward, temperature=temperature, generator=generator)
            observation, reward, ended, cut, _ = environment.step(int(action))
            total, step, over = total + float(reward), step + 1, bool(ended or cut)
        return total
