"""The capacity task."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers, Question
from scanl.options import at_least
from scanl.tasks.base import Task, register

BAND = 10  # cycles in a window, at most
DELAYS = 5
WINDOWS = 2.5  # of a sequence


@register("capacity")
@dataclass(frozen=True)
class Capacity(Task):
    """Capacity: at every step the input of five delays, from none to a whole window.

    The input is white noise with at most 10 cycles in a window of n steps. It begins at 0, and its largest absolute
    value is 1. The answers are the inputs 0, n/4, n/2, 3n/4 and n steps ago, rounded to whole steps, from step n on.
    T = 2.5 n steps, rounded down. The authors use 200 fixed sequences; here they are new ones in every step.

    Args:
        length: n, steps of the window; 25 to 1600 and beyond in the paper.

    inputs: (N, T, 1) float32.   targets: (N, T, 5) float32, NaN before step n.
    Chance: the variance of the answers, measured on 1,000 generated sequences.
    """

    id = "B-capacity"
    source = 'Voelker et al., "Legendre Memory Units", NeurIPS 2019, section 4.1'
    metric = "mean squared error"
    best = 0.0
    channels: ClassVar[int] = 1

    length: Annotated[int, at_least(20, "because of the 10 cycles of a window")] = 100
    vocab_size: None = field(default=None, init=False)

    @property
    def question(self) -> Question:
        return Numbers(FeatureInputs(1), DELAYS)

    @cached_property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float(np.nanvar(self.generate(1000, 0).targets))

    @property
    def delays(self) -> NDArray[np.int64]:
        """The delays in steps."""
        return np.round(np.linspace(0, self.length, DELAYS)).astype(np.int64)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        steps = int(WINDOWS * self.length)
        waves = np.zeros((count, steps // 2 + 1), np.complex128)
        loud = int(BAND * WINDOWS)
        waves[:, 1 : loud + 1] = random.normal(size=(count, loud)) + 1j * random.normal(size=(count, loud))
        signal = np.fft.irfft(waves, steps, axis=1)
        signal -= signal[:, :1]
        signal /= np.abs(signal).max(1, keepdims=True)
        inputs = signal.astype(np.float32)
        targets = np.full((count, steps, DELAYS), np.nan, np.float32)
        for place, delay in enumerate(self.delays):
            targets[:, self.length :, place] = inputs[:, self.length - delay : steps - delay]
        return Batch(inputs[..., None], targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros((*inputs.shape[:2], DELAYS), np.float32)
        for t in range(self.length, inputs.shape[1]):
            for place in range(DELAYS):
                answers[:, t, place] = inputs[:, t - round(place * self.length / 4), 0]
        return answers
