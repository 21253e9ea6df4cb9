"""Finding a pass key that a long text mentions once."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import at_least
from scanl.tasks.base import IGNORED, Task, register

SUBJECTS = "the cat,a boat,the old road,my brother,the rain,a red kite,the village,our neighbor".split(",")  # noqa: SIM905
VERBS = "follows,leaves,passes,hides behind,waits for,looks at,forgets,turns to".split(",")  # noqa: SIM905
OBJECTS = "the river,a stone,the garden,two birds,the harbor,an open door,the hill,some bread".split(",")  # noqa: SIM905
DIGITS = 5
FACT, QUESTION = " The pass key is {}. ", " Which pass key did the text mention? "
MIN_BYTES = len(FACT.format("0" * DIGITS)) + len(QUESTION) + DIGITS  # bytes of a text without other sentences


@register("pass_key")
@dataclass(frozen=True)
class PassKey(Task):
    """Pass key: a text of random sentences mentions a key of five digits once, and a question at the end asks for it.

    The sentence with the key stands anywhere, all places alike. The model reads all but the last byte of text, question
    and key, and is scored on the five digits. BABILong puts its facts into text of books; here sentences of a subject,
    a verb and an object stand around it, 512 of them.

    Args:
        length: T, bytes that are read; any length from 66.

    inputs, targets: (N, T) int64 bytes; scored at the five steps before a digit.
    Chance: 0.1, because each digit is one of 10.
    """

    id = "B-babilong"
    source = (
        'Kuratov et al., "BABILong: Testing the Limits of LLMs with Long Context Reasoning-in-a-Haystack", '
        'arXiv:2406.10149, for facts in long text; Mohtashami and Jaggi, "Landmark Attention", arXiv:2305.16300, '
        "section 4.2, for the pass key"
    )

    length: Annotated[int, at_least(MIN_BYTES - 1, "because of the sentence and the question")] = 512
    vocab_size: int = field(default=256, init=False)

    @property
    def chance(self) -> float:
        return 1 / 10

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        around = self.length + 1 - MIN_BYTES
        keys = random.integers(0, 10, (count, DIGITS))
        places = random.integers(0, around + 1, count)
        choices = random.integers(0, 8, (count, around // 12 + 1, 3))  # no sentence has fewer than 12 bytes
        rows = np.empty((count, self.length + 1), np.int64)
        for row, (key, place) in enumerate(zip(keys, places.tolist(), strict=True)):
            digits = "".join(map(str, key.tolist()))
            sentences = (f"{SUBJECTS[a]} {VERBS[b]} {OBJECTS[c]}. " for a, b, c in choices[row].tolist())
            text = "".join(sentences)[:around]
            text = text[:place] + FACT.format(digits) + text[place:] + QUESTION + digits
            rows[row] = np.frombuffer(text.encode(), np.uint8)
        targets = np.full((count, self.length), IGNORED)
        targets[:, -DIGITS:] = rows[:, -DIGITS:]
        return Batch(rows[:, :-1], targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs, answers, strict=True):
            (key,) = re.findall(r"The pass key is (\d{5})\.", bytes(sequence.tolist()).decode())
            answer[-DIGITS:] = list(key.encode())
        return answers
