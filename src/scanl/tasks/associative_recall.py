"""Associative recall."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import at_least, multiple_of
from scanl.tasks.base import IGNORED, Task, register


@register("associative_recall")
@dataclass(frozen=True)
class AssociativeRecall(Task):
    """Associative recall: find the value of one key among many key-value pairs.

    Each sequence draws its own map from keys to values, uniformly. It shows n / 2 pairs of a uniformly random key and
    its value (keys repeat), then the prefix "=>" and a query key. The query is any key seen, with equal probability;
    the answer is its value. T = n + 2 steps. The K = (V - 2) // 2 keys are 0 ... K - 1, the values K ... 2K - 1, and
    the prefix V - 1. Token V - 2 is the "." that Fu et al. count; it never occurs here.

    Fu et al. have two forms. With V = 20 and n = 40 there are 9 values and chance is 11 %; this is the default here.
    With V = 10 and n = 20 there are 4 values and chance is 25 %; this is easier, and it is the form of their table 2.
    Their program trains on every next token; here only the answer is scored.

    Args:
        length: n, tokens of the pairs.
        vocab_size: V.

    inputs, targets: (N, n + 2) int64; scored at the last step.
    Chance: 1 of K values.
    """

    id = "B-ar"
    source = (
        'Ba et al., "Using Fast Weights to Attend to the Recent Past", arXiv:1610.06258, section 4.1; as in '
        'Fu et al., "Hungry Hungry Hippos", arXiv:2212.14052, section 3.1'
    )

    length: Annotated[int, multiple_of(2, "because of the pairs")] = 40
    vocab_size: Annotated[int, at_least(4, "because of a key, a value and two special tokens")] = 20

    @property
    def chance(self) -> float:
        return 1 / ((self.vocab_size - 2) // 2)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        size = (self.vocab_size - 2) // 2
        values = random.integers(size, 2 * size, (count, size))
        keys = random.integers(0, size, (count, self.length // 2))
        present = np.zeros((count, size))
        np.put_along_axis(present, keys, 1, axis=1)
        queries = (present * (1 + random.random((count, size)))).argmax(1)  # at least 1 where seen, uniform there
        inputs = np.empty((count, self.length + 2), np.int64)
        inputs[:, 0:-2:2] = keys
        inputs[:, 1:-2:2] = np.take_along_axis(values, keys, 1)
        inputs[:, -2] = self.vocab_size - 1
        inputs[:, -1] = queries
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = values[np.arange(count), queries]
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs.tolist(), answers, strict=True):
            *pairs, _prefix, key = sequence
            answer[-1] = pairs[pairs.index(key) + 1]
        return answers
