"""The adding problem."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import at_least
from scanl.tasks.base import Task, register


@register("adding")
@dataclass(frozen=True)
class Adding(Task):
    """Adding problem: the sum of the two marked numbers in a long sequence.

    x_t = (u_t, m_t) with u_t uniform in (0, 1). The mark m_t is 1 at exactly two steps, else 0: one step is uniform in
    [0, n // 2), the other in [n // 2, n). The answer is the sum of the two marked u.

    Some papers draw both steps anywhere in the sequence.

    Args:
        length: n = T, steps; 100 to 5000 in the literature. Usually called solved below an error of 0.01.

    inputs: (N, n, 2) float32.   targets: (N,) float32.
    Chance: the constant answer 1, the mean of the sum of two uniform numbers; its error is their variance, 2/12.
    """

    id = "B-adding"
    aliases = ("adding_problem",)
    source = 'Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9(8), 1997, section 5.4'
    metric = "mean squared error"
    best = 0.0
    channels: ClassVar[int] = 2

    length: Annotated[int, at_least(2, "because two numbers are added")] = 100
    vocab_size: None = field(default=None, init=False)

    @property
    def chance(self) -> float:
        return 2 / 12

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        half = self.length // 2
        numbers = random.random((count, self.length), np.float32)
        places = np.stack([random.integers(0, half, count), random.integers(half, self.length, count)], 1)
        marks = np.zeros_like(numbers)
        np.put_along_axis(marks, places, 1, axis=1)
        return Batch(np.stack([numbers, marks], 2), np.take_along_axis(numbers, places, 1).sum(1))

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = []
        for sequence in inputs:
            total = np.float32(0)
            for number, mark in sequence:
                if mark == 1:
                    total += number
            answers.append(total)
        return np.array(answers, np.float32)
