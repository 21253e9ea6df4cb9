"""Parity."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Positive
from scanl.tasks.base import IGNORED, Task, register


@register("parity")
@dataclass(frozen=True)
class Parity(Task):
    """Parity: whether the number of ones so far is odd, at every step or at the last.

    Bits are 0 or 1 with equal probability. The answer at step t is the exclusive or of bits 1 to t. T = n steps.
    Every prefix is a complete example too, so training at n trains every length from 1 to n.
    Scoring the last step only is harder. It is the form of xLSTM's program, where in addition the lengths in a batch
    differ and the answer has an extra step.

    Args:
        length: n; trained up to 40 and tested up to 256 in the literature.
        last_only: score the last step only.

    inputs, targets: (N, n) int64; scored at every step, or at the last.
    Chance: 1 of 2.
    """

    id = "B-parity"
    source = (
        'Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, section 4.1; '
        'Delétang et al., "Neural Networks and the Chomsky Hierarchy", arXiv:2207.02098'
    )

    length: Positive = 40
    last_only: bool = False
    vocab_size: int = field(default=2, init=False)

    @property
    def chance(self) -> float:
        return 1 / 2

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        bits = random.integers(0, 2, (count, self.length))
        targets = np.bitwise_xor.accumulate(bits, axis=1)
        if self.last_only:
            targets[:, :-1] = IGNORED
        return Batch(bits, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs, answers, strict=True):
            odd = False
            for t, bit in enumerate(sequence):
                odd = odd != (bit == 1)
                answer[t] = int(odd)
        return answers
