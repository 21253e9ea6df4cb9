"""Multi-query associative recall."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Range, above_zero, refuse
from scanl.tasks.base import IGNORED, Task, draw_distinct, register


@register("mqar")
@dataclass(frozen=True)
class MQAR(Task):
    """Multi-query associative recall: recall the value of every key.

    The sequence begins with D pairs of a key and a value. Keys (1 ... V/2 - 1) and values (V/2 ... V - 1) are each
    drawn without replacement. Then each key occurs once more as a query, and the answer there is its value. A query is
    at an even distance 2i from the end of the pairs; i = 0, 1, ... is drawn without replacement with probability
    proportional to (i + 1)^(a - 1). T = n steps.

    Args:
        length: n; 64 to 512 in the paper.
        num_pairs: D; 4 to 64 in the paper. A recurrent model's state has to grow with it.
        vocab_size: V.
        power: a; a small value puts most queries early, 1 makes them uniform.
        random_non_queries: fill the steps after the pairs that are not queries with uniformly random tokens, which may
            be keys, as by default in the authors' program. False fills them with 0, which is easier, as in their
            figure 2.

    inputs, targets: (N, n) int64; scored at the D queries.
    Chance: 1 of V/2 values. A model that recalls the values but not their keys scores 1 of D.
    """

    id = "B-mqar"
    aliases = ("multi_query_associative_recall",)
    source = (
        'Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv:2312.04927, '
        "section 4 and its program's multiquery_ar"
    )

    length: Annotated[int, Range("an even number of at least 4", lambda n, _: n >= 4 and n % 2 == 0)] = 64
    num_pairs: int = 4
    vocab_size: Annotated[
        int, Range("an even number of at least 4 because half are keys", lambda size, _: size >= 4 and size % 2 == 0)
    ] = 8192
    power: Annotated[float, above_zero] = 0.01
    random_non_queries: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        max_pairs = min(self.length // 4, self.vocab_size // 2 - 1)
        if not 1 <= self.num_pairs <= max_pairs:
            because = f"because of length={self.length} and vocab_size={self.vocab_size}"
            refuse(type(self), "num_pairs", self.num_pairs, f"from 1 to {max_pairs} {because}")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        half, begin = self.vocab_size // 2, 2 * self.num_pairs
        keys = 1 + draw_distinct(random, count, half - 1, self.num_pairs)
        values = half + draw_distinct(random, count, self.vocab_size - half, self.num_pairs)
        places = (self.length - begin) // 2
        weights = np.arange(1, places + 1) ** (self.power - 1.0)
        queries = begin + 2 * draw_distinct(random, count, places, self.num_pairs, weights)
        inputs = np.zeros((count, self.length), np.int64)
        if self.random_non_queries:
            inputs = random.integers(0, self.vocab_size, inputs.shape)
        inputs[:, 0:begin:2] = keys
        inputs[:, 1:begin:2] = values
        np.put_along_axis(inputs, queries, keys, axis=1)
        targets = np.full_like(inputs, IGNORED)
        np.put_along_axis(targets, queries, values, axis=1)
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs.tolist(), answers, strict=True):
            memory = {}
            for t, token in enumerate(sequence):
                if t >= 2 * self.num_pairs:
                    answer[t] = memory.get(token, 0)
                elif t % 2:
                    memory[sequence[t - 1]] = token
        return answers
