"""Waves sampled at irregular times."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Share, at_least
from scanl.tasks.base import Task, draw_distinct, register

PERIODS = (7.3, 19.1)  # in points of the grid; no multiples of one another, or of the distance of two points


@register("irregular")
@dataclass(frozen=True)
class Irregular(Task):
    """Irregular samples: the value of a wave at a later time, from samples with many gaps.

    A wave is s(t) = Σ_k A_k cos(2π t / P_k) + B_k sin(2π t / P_k) with periods P = 7.3 and 19.1, the same for all
    examples, and with A_k and B_k normal of variance 1/2. So s(t) has variance 1. It is sampled at t = 1 ... n / keep.
    n of these samples are kept, any with equal probability. Each step shows a sample and the time since the step
    before; the first, since t = 0. The last step shows only the time. The answer is the value there.

    The time is also the duration of the step (`timespans`) for a stack whose layers all take one. Other layers get it
    as an input alone.

    Args:
        length: n = T, steps.
        keep: the fraction of samples that are kept; at most 1, which is regular sampling.

    inputs: (N, n, 3) float32: the value, 1 at the last step and else 0, the time.   targets: (N,) float32.
    Chance: the constant answer 0; its error is the variance, 1.
    """

    id = "B-irregular"
    source = (
        'this library; half of the frames are dropped as in the sizes of Hasani et al., "Closed-form Continuous-time '
        'Neural Networks", arXiv:2106.13898'
    )
    metric = "mean squared error"
    best = 0.0
    channels: ClassVar[int] = 3

    length: Annotated[int, at_least(2 * len(PERIODS) + 1, "because four samples determine the wave")] = 32
    keep: Share = 0.5
    vocab_size: None = field(default=None, init=False)

    @property
    def chance(self) -> float:
        return 1.0

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        points = round(self.length / self.keep)
        times = 1 + np.sort(draw_distinct(random, count, points, self.length), axis=1)
        waves = random.normal(0, np.sqrt(1 / len(PERIODS)), (2, count, 1, len(PERIODS)))
        turns = 2 * np.pi * times[..., None] / np.array(PERIODS)
        values = (waves[0] * np.cos(turns) + waves[1] * np.sin(turns)).sum(2)
        inputs = np.zeros((count, self.length, self.channels), np.float32)
        inputs[:, :-1, 0] = values[:, :-1]
        inputs[:, -1, 1] = 1
        inputs[..., 2] = np.diff(times, axis=1, prepend=0)
        return Batch(inputs, values[:, -1].astype(np.float32), timespans=inputs[..., 2])

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = []
        for sequence in inputs.astype(np.float64):
            phases = np.exp(2j * np.pi * np.outer(sequence[:, 2].cumsum(), 1 / np.array(PERIODS)))
            rows = np.hstack([np.real(phases), np.imag(phases)])
            wave, *_ = np.linalg.lstsq(rows[:-1], sequence[:-1, 0])
            answers.append(rows[-1] @ wave)
        return np.array(answers, np.float32)
