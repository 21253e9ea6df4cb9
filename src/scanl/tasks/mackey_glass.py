"""The Mackey-Glass series."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import register
from scanl.data.fixed import FixedPart, FixedRows, Parts
from scanl.data.questions import FeatureInputs, Numbers

FORECAST_STEPS = 15
SERIES, STEPS, DROPPED = 128, 5000, 100


def euler(history: NDArray[np.float64], start: float, steps: int, fine: int = 10) -> NDArray[np.float64]:
    """Return dx/dt = 0.2 x(t - delay) / (1 + x(t - delay)^10) - 0.1 x of several series: (S, steps), once a unit.

    history: (S, delay * fine) values before the first, `fine` a unit of time.   start: the first value.
    """
    count, late = history.shape
    x = np.empty((late + steps * fine, count))
    x[:late] = history.T
    x[late] = start
    for begin in range(late, len(x) - 1, late):
        delayed = x[begin - late : min(begin, len(x) - 1 - late)]  # one delay before each of the next steps
        for t, gain in enumerate(0.2 * delayed / (1 + delayed**10), begin):
            x[t + 1] = x[t] + (gain - 0.1 * x[t]) / fine
    return x[late::fine].T


@register("mackey_glass")
@dataclass
class MackeyGlass(FixedRows):
    """Mackey-Glass: the value of a chaotic series 15 steps ahead, at every step.

    The delay is 17. Each of 128 series begins at 1.2, after a history of 1.2 with uniform noise of width 0.2. It is
    integrated by Euler's method with ten steps a unit. One value a unit is kept, as tanh(x - 1), after the first 100;
    the mean over all series is subtracted. 32 series are for training, 32 for validation, 64 for the test.
    T = 5000 steps. Voelker et al. carry the value of a series on to the next one.
    The error divided by the mean square of the answers is the square of the published NRMSE.

    Args:
        seed, eval_examples: see `FixedRows`.   folder: not used.
        series_seed: of the noise.
        delay: of the equation.
    Chance: the mean square of the answers, measured.
    """

    id = "B-mackeyglass"
    source = (
        'Voelker et al., "Legendre Memory Units", NeurIPS 2019, section 4.3; Mackey and Glass, "Oscillation and Chaos '
        'in Physiological Control Systems", Science 197, 1977'
    )
    metric = "mean squared error"
    question = Numbers(FeatureInputs(1), 1)
    steps = STEPS

    series_seed: int = 0
    delay: int = 17

    def read(self) -> Parts:
        noise = np.random.default_rng(self.series_seed).random((SERIES, self.delay * 10)) - 0.5
        series = np.tanh(euler(1.2 + 0.2 * noise, 1.2, DROPPED + STEPS + FORECAST_STEPS) - 1)[:, DROPPED:]
        series = (series - series.mean()).astype(np.float32)[..., None]
        bounds = (0, 32, 64, SERIES)
        inputs, answers = series[:, :-FORECAST_STEPS], series[:, FORECAST_STEPS:]
        return Parts(*(FixedPart(inputs[a:b], answers[a:b]) for a, b in itertools.pairwise(bounds)))
