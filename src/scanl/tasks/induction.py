"""Induction heads."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import at_least
from scanl.tasks.base import IGNORED, Task, register


@register("induction")
@dataclass(frozen=True)
class Induction(Task):
    """Induction heads: recall the token that followed the special token before.

    Tokens are uniform in 0 ... V - 2. The special token V - 1 occurs at the last step, and at one uniformly random step
    before the last two. The answer, at the last step, is the token after the first occurrence. T = n steps.
    This is the form of Gu and Dao. Fu et al. count 20 tokens, one of them a second special token that never occurs, and
    their program trains on every next token, not on the answer alone.

    Args:
        length: n; trained at 256 and tested from 64 to 2^20 by Gu and Dao.
        vocab_size: V, the special token included.

    inputs, targets: (N, n) int64; scored at the last step.
    Chance: 1 of V - 1 tokens.
    """

    id = "B-induction"
    aliases = ("induction_head",)
    source = (
        'Olsson et al., "In-context Learning and Induction Heads", arXiv:2209.11895; '
        'sizes of Gu and Dao, "Mamba", arXiv:2312.00752, section 4.1.2'
    )

    length: Annotated[int, at_least(3, "because of the pair and the question")] = 256
    vocab_size: Annotated[int, at_least(2, "because of the special token")] = 16

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        special = self.vocab_size - 1
        inputs = random.integers(0, special, (count, self.length))
        rows, places = np.arange(count), random.integers(0, self.length - 2, count)
        inputs[rows, places] = inputs[:, -1] = special
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = inputs[rows, places + 1]
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs.tolist(), answers, strict=True):
            answer[-1] = sequence[sequence.index(sequence[-1]) + 1]
        return answers
