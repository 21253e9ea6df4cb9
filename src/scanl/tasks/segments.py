"""Reversal, copying and retrieval of a stream that is read in segments."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Positive, one_of
from scanl.tasks.base import IGNORED, Task, draw_distinct, register

KINDS = ("reverse", "copy", "retrieve")
START, SYMBOLS = 1, 8
PAIRS, DIGITS, LETTERS = 4, 10, 26


@register("segments")
@dataclass(frozen=True)
class Segments(Task):
    """Across segments: write a stream of tokens backwards or twice, or retrieve the digit of a letter.

    The model reads the stream X, a start token, and the answer without its last token. It is scored on the answer.
    "reverse": X is n tokens uniform in 2 ... 9, the start token is 1, the answer is X backwards; T = 2n. "copy": the
    same X and start token, the answer is X twice; T = 3n.
    "retrieve": X is four pairs of a letter (11 ... 36) and a digit (0 ... 9), letters and digits without repetition,
    then one of the letters; the start token is 10, the answer the digit of that letter; T = 10, whatever n is.
    A model with a memory of segments reads T in pieces.

    Args:
        length: n; 24, 120, 240 and 360 in the paper.
        kind: reverse, copy or retrieve.

    inputs, targets: (N, T) int64; scored at the steps from the start token on.
    Chance: 1 of 8 symbols, or 1 of 10 digits; 1 of 4 for a model that knows the digits shown.
    """

    id = "B-reverse"
    source = 'Bulatov et al., "Recurrent Memory Transformer", arXiv:2207.06881, section 4'

    length: Positive = 24
    kind: Annotated[str, one_of(KINDS)] = "reverse"
    vocab_size: int = field(default=37, init=False)

    @property
    def chance(self) -> float:
        return 1 / (DIGITS if self.kind == "retrieve" else SYMBOLS)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        if self.kind == "retrieve":
            digits = draw_distinct(random, count, DIGITS, PAIRS)
            letters = DIGITS + 1 + draw_distinct(random, count, LETTERS, PAIRS)
            query = random.integers(0, PAIRS, (count, 1))
            pairs = np.stack([letters, digits], 2).reshape(count, 2 * PAIRS)
            start = np.full((count, 1), DIGITS)
            stream = np.hstack([pairs, np.take_along_axis(letters, query, 1), start])
            answer = np.take_along_axis(digits, query, 1)
        else:
            symbols = random.integers(2, 2 + SYMBOLS, (count, self.length))
            stream = np.hstack([symbols, np.full((count, 1), START)])
            answer = symbols[:, ::-1] if self.kind == "reverse" else np.hstack([symbols, symbols])
        sequence = np.hstack([stream, answer])
        targets = sequence[:, 1:].copy()
        targets[:, : stream.shape[1] - 1] = IGNORED
        return Batch(sequence[:, :-1], targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs.tolist(), answers, strict=True):
            if self.kind == "retrieve":
                *pairs, letter, _start = sequence
                answer[-1] = pairs[pairs.index(letter) + 1]
                continue
            begin = sequence.index(START)
            for t in range(begin, len(sequence)):
                place = t - begin
                answer[t] = sequence[begin - 1 - place if self.kind == "reverse" else place % begin]
        return answers
