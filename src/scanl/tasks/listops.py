"""Nested lists of operations on digits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED, present
from scanl.data.batch import Batch
from scanl.data.published.documents import LISTOPS_TOKENS
from scanl.data.questions import Class, Question, Vocabulary
from scanl.options import Natural, Positive, refuse
from scanl.tasks.base import Task, register

CLOSE_TOKEN = LISTOPS_TOKENS.index("X")
OPERATORS = range(10, CLOSE_TOKEN)
SHARE = 0.25  # of the nodes that are operators, but for the deepest


def _uniform(seed: int) -> Iterator[float]:
    """Yield numbers in [0, 1). One call of numpy's generator for each of them would take ten times as long."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.random(1024).tolist()


def value(operator: int, numbers: Sequence[int]) -> int:
    """Apply MIN, MAX, MED (the integer part of the median) or SM (the sum modulo 10)."""
    name = LISTOPS_TOKENS[operator]
    if name == "[SM":
        return sum(numbers) % 10
    ordered = sorted(numbers)
    if name == "[MED":
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
    return ordered[0 if name == "[MIN" else -1]


@register("listops")
@dataclass(frozen=True)
class ListOps(Task):
    """ListOps: the value of a nested list of operations on digits.

    A node is an operator with probability 1/4, or else a digit; at `depth` it is a digit. The root, at depth 1, is
    drawn in the same way. An operator (MIN, MAX, the integer part of the median, the sum modulo 10) has 2 to 10
    arguments. A tree is kept if its tokens are more than `least` and fewer than n, where an operator counts for two:
    itself and its "]". Rows that end early are filled up. T = n - 1 steps. The vocabulary has ten digits, four
    operators and "]", in the order of `lra_listops`, which reads the published rows.

    One draw in twelve is kept with the default lengths, so a row takes one to two milliseconds.

    Args:
        length: n.
        least: a row must have more tokens than this.
        depth: of the deepest nodes; the root is at depth 1.

    inputs: (N, n - 1) int64.   targets: (N,) int64, the value.
    Chance: 17 % for the published lengths, by the answer 0. The answers of short rows have another distribution.
    """

    id = "B-lra-listops"
    source = (
        'Nangia and Bowman, "ListOps", arXiv:1804.06028; lengths of Tay et al., "Long Range Arena", arXiv:2011.04006, '
        "section 2.2.1"
    )

    length: int = 2000
    least: Natural = 500
    vocab_size: int = field(default=len(LISTOPS_TOKENS), init=False)
    depth: Positive = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < self.least + 4:
            refuse(type(self), "length", self.length, f"at least {self.least + 4} because of least")

    @property
    def question(self) -> Question:
        return Class(Vocabulary(self.vocab_size), 10)

    @property
    def chance(self) -> float:
        return 0.17

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        inputs = np.full((count, self.length - 1), IGNORED, np.int64)
        answers = np.zeros(count, np.int64)
        for row in range(count):
            draws = _uniform(int(random.integers(2**63)))  # a row depends on no row before it
            tokens: list[int] = []
            while not self.least < len(tokens) < self.length:
                tokens = []
                answers[row] = self._tree(draws, 1, tokens)
            inputs[row, : len(tokens)] = tokens
        return Batch(inputs, answers, mask=present(inputs))

    def _tree(self, draws: Iterator[float], depth: int, tokens: list[int]) -> int:
        """Append the tokens of a tree and return its value. A tree that is too long is not finished."""
        if depth >= self.depth or next(draws) >= SHARE or len(tokens) >= self.length:
            tokens.append(int(10 * next(draws)))
            return tokens[-1]
        operator = OPERATORS[int(len(OPERATORS) * next(draws))]
        tokens.append(operator)
        numbers = [self._tree(draws, depth + 1, tokens) for _ in range(2 + int(9 * next(draws)))]
        tokens.append(CLOSE_TOKEN)
        return value(operator, numbers)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = []
        names = {10: min, 11: max, 12: lambda numbers: int(np.median(numbers)), 13: lambda numbers: sum(numbers) % 10}
        for sequence in inputs.tolist():
            stack: list[Any] = []
            for token in sequence:
                if token == CLOSE_TOKEN:
                    numbers = []
                    while isinstance(stack[-1], int):
                        numbers.append(stack.pop())
                    stack.append(names[int(stack.pop()[0])](numbers))
                elif token != IGNORED:
                    stack.append([token] if token in OPERATORS else token)
            answers.append(stack[0])
        return np.array(answers, np.int64)
