"""The length of a run, and the learning rate of each step."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RunLength:
    """Length of a run: `steps` in total. A budget of minutes revises it during the run, without a jump in progress.

    since, done: step of the last revision, and the fraction of the run done by then.
    """

    steps: int
    since: int = 0
    done: float = 0.0

    def progress(self, step: int) -> float:
        """Return the fraction of the run done before a step, from 0 to 1."""
        return self.done + (1 - self.done) * min(1.0, (step - self.since) / (self.steps - self.since))

    def revised(self, step: int, steps: int) -> "RunLength":
        """Return a plan with the same progress at `step` and another total number of steps."""
        return RunLength(steps, step, self.progress(step))

    def cut(self, steps: int) -> "RunLength":
        """Return this plan, ended after `steps` steps."""
        return replace(self, steps=steps)


UNKNOWN_PLAN = RunLength(10**9)  # until a budget of minutes is converted to steps


def rate(plan: RunLength, warmup: int, step: int) -> float:
    """Return the learning rate of a step (from 0) as a fraction of the peak: linear warm-up times cosine decay to zero.

    The warm-up lasts at most a tenth of all steps.
    """
    warm = min(1.0, (step + 1) / (min(warmup, plan.steps // 10) + 1))
    return warm * 0.5 * (1 + math.cos(math.pi * plan.progress(step)))
