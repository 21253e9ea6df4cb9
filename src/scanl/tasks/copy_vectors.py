"""Copying vectors of bits."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Flags, Question
from scanl.options import Positive
from scanl.tasks.base import Task, register


@register("copy_vectors")
@dataclass(frozen=True)
class CopyVectors(Task):
    """Copy vectors: repeat vectors of random bits after a mark.

    The input is m vectors, then a step with the mark alone, then m empty steps, at which the vectors are the answers in
    their order. T = 2n + 1 steps; a sequence of fewer than n vectors ends with empty steps without an answer. The
    exam after training has n vectors in every sequence.

    Args:
        length: n, vectors of the longest sequence; trained up to 20 and tested up to 120 in the paper.
        varied: in training m is uniform from 1 to n, as in the paper; otherwise m = n.
        width: bits of a vector.

    inputs: (N, 2n + 1, width + 1) float32, the mark last.   targets: (N, 2n + 1, width) float32, 1 or 0, NaN where no
    answer is wanted.
    Chance: half of the bits are wrong.
    """

    id = "B-copy"
    source = 'Graves, Wayne and Danihelka, "Neural Turing Machines", arXiv:1410.5401, section 4.1'
    metric = "bit error"
    best = 0.0
    chance = 0.5  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    length: Positive = 20
    varied: bool = True
    width: Positive = 8
    vocab_size: None = field(default=None, init=False)

    @property
    def exam(self) -> "CopyVectors":
        return replace(self, varied=False)

    @property
    def question(self) -> Question:
        return Flags(FeatureInputs(self.width + 1), self.width, scores=("bit error",))

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        longest = self.length
        lengths = random.integers(1 if self.varied else longest, longest + 1, (count, 1))
        vectors = random.integers(0, 2, (count, longest, self.width)).astype(np.float32)
        place = np.arange(longest)
        rows = np.arange(count)[:, None]
        inputs = np.zeros((count, 2 * longest + 1, self.width + 1), np.float32)
        inputs[:, :longest, :-1] = np.where((place < lengths)[..., None], vectors, 0)
        inputs[rows, lengths, -1] = 1
        targets = np.full((count, 2 * longest + 1, self.width), np.nan, np.float32)
        targets[rows, lengths + 1 + place] = np.where((place < lengths)[..., None], vectors, np.nan)
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros((*inputs.shape[:2], self.width), np.float32)
        for row, sequence in enumerate(inputs):
            memory, recalled = [], False
            for t, step in enumerate(sequence):
                if recalled and memory:
                    answers[row, t] = memory.pop(0)
                elif not recalled:
                    recalled = step[-1] == 1
                    memory += [] if recalled else [step[:-1]]
        return answers
