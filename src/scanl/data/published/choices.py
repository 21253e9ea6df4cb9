"""Questions with four answers to choose from."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Annotated, NamedTuple

import numpy as np

from scanl.data.fixed import FixedPart, FixedRows, Parts
from scanl.data.published.sources import published
from scanl.data.questions import Class, Vocabulary
from scanl.options import Positive, within

LETTERS = "ABCD"


class ChoiceQuestion(NamedTuple):
    """A question, its options, and the number of the right one."""

    text: str
    options: Sequence[str]
    answer: int

    def written(self, solved: bool = False) -> str:
        """Return the question and its options by letter, and with `solved` the letter of the answer."""
        lines = [self.text, *(f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=True))]
        return "\n".join(lines) + "\nAnswer:" + (f" {LETTERS[self.answer]}\n\n" if solved else "")


@published("mmlu")
@dataclass
class MMLUQuestions(FixedRows):
    """MMLU by bytes: the right one of four answers to a question of one of 57 subjects.

    A row is the question, the options by letter, one a line, and `Answer:`. The model gives one of the letters. In the
    literature a language model that was not trained on the questions gives each option a probability, as the package
    lm-eval does (see `scanl.learning.adapters.lm_eval`). Here a classifier is trained on the training part.

    Training has the 99,842 questions that the authors gathered from elsewhere, validation 1,531 and test 14,042. In
    validation and test, `shots` solved questions of the same subject come first.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: how many bytes of a row are read: the last ones.
        shots: solved questions before each, at most 5, as published.
    """

    uneven = True
    question = Class(Vocabulary(256), 4)

    max_length: Positive = 1024
    shots: Annotated[int, within(0, 5)] = 0

    @property
    def length(self) -> int:
        return self.max_length

    def read(self) -> Parts:
        solved: dict[str, list[str]] = {}
        for subject, question in self._part("dev"):
            solved.setdefault(subject, []).append(question.written(solved=True))
        first = {subject: "".join(examples[: self.shots]) for subject, examples in solved.items()}
        train = [question for _, question in self._part("auxiliary_train")]
        measured = (
            [
                ChoiceQuestion(first.get(subject, "") + question.text, question.options, question.answer)
                for subject, question in self._part(split)
            ]
            for split in ("val", "test")
        )
        return Parts(*(self._rows(questions) for questions in (train, *measured)))

    def _rows(self, questions: Sequence[ChoiceQuestion]) -> FixedPart:
        rows = [np.frombuffer(question.written().encode()[-self.max_length :], np.uint8) for question in questions]
        return FixedPart(rows, np.array([question.answer for question in questions], np.int64))

    def _part(self, split: str) -> Iterator[tuple[str, ChoiceQuestion]]:
        """Yield the subject and the question of each row of the tables of a part."""
        count = 0
        for path in self.files.below(split, "*.csv", self.folder):
            name = path.relative_to(self.files.folder(self.folder)).as_posix()
            for number, row in enumerate(csv.reader(StringIO(self.files.text(name, self.folder), newline="")), 1):
                if len(row) != 6 or row[5] not in tuple(LETTERS):
                    why = f"row {number} is not a question, four options and a letter"
                    raise self.files.damaged(path, why, self.folder)
                yield path.stem.removesuffix(f"_{split}"), ChoiceQuestion(row[0], row[1:5], LETTERS.index(row[5]))
                count += 1
        self.files.check_counts({split: count}, self.folder)
