"""Formal languages: even pairs, cycle navigation, modular arithmetic."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import at_least, one_of
from scanl.tasks.base import IGNORED, Task, register

LANGUAGES = ("even_pairs", "cycle_navigation", "modular_arithmetic")
MODULUS, PLUS, MINUS, TIMES = 5, 5, 6, 7


@register("formal_language")
@dataclass(frozen=True)
class FormalLanguage(Task):
    """Formal languages: a property of a string; the answer is at its last step. T = n steps.

    "even_pairs": bits; the answer is 0 if the pairs 01 and 10 are even in number, else 1.
    "cycle_navigation": steps on a ring of five: 0 stays, 1 goes forward, 2 goes back; the answer is the last position.
    "modular_arithmetic": digits 0 ... 4 with +, -, * (5, 6, 7) between them; the answer is the value modulo 5, and *
    binds more than + and -. There are no brackets. If n is even, the string begins with a sign, + or -.
    `parity` is a task of its own. In the literature the lengths in a batch differ.

    Args:
        length: n; trained up to 40 and tested up to 256 and beyond in the literature.
        language: even_pairs, cycle_navigation or modular_arithmetic.

    inputs, targets: (N, n) int64; scored at the last step.
    Chance: 1 of 2, 1 of 5, or the frequency of 0 for the arithmetic, measured on 20,000 generated strings.
    """

    id = "B-parity"
    source = 'Delétang et al., "Neural Networks and the Chomsky Hierarchy", arXiv:2207.02098, appendix A.1'

    length: Annotated[int, at_least(2)] = 40
    language: Annotated[str, one_of(LANGUAGES)] = "even_pairs"
    vocab_size: int = field(default=8, init=False)

    @cached_property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.language != "modular_arithmetic":
            return 1 / (2 if self.language == "even_pairs" else MODULUS)
        # cached_property writes into __dict__, which a frozen dataclass allows
        return float((self.generate(20_000, 0).targets[:, -1] == 0).mean())

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        if self.language == "even_pairs":
            inputs = random.integers(0, 2, (count, self.length))
            answers = (inputs[:, 1:] != inputs[:, :-1]).sum(1) % 2
        elif self.language == "cycle_navigation":
            inputs = random.integers(0, 3, (count, self.length))
            answers = np.array([0, 1, -1])[inputs].sum(1) % MODULUS
        else:
            inputs = random.integers(0, MODULUS, (count, self.length))
            inputs[:, -2::-2] = random.integers(PLUS, TIMES + 1, inputs[:, -2::-2].shape)
            if self.length % 2 == 0:
                inputs[:, 0] = random.integers(PLUS, MINUS + 1, count)
            answers = _values(inputs)
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = answers
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs.tolist(), answers, strict=True):
            if self.language == "even_pairs":
                answer[-1] = int(sequence[0] != sequence[-1])  # each pair of two different bits changes the bit
            elif self.language == "cycle_navigation":
                answer[-1] = (sequence.count(1) - sequence.count(2)) % MODULUS
            else:
                text = "".join("01234+-*"[token] for token in sequence)
                for sign, product in re.findall(r"([+-]?)([0-4*]+)", text):
                    answer[-1] += (-1 if sign == "-" else 1) * math.prod(map(int, product.split("*")))
                answer[-1] %= MODULUS
        return answers


def _values(inputs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values modulo 5, of the finished sum and the product that is being built, token by token."""
    total = np.zeros(len(inputs), np.int64)
    product = np.ones_like(total)
    begins_with_sign = inputs.shape[1] % 2 == 0
    if not begins_with_sign:
        product = inputs[:, 0].copy()
    for t in range(int(not begins_with_sign), inputs.shape[1], 2):
        operator, digit = inputs[:, t], inputs[:, t + 1]
        times = operator == TIMES
        if t > 0:
            total = np.where(times, total, total + product)
        sign = np.where(operator == MINUS, -1, 1)
        product = np.where(times, product * digit, sign * digit) % MODULUS
    return (total + product) % MODULUS
