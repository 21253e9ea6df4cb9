"""T-maze: which way to turn at the end of a corridor, as a sign at its beginning said."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.data.questions import Class, FeatureInputs, Question
from scanl.options import Natural, within
from scanl.tasks.base import Task, register

POSITION = 8  # bits of the position


@register("t_maze")
@dataclass(frozen=True)
class TMaze(Task):
    """T-maze: the turn at the end of a corridor of n places, from a sign that is seen at the first place alone.

    A step is the view from one place on the straight way: two bits of the sign, 01 for up and
    10 for down, then 00; eight bits of the place as a Gray code, i xor i // 2, the highest first; and distractors,
    random bits, which are 0 at the first place. The answer is class 0 for up and 1 for down. T = n steps.

    In the paper's maze an agent also learns to walk on, from rewards: -0.1 a step, 4 for the right turn, -1 for the
    other. Here the way is given, and only the turn is the target, so no reward is needed.

    Args:
        length: n; 120 to 200 in the paper.
        distractors: random bits of a step.

    inputs: (N, n, 10 + distractors) float32.   targets: (N,) int64.
    Chance: 1 of 2.
    """

    id = "B-tmaze"
    source = (
        'Bakker, "Reinforcement Learning with Long Short-Term Memory", 2001; as in Pramanik et al., "AGaLiTe: '
        'Approximate Gated Linear Transformers for Online Reinforcement Learning", arXiv:2310.15719'
    )

    length: Annotated[int, within(1, 2**POSITION, f", the places of {POSITION} bits")] = 160
    distractors: Natural = 6
    vocab_size: None = field(default=None, init=False)

    @property
    def question(self) -> Question:
        return Class(FeatureInputs(2 + POSITION + self.distractors), 2)

    @property
    def chance(self) -> float:
        return 1 / 2

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        answers = random.integers(0, 2, count)
        places = np.arange(self.length)
        bits = (places ^ places >> 1)[:, None] >> np.arange(POSITION)[::-1] & 1
        signs = np.zeros((count, self.length, 2))
        signs[np.arange(count), 0, 1 - answers] = 1
        noise = random.integers(0, 2, (count, self.length, self.distractors))
        noise[:, 0] = 0
        inputs = np.concatenate([signs, np.broadcast_to(bits, (count, *bits.shape)), noise], -1)
        return Batch(inputs.astype(np.float32), answers)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        return np.array([0 if tuple(row[0][:2]) == (0, 1) else 1 for row in inputs])
