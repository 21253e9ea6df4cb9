"""Word problem of a symmetric group."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Positive, between
from scanl.tasks.base import Task, register


@register("word_problem")
@dataclass(frozen=True)
class WordProblem(Task):
    """Word problem of the symmetric group S_n: the product of all permutations so far, at every step.

    A token is one of the n! permutations of n things, in lexicographic order; all are equally probable. The answer at
    step t is the permutation p_t ∘ ... ∘ p_1. T = n steps. S_2 is parity; S_5 is the least one that is not solvable.

    Args:
        length: T; trained up to 128 and tested up to 512 in the literature.
        things: n of S_n, 2 to 5.

    inputs, targets: (N, T) int64, below n!; scored at every step.
    Chance: 1 of n!.
    """

    id = "B-parity"
    source = (
        'Merrill, Petty and Sabharwal, "The Illusion of State in State-Space Models", arXiv:2404.08819; '
        'Siems et al., "DeltaProduct", arXiv:2502.10297'
    )

    length: Positive = 32
    things: Annotated[int, between(2, 5)] = 3
    vocab_size: int = field(default=6, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vocab_size", math.factorial(self.things))  # frozen, and it follows from an option

    @property
    def chance(self) -> float:
        return 1 / self.vocab_size

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        inputs = random.integers(0, self.vocab_size, (count, self.length))
        elements = np.array(list(itertools.permutations(range(self.things))))
        number = {element: index for index, element in enumerate(map(tuple, elements.tolist()))}
        after = [[number[tuple(p[q].tolist())] for q in elements] for p in elements]  # of p and q: p after q
        table = np.array(after)
        targets = inputs.copy()
        for t in range(1, self.length):
            targets[:, t] = table[inputs[:, t], targets[:, t - 1]]
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        names = ["".join(letters) for letters in itertools.permutations("abcde"[: self.things])]
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs.tolist(), answers, strict=True):
            permutation = names[0]  # which letter each place leads to
            for t, token in enumerate(sequence):
                permutation = permutation.translate(str.maketrans(names[0], names[token]))
                answer[t] = names.index(permutation)
        return answers
