"""Questions with several answers to choose from, and passages whose last word is missing."""

import csv
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, ClassVar, NamedTuple

import numpy as np

from scanl.data.base import Question, register
from scanl.data.files import Files, whole_lines
from scanl.data.fixed import FixedRows, Part, Parts, set_aside
from scanl.data.translation import Pairs, Translation
from scanl.errors import ConfigError

LETTERS = "ABCDE"
MMLU = Files(
    "mmlu",
    "the folders auxiliary_train, dev, val and test of data.tar of MMLU, with a CSV file for each subject",
    ("auxiliary_train", "dev", "val", "test"),
    counts={"auxiliary_train": 99_842, "dev": 285, "val": 1_531, "test": 14_042},
    licence="MIT",
)
HELLASWAG = Files(
    "hellaswag",
    "the files hellaswag_train.jsonl and hellaswag_val.jsonl of https://github.com/rowanz/hellaswag",
    ("hellaswag_train.jsonl", "hellaswag_val.jsonl"),
    counts={"hellaswag_train": 39_905, "hellaswag_val": 10_042},
    licence="MIT",
)
PIQA = Files(
    "piqa",
    "the files train.jsonl, train-labels.lst, valid.jsonl and valid-labels.lst of PIQA",
    ("train.jsonl", "train-labels.lst", "valid.jsonl", "valid-labels.lst"),
    counts={"train": 16_113, "valid": 1_838},
    licence="AFL-3.0",
)


def _arc(level: str, *counts: int) -> Files:
    names = [f"{level}-{part}" for part in ("Train", "Dev", "Test")]
    return Files(
        level.lower().replace("-", "_"),
        f"the folder {level} of ARC-V1-Feb2018, with three .jsonl files",
        tuple(f"{level}/{name}.jsonl" for name in names),
        counts=dict(zip(names, counts, strict=True)),
        licence="CC BY-SA 4.0",
    )


WINOGRANDE = Files(
    "winogrande",
    "the files train_xl.jsonl and dev.jsonl of winogrande_1.1.zip",
    ("train_xl.jsonl", "dev.jsonl"),
    counts={"train_xl": 40_398, "dev": 1_267},
    licence="CC BY 4.0",
)
LAMBADA = Files(
    "lambada",
    "the files lambada_development_plain_text.txt and lambada_test_plain_text.txt of lambada-dataset.tar.gz",
    ("lambada_development_plain_text.txt", "lambada_test_plain_text.txt"),
    counts={"development": 4_869, "test": 5_153},
    licence="CC BY 4.0",
)


