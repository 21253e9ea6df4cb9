"""Looking up a number in a phone book."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import within
from scanl.tasks.base import IGNORED, Task, draw_distinct, register

FIRST_NAMES = "James Mary John Patricia Robert Linda Michael Barbara William Susan David Jessica Joseph Karen Thomas Sarah".split()  # noqa: E501, SIM905
LAST_NAMES = "Smith Jones Brown Davis Miller Wilson Moore Taylor Anderson Jackson White Harris Martin Thompson Garcia Clark Lewis Walker Hall Young King Wright Hill Green Baker Adams Nelson Carter Mitchell Turner Parker Collins".split()  # noqa: E501, SIM905
NAMES = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
DIGITS = 10
MAX_LINE_LENGTH = max(map(len, NAMES)) + 2 + DIGITS + 1  # of a line with its end


@register("phonebook")
@dataclass(frozen=True)
class Phonebook(Task):
    """Phone book: copy the number of a name from a book of n lines, byte by byte.

    A line is "Full Name: dddddddddd"; the first of ten digits is 6 to 9. After the book come an empty line, two lines
    of the book as examples, an empty line, and "Full Name:" of a third line; the answer is " " and its number. The
    model reads all but the last byte of that, and is scored on the ten digits. Names are different; there are 512 of
    them, made of 16 first and 32 last names. Line breaks before the book fill a row up. The authors draw names from a
    larger list, where they may repeat, and score the whole number.

    Args:
        length: n, lines of the book; 20 by default in the authors' program.

    inputs, targets: (N, T) int64 bytes; scored at the ten steps before a digit.
    Chance: 0.115, because the first digit is one of 4 and each other digit is one of 10.
    """

    id = "B-phonebook"
    aliases = ("phonebook_look_up", "phone_book_lookup")
    source = (
        'Jelassi et al., "Repeat After Me: Transformers are Better than State Space Models at Copying", '
        "arXiv:2402.01032, section 4.2"
    )

    length: Annotated[int, within(3, len(NAMES), "because of two examples, a question and the names")] = 20
    vocab_size: int = field(default=256, init=False)

    @property
    def chance(self) -> float:
        return (1 / 4 + 9 / 10) / 10

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        steps = MAX_LINE_LENGTH * (self.length + 3) + 1
        names = draw_distinct(random, count, len(NAMES), self.length)
        numbers = random.integers(0, 10, (count, self.length, DIGITS))
        numbers[..., 0] = random.integers(6, 10, (count, self.length))
        shown = draw_distinct(random, count, self.length, 3)
        inputs = np.full((count, steps), ord("\n"), np.int64)
        targets = np.full_like(inputs, IGNORED)
        for row in range(count):
            book = [
                f"{NAMES[name]}: {''.join(map(str, number))}"
                for name, number in zip(names[row], numbers[row].tolist(), strict=True)
            ]
            one, two, query = (book[place] for place in shown[row])
            text = np.frombuffer("\n".join([*book, "", one, two, "", query]).encode(), np.uint8)
            inputs[row, 1 - len(text) :] = text[:-1]
            targets[row, -DIGITS:] = text[-DIGITS:]
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs, answers, strict=True):
            text = bytes(sequence.tolist()).decode().lstrip("\n")
            book, _examples, question = text.split("\n\n")
            numbers = dict(line.split(": ") for line in book.split("\n"))
            answer[-DIGITS:] = list(numbers[question.split(":")[0]].encode())
        return answers
