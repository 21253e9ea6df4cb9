"""AdamW as language models use it, and its learning rate over a run."""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from scanl.layers import param_groups
from scanl.learning.run.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with betas (0.9, 0.95); in the groups of `param_groups`."""
    return torch.optim.AdamW(
        param_groups(model),
        lr=config.optimiser.lr,
        weight_decay=config.optimiser.weight_decay,
        betas=(0.9, 0.95),
        fused=True,
    )


@dataclass(frozen=True)
class Plan:
    """How long a run is: `steps` in all. With a budget of minutes it is revised on the way, without a jump.

    since, done: the step of the last revision, and the part of the run that was done by then.
    """

    steps: int
    since: int = 0
    done: float = 0.0

    def progress(self, step: int) -> float:
        """The part of the run that is done before a step, from 0 to 1."""
        return self.done + (1 - self.done) * min(1.0, (step - self.since) / (self.steps - self.since))

    def revised(self, step: int, steps: int) -> "Plan":
        """The same progress at `step`, and another number of steps in all."""
        return Plan(steps, step, self.progress(step))

    def cut(self, steps: int) -> "Plan":
        """The same run, ended after so many steps."""
        return replace(self, steps=steps)


UNKNOWN = Plan(10**9)  # until a budget of minutes has become steps


def rate(plan: Plan, warmup: int, step: int) -> float:
    """The learning rate of a step (from 0) as a fraction of the peak: linear warm-up under half a cosine to zero.

    The warm-up lasts at most a tenth of all steps.
    """
    warm = min(1.0, (step + 1) / (min(warmup, plan.steps // 10) + 1))
    return warm * 0.5 * (1 + math.cos(math.pi * plan.progress(step)))