class Asked(NamedTuple):
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
        most: how many bytes of a row are read: the last ones.
    """

    instead: ClassVar[Mapping[str, str]] = {"sequence_length": "give --task-options.most"}
    ways: ClassVar[int] = 4
    positive = ("most",)

    most: int = 1024

    @property
    def length(self) -> int:
        return self.most

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Question("class", vocab_size=256, classes=self.ways, padded=True)

    @property
    def chance(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 / self.ways

    @abstractmethod
    def asked(self) -> Sequence[Sequence[Asked]]:
        """Read the questions of three parts, or of training and test. Then a tenth of training becomes the validation
        part."""

    def read(self) -> Parts:
        parts = [
            Part(
                [np.frombuffer(one.written().encode()[-self.most :], np.uint8) for one in part],
                np.array([one.answer for one in part], np.int64),
            )
            for part in self.asked()
        ]
        if len(parts) == 2:
            parts[:1] = set_aside(parts[0], max(1, len(parts[0].answers) // 10))
        return Parts(*parts)

    def lines(self, name: str, read: Callable[[Any], Asked]) -> list[Asked]:
        """Read a file of JSON lines. Raises DataError for a line that `read` cannot make a question of."""
        assert self.needs is not None
        path, found = self.needs.path(name, self.folder), []
        for number, line in enumerate(whole_lines(self.needs.text(name, self.folder)), 1):
            try:
                found.append(read(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise self.needs.damaged(path, f"line {number} is no question: {error!r}", self.folder) from error
            if not (1 < len(found[-1].options) <= self.ways and 0 <= found[-1].answer < len(found[-1].options)):
                why = f"line {number} has the answer {found[-1].answer} to {len(found[-1].options)} options"
                raise self.needs.damaged(path, why, self.folder)
        self.needs.counted({path.stem: len(found)}, self.folder)
        return found


@register("mmlu")
@dataclass
class MMLUQuestions(Choices):
    """MMLU: which of four answers to a question of one of 57 subjects is right.

    Training has the 99,842 questions that the authors gathered from elsewhere, validation 1,531 and test 14,042. In
    validation and test, `shots` solved questions of the same subject come first.

    Source: Hendrycks et al., "Measuring Massive Multitask Language Understanding", arXiv:2009.03300.

    Args:
        seed, eval_examples, folder, most: see `Choices`.
        shots: solved questions before each, at most 5, as published.
    Chance: 1 of 4.
    """

    id = "B-mmlu"
    needs = MMLU

    shots: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shots <= 5:
            raise ConfigError(f"{self.name}: shots is {self.shots}, expected from 0 to 5")

    def asked(self) -> Sequence[Sequence[Asked]]:
        solved: dict[str, list[str]] = {}
        for subject, one in self._part("dev"):
            solved.setdefault(subject, []).append(one.written(solved=True))
        first = {subject: "".join(some[: self.shots]) for subject, some in solved.items()}
        train = [one for _, one in self._part("auxiliary_train")]
        measured = (
            [Asked(first.get(subject, "") + one.text, one.options, one.answer) for subject, one in self._part(part)]
            for part in ("val", "test")
        )
        return [train, *measured]

    def _part(self, part: str) -> Iterator[tuple[str, Asked]]:
        """Yield the subject and the question of each row of the tables of a part."""
        count = 0
        for path in MMLU.below(part, "*.csv", self.folder):
            name = path.relative_to(MMLU.folder(self.folder)).as_posix()
            for number, row in enumerate(csv.reader(StringIO(MMLU.text(name, self.folder), newline="")), 1):
                if len(row) != 6 or row[5] not in tuple(LETTERS[:4]):
                    why = f"row {number} is not a question, four options and a letter"
                    raise MMLU.damaged(path, why, self.folder)
                yield path.stem.removesuffix(f"_{part}"), Asked(row[0], row[1:5], LETTERS.index(row[5]))
                count += 1
        MMLU.counted({part: count}, self.folder)


@register("hellaswag")
@dataclass
class HellaSwag(Choices):
    """HellaSwag: which of four ends of a story is right. Test is what is published as validation, 10,042.

    Source: Zellers et al., "HellaSwag", arXiv:1905.07830. Args: see `Choices`. Chance: 1 of 4.
    """

    id = "B-lmeval"
    needs = HELLASWAG

    def asked(self) -> Sequence[Sequence[Asked]]:
        return [
            self.lines(name, lambda row: Asked(row["ctx"], list(map(str, row["endings"])), int(row["label"])))
            for name in HELLASWAG.needs
        ]


@register("piqa")
@dataclass
class PIQAQuestions(Choices):
    """PIQA: which of two ways leads to a goal. Test is what is published as validation, 1,838.

    Source: Bisk et al., "PIQA", arXiv:1911.11641. Args: see `Choices`. Chance: 1 of 2.
    """

    id = "B-lmeval"
    needs = PIQA
    ways = 2

    def asked(self) -> Sequence[Sequence[Asked]]:
        return [self._part("train"), self._part("valid")]

    def _part(self, part: str) -> list[Asked]:
        labels = iter(labelled := PIQA.text(f"{part}-labels.lst", self.folder).split())
        found = self.lines(
            f"{part}.jsonl", lambda row: Asked(row["goal"], [row["sol1"], row["sol2"]], int(next(labels, "-1")))
        )
        if len(labelled) != len(found):
            why = f"it has {len(labelled)} labels for {len(found)} questions"
            raise PIQA.damaged(PIQA.path(f"{part}-labels.lst", self.folder), why, self.folder)
        return found


@register("arc_easy")
@dataclass
class ARCEasy(Choices):
    """ARC: which of three to five answers to a question of science at school is right. 2,251, 570 and 2,376 questions.

    Source: Clark et al., "Think you have Solved Question Answering?", arXiv:1803.05457. Args: see `Choices`.
    Chance: about 1 of 4, because nearly all have four answers.
    """

    id = "B-lmeval"
    needs = _arc("ARC-Easy", 2_251, 570, 2_376)
    ways = 5
    chance = 0.25  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def asked(self) -> Sequence[Sequence[Asked]]:
        assert self.needs is not None
        return [self.lines(name, self._row) for name in self.needs.needs]

    def _row(self, row: Any) -> Asked:
        choices = row["question"]["choices"]
        labels = [choice["label"] for choice in choices]
        return Asked(row["question"]["stem"], [choice["text"] for choice in choices], labels.index(row["answerKey"]))


@register("arc_challenge")
@dataclass
class ARCChallenge(ARCEasy):
    """ARC, the questions that simple methods get wrong: 1,119, 299 and 1,172. As `arc_easy` otherwise.

    Source: see `ARCEasy`. Args: see `Choices`. Chance: about 1 of 4.
    """

    needs = _arc("ARC-Challenge", 1_119, 299, 1_172)


@register("winogrande")
@dataclass
class WinoGrande(Choices):
    """WinoGrande: which of two words stands for the gap in a sentence. Test is what is published as dev, 1,267.

    Source: Sakaguchi et al., "WinoGrande", arXiv:1907.10641. Args: see `Choices`. Chance: 1 of 2.
    """

    id = "B-lmeval"
    needs = WINOGRANDE
    ways = 2

    def asked(self) -> Sequence[Sequence[Asked]]:
        return [
            self.lines(
                name, lambda row: Asked(row["sentence"], [row["option1"], row["option2"]], int(row["answer"]) - 1)
            )
            for name in WINOGRANDE.needs
        ]


@register("lambada")
@dataclass
class Lambada(Translation):
    """LAMBADA: the last word of a passage, byte by byte. A line break stands for the blank before it.

    Test has the 5,153 passages of the published test part. The published development part has 4,869 passages: nine
    tenths are for training, the rest for validation. To train on the novels that are published for training, use `scanl
    train PATH`. The published score is the share of right words.

    Source: Paperno et al., "The LAMBADA dataset", arXiv:1606.06031. Args: see `Translation`. Chance: 8 bits.
    """

    id = "B-lmeval"
    needs = LAMBADA

    most: int = 1024

    def pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        development, test = (self._passages(part) for part in ("development", "test"))
        return [pair for i, pair in enumerate(development) if i % 10], development[::10], test

    def _passages(self, part: str) -> Pairs:
        name, found = f"lambada_{part}_plain_text.txt", []
        for number, line in enumerate(whole_lines(LAMBADA.text(name, self.folder)), 1):
            passage, _, word = " ".join(line.split()).rpartition(" ")
            if not passage:
                raise LAMBADA.damaged(LAMBADA.path(name, self.folder), f"line {number} is no passage", self.folder)
            found.append((passage, word))
        LAMBADA.counted({part: len(found)}, self.folder)
        return found
