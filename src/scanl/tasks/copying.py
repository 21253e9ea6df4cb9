"""The copy memory task."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Positive, at_least
from scanl.tasks.base import IGNORED, Task, register

BLANK = 0


@register("copy")
@dataclass(frozen=True)
class Copying(Task):
    """Copy memory task: repeat the first symbols after a long blank.

    The input is K symbols, each uniform in 1 ... V - 2, then n blanks (0), then K markers (V - 1). The answers at the
    markers are the symbols in order. T = n + 2K steps. Arjovsky et al. show n - 1 blanks, one marker and K blanks, and
    score every step; this task has the form of S4's program.

    Args:
        length: n, number of blanks; 100 to 2000 in the literature.
        num_symbols: K.
        vocab_size: V: blank, V - 2 symbols, marker.

    inputs, targets: (N, n + 2K) int64; scored at the last K steps.
    Chance: 1 of V - 2 symbols, which is a cross entropy of ln(V - 2) nats at these steps.
    """

    id = "B-copy"
    aliases = ("copy_memory", "copy_memory_task")
    source = 'Arjovsky et al., "Unitary Evolution Recurrent Neural Networks", arXiv:1511.06464, section 5.1'

    length: Annotated[int, at_least(0, "blanks")] = 100
    num_symbols: Positive = 10
    vocab_size: Annotated[int, at_least(3, "because of the blank and the marker")] = 10

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        size, marker = self.num_symbols, self.vocab_size - 1
        inputs = np.full((count, self.length + 2 * size), BLANK, np.int64)
        targets = np.full_like(inputs, IGNORED)
        inputs[:, :size] = targets[:, -size:] = random.integers(1, marker, (count, size))
        inputs[:, -size:] = marker
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs, answers, strict=True):
            memory = []
            for t, token in enumerate(sequence):
                if token == self.vocab_size - 1:
                    answer[t] = memory.pop(0)
                elif token != BLANK:
                    memory.append(token)
        return answers
