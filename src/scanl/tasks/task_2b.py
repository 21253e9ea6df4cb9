"""Task 2b of the LSTM paper."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.questions import Class, FeatureInputs, Question
from scanl.options import Natural, at_least
from scanl.tasks.base import Task, register


@register("task_2b")
@dataclass(frozen=True)
class Task2b(Task):
    """Task 2b: the sign of the first vector, after many others.

    The first of n + 1 vectors is e_1 or -e_1, with equal probability. The others are one-hot, uniform in e_1 ... e_p;
    with `exclude_first`, in e_2 ... e_p, so that no distractor looks like a first vector. The answer is class 1 for
    e_1 and 0 for -e_1. T = n + 1 steps. Hochreiter and Schmidhuber have p = n and predict every next vector.

    Args:
        length: n; 1024, 8192 and 2^20 in the paper of Martin and Cundy.
        width: p.
        exclude_first: draw no distractor e_1.

    inputs: (N, n + 1, p) float32.   targets: (N,) int64.
    Chance: 1 of 2.
    """

    id = "B-task2b"
    source = (
        'Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997, task 2b; as in Martin and Cundy, "Parallelizing '
        'Linear Recurrent Neural Nets Over Sequence Length", arXiv:1709.04057, section 4.3'
    )

    length: Natural = 1024
    width: Annotated[int, at_least(2)] = 128
    exclude_first: bool = False
    vocab_size: None = field(default=None, init=False)

    @property
    def question(self) -> Question:
        return Class(FeatureInputs(self.width), 2)

    @property
    def chance(self) -> float:
        return 1 / 2

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        answers = random.integers(0, 2, count)
        distractors = random.integers(int(self.exclude_first), self.width, (count, self.length))
        inputs = np.zeros((count, self.length + 1, self.width), np.float32)
        inputs[:, 0, 0] = 2 * answers - 1
        np.put_along_axis(inputs[:, 1:], distractors[..., None], 1, axis=2)
        return Batch(inputs, answers)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        return (inputs[:, 0, 0] > 0).astype(np.int64)
