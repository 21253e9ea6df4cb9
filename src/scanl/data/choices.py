"""Questions with several answers to choose from, and passages whose last word is missing."""

import csv
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from scanl.data.files import whole_lines
from scanl.data.fixed import FixedRows, Part, Parts, set_aside
from scanl.data.published import kind, published
from scanl.data.questions import Class, Question, Vocabulary
from scanl.data.readers import json_lines
from scanl.data.translation import Pairs, Translation
from scanl.errors import ConfigError

LETTERS = "ABCDE"


class ChoiceQuestion(NamedTuple):
    """A question, its options, and the number of the right one."""

    text: str
    options: Sequence[str]
    answer: int

    def written(self, solved: bool = False) -> str:
        """Return the question and its options by letter, and with `solved` the letter of the answer."""
        lines = [self.text, *(f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=False))]
        return "\n".join(lines) + "\nAnswer:" + (f" {LETTERS[self.answer]}\n\n" if solved else "")


@dataclass
class Choices(FixedRows):
    """Questions by bytes: which of several options is right.

    A row is the question, the options by letter, one a line, and `Answer:`. The model gives one of the letters. In the
    literature a language model that was not trained on the questions gives each option a probability, as the package
    lm-eval does. Here a classifier is trained on the training part.

    A subclass defines `asked`, the questions for training, validation and test.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: how many bytes of a row are read: the last ones.
    """

    ways: ClassVar[int] = 4
    uneven = True
    positive = ("max_length",)

    max_length: int = 1024

    @property
    def length(self) -> int:
        return self.max_length

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Class(Vocabulary(256), self.ways)

    @abstractmethod
    def questions(self) -> Sequence[Sequence[ChoiceQuestion]]:
        """Read the questions of three parts, or of training and test. Then a tenth of training becomes the validation
        part."""

    def read(self) -> Parts:
        parts = [
            Part(
                [np.frombuffer(question.written().encode()[-self.max_length :], np.uint8) for question in questions],
                np.array([question.answer for question in questions], np.int64),
            )
            for questions in self.questions()
        ]
        if len(parts) == 2:
            parts[:1] = set_aside(parts[0], max(1, len(parts[0].answers) // 10))
        return Parts(*parts)


@kind
@dataclass
class JSONQuestions(Choices):
    """Questions in files of JSON lines, or in one such file and a file of answers, one a line.

    A record gives `ways`, and in which fields of a line the parts of a question are. A field below another is named
    as `question.stem`. `option_fields` is the field of a list, or a list of fields. `answer_field` has the number of
    the right option; the first option has the number `first_answer`. With `label_field`, the field of a list of names
    of the options, it has the name of the right one.

    Args: see `Choices`.
    """

    readers: ClassVar[Mapping[str, Callable[..., Any]]] = {"json_lines": json_lines.rows}
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("train", "test"), ("train", "validation", "test")]
    most_files: ClassVar[int] = 2
    question_field: ClassVar[str]
    option_fields: ClassVar[str | tuple[str, ...]]
    answer_field: ClassVar[str] = ""  # none: in the second file of a part
    label_field: ClassVar[str] = ""
    first_answer: ClassVar[int] = 0

    def questions(self) -> Sequence[Sequence[ChoiceQuestion]]:
        return [self._part(*names) for names in self.files.laid_out(self.folder).parts.values()]

    def _part(self, name: str, answers: str = "") -> list[ChoiceQuestion]:
        labels = self.files.text(answers, self.folder).split() if answers else []
        next_labels, questions = iter(labels), list[ChoiceQuestion]()
        for number, question in json_lines.rows(
            self.files,
            name,
            self.folder,
            lambda row: self._question(row, next_labels if answers else None),
            "question",
        ):
            if not (1 < len(question.options) <= self.ways and 0 <= question.answer < len(question.options)):
                why = f"line {number} has the answer {question.answer} to {len(question.options)} options"
                raise self.files.damaged(self.files.path(name, self.folder), why, self.folder)
            questions.append(question)
        self.files.check_counts({Path(name).stem: len(questions)}, self.folder)
        if answers and len(labels) != len(questions):
            why = f"it has {len(labels)} labels for {len(questions)} questions"
            raise self.files.damaged(self.files.path(answers, self.folder), why, self.folder)
        return questions

    def _question(self, row: Any, answers: Iterator[str] | None) -> ChoiceQuestion:
        text, fields = json_lines.field(row, self.question_field), self.option_fields
        if not isinstance(text, str):
            raise TypeError(f"its question is {text!r}")
        if isinstance(fields, str):
            options = json_lines.field(row, fields)
        else:
            options = [json_lines.field(row, name) for name in fields]
        answer = next(answers, "-1") if answers else json_lines.field(row, self.answer_field)
        if self.label_field:
            return ChoiceQuestion(text, options, json_lines.field(row, self.label_field).index(answer))
        return ChoiceQuestion(text, list(map(str, options)), int(answer) - self.first_answer)


@published("mmlu")
@dataclass
class MMLUQuestions(Choices):
    """MMLU: which of four answers to a question of one of 57 subjects is right.

    Training has the 99,842 questions that the authors gathered from elsewhere, validation 1,531 and test 14,042. In
    validation and test, `shots` solved questions of the same subject come first.

    Args:
        seed, eval_examples, folder, max_length: see `Choices`.
        shots: solved questions before each, at most 5, as published.
    """

    shots: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shots <= 5:
            raise ConfigError(f"{self.name}: shots is {self.shots}, expected from 0 to 5")

    def questions(self) -> Sequence[Sequence[ChoiceQuestion]]:
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
        return [train, *measured]

    def _part(self, split: str) -> Iterator[tuple[str, ChoiceQuestion]]:
        """Yield the subject and the question of each row of the tables of a part."""
        count = 0
        for path in self.files.below(split, "*.csv", self.folder):
            name = path.relative_to(self.files.folder(self.folder)).as_posix()
            for number, row in enumerate(csv.reader(StringIO(self.files.text(name, self.folder), newline="")), 1):
                if len(row) != 6 or row[5] not in tuple(LETTERS[:4]):
                    why = f"row {number} is not a question, four options and a letter"
                    raise self.files.damaged(path, why, self.folder)
                yield path.stem.removesuffix(f"_{split}"), ChoiceQuestion(row[0], row[1:5], LETTERS.index(row[5]))
                count += 1
        self.files.check_counts({split: count}, self.folder)


@published("lambada")
@dataclass
class Lambada(Translation):
    """LAMBADA: the last word of a passage, byte by byte. A line break stands for the blank before it.

    Test has the 5,153 passages of the published test part. The published development part has 4,869 passages: nine
    tenths are for training, the rest for validation. To train on the novels that are published for training, use `scanl
    train PATH`. The published score is the share of right words.

    Args: see `Translation`.
    """

    max_length: int = 1024

    def pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        development, test = (self._passages(split) for split in ("development", "test"))
        return [pair for i, pair in enumerate(development) if i % 10], development[::10], test

    def _passages(self, split: str) -> Pairs:
        name, passages = f"lambada_{split}_plain_text.txt", []
        for number, line in enumerate(whole_lines(self.files.text(name, self.folder)), 1):
            passage, _, word = " ".join(line.split()).rpartition(" ")
            if not passage:
                raise self.files.damaged(
                    self.files.path(name, self.folder), f"line {number} is no passage", self.folder
                )
            passages.append((passage, word))
        self.files.check_counts({split: len(passages)}, self.folder)
        return passages
