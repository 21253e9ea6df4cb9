"""The Mackey-Glass series, whose delay changes at times that nobody knows."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scanl.data.base import register
from scanl.data.questions import FeatureInputs, Numbers
from scanl.options import Positive
from scanl.tasks.stream import Sample, StreamTask

FINE = 10  # steps of Euler's method in a unit of time


def regimes(delays: tuple[int, ...], stay: float, random: np.random.Generator) -> Iterator[tuple[float, int]]:
    """Yield x and its delay, once a unit of time, of dx/dt = 0.2 x(t - delay) / (1 + x(t - delay)^10) - 0.1 x.

    After each unit another delay follows with probability 1 / `stay`. The series goes on from its own past.
    """
    past = deque((1.2 + 0.2 * (random.random(max(delays) * FINE) - 0.5)).tolist(), maxlen=max(delays) * FINE)
    x, delay = 1.2, delays[0]
    while True:
        yield x, delay
        for _ in range(FINE):
            late = past[len(past) - delay * FINE]
            past.append(x)
            x += (0.2 * late / (1 + late**10) - 0.1 * x) / FINE
        if len(delays) > 1 and random.random() * stay < 1:
            delay = int(random.choice([each for each in delays if each != delay]))


@register("mackey_glass_regimes")
@dataclass
class MackeyGlassRegimes(StreamTask):
    """Mackey-Glass with regimes: the value some samples ahead of a chaotic series, whose delay changes now and then.

    The equation and its integration are `mackey_glass`'s. The delay is 17, or 30, for times that are drawn from
    a geometric distribution. A value is tanh(x - 1). The change of the delay is ours.

    Args:
        seed, eval_examples, length: see `StreamTask`.
        first, second: the two delays.
        stay: mean number of samples between two changes.
        ahead: samples from an input to the value to predict.
    """

    source = 'Mackey and Glass, "Oscillation and Chaos in Physiological Control Systems", Science 197, 1977'
    metric = "mean squared error"
    question = Numbers(FeatureInputs(1), 1)

    first: Positive = 17
    second: Positive = 30
    stay: Positive = 2000
    ahead: Positive = 15

    def samples(self, random: np.random.Generator) -> Iterator[Sample]:
        window: deque[float] = deque(maxlen=self.ahead + 1)
        for x, _ in regimes((self.first, self.second), self.stay, random):
            window.append(float(np.tanh(x - 1)))
            if len(window) > self.ahead:
                yield [window[0]], [window[-1]]
