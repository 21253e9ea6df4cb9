"""Documents to classify, by bytes: IMDb reviews, pairs of papers (AAN), and Long Range Arena's ListOps files."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import whole_lines
from scanl.data.fixed import FixedPart, FixedRows, Parts, set_aside
from scanl.data.published.sources import published
from scanl.data.questions import Class, Vocabulary
from scanl.errors import DataError
from scanl.options import Positive


@published("imdb")
@dataclass
class IMDbReviews(FixedRows):
    """IMDb: whether a review of a film is good, from its bytes.

    With the folders of the original download, the split is the published one of 25,000 and 25,000 reviews. The file
    `reviews.json` of the package has the same reviews without a split. There duplicates are left out and the rest is
    halved at random, with the seed 42. So results are close to published ones, but the split is another. `aside`
    reviews of the training part are set aside.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: bytes of a review that are read, the first; 1000 to 4096 in the literature.
        aside: number of training reviews that are set aside.
    """

    question = Class(Vocabulary(256), 2)
    uneven = True

    max_length: Positive = 1024
    aside: Positive = 2500

    @property
    def length(self) -> int:
        return self.max_length

    def read(self) -> Parts:
        train, test = self._folders() if self.files.other(self.folder) else self._json()
        if self.aside >= len(train.answers):
            have = f"{len(train.answers)} training reviews"
            raise DataError(f"{self.name}: aside is {self.aside}, expected less than the {have}")
        return Parts(*set_aside(train, self.aside), test)

    def _json(self) -> tuple[FixedPart, FixedPart]:
        path = self.files.path("reviews.json", self.folder)
        try:
            pairs = [(review["t"], review["s"]) for review in json.loads(self.files.text("reviews.json", self.folder))]
        except (ValueError, TypeError, KeyError) as error:
            raise self.files.damaged(path, f"it is no list of reviews: {error}", self.folder) from error
        if not all(isinstance(text, str) and text and sentiment in (0, 1) for text, sentiment in pairs):
            raise self.files.damaged(path, "a review is no text of sentiment 0 or 1", self.folder)
        self.files.check_counts({"reviews": len(pairs)}, self.folder)
        reviews = part_of(list(dict.fromkeys(pairs)))
        return set_aside(reviews, len(reviews.answers) // 2)

    def _folders(self) -> tuple[FixedPart, FixedPart]:
        parts = []
        folders = self.files.or_needs
        for what, names in (("training", folders[:2]), ("test", folders[2:])):
            pairs = [
                (path.read_text(encoding="utf-8"), sentiment)
                for sentiment, name in enumerate(names)
                for path in self.files.below(name, "*.txt", self.folder)
            ]
            self.files.check_counts({f"{what} reviews": len(pairs)}, self.folder)
            parts.append(part_of(pairs))
        return parts[0], parts[1]


def part_of(texts: Sequence[tuple[str, int]]) -> FixedPart:
    """Return texts as their bytes in UTF-8, and their classes."""
    rows = [np.frombuffer(text.encode(), np.uint8) for text, _ in texts]
    return FixedPart(rows, np.array([answer for _, answer in texts], np.int64))


@published("lra_retrieval")
@dataclass
class PaperPairs(FixedRows):
    """AAN: whether one of two papers cites the other, from their bytes.

    A row is the first `max_length` bytes of the first paper, a zero byte, and as many of the second. In the literature
    a model reads each paper alone, and a second network compares the two results. Here one model reads both papers in
    turn.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: bytes of a paper that are read; 4000 in the literature.
    """

    question = Class(Vocabulary(256), 2)
    uneven = True

    max_length: Positive = 4000

    @property
    def length(self) -> int:
        return 2 * self.max_length + 1

    def read(self) -> Parts:
        parts = []
        for name, what in zip(self.files.needs, ("training", "validation", "test"), strict=True):
            rows, answers = [], []
            for line in whole_lines(self.files.text(name, self.folder)):  # quotes are not special
                label, *_, first, second = fields = line.split("\t")
                if len(fields) != 5 or label not in ("0.0", "1.0", "0", "1"):
                    why = f"line {line[:40]!r} is not label, id, id, text, text"
                    raise self.files.damaged(self.files.path(name, self.folder), why, self.folder)
                pair = first.encode()[: self.max_length] + b"\0" + second.encode()[: self.max_length]
                rows.append(np.frombuffer(pair, np.uint8))
                answers.append(int(float(label)))
            self.files.check_counts({f"{what} pairs": len(rows)}, self.folder)
            parts.append(FixedPart(rows, np.array(answers, np.int64)))
        return Parts(*parts)


LISTOPS_TOKENS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X")


@published("lra_listops")
@dataclass
class LongListOps(FixedRows):
    """Long ListOps, the published rows: the value of a nested list of operations on digits, 500 to 2,000 tokens.

    The files have a left-nested binary form. Parentheses are left out, and "]" is one token, X. `listops` generates
    such rows by the published rules. The most frequent answer is 0, of 17 % of the rows.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: tokens of a row that are read.
    """

    question = Class(Vocabulary(len(LISTOPS_TOKENS)), 10)
    uneven = True

    max_length: Positive = 2000

    @property
    def length(self) -> int:
        return self.max_length

    def read(self) -> Parts:
        return Parts(
            *(
                self._part(name, what)
                for name, what in zip(self.files.needs, ("training", "validation", "test"), strict=True)
            )
        )

    def _part(self, name: str, what: str) -> FixedPart:
        path, rows, answers = self.files.path(name, self.folder), [], []
        table = csv.DictReader(io.StringIO(self.files.text(name, self.folder)), delimiter="\t", quoting=csv.QUOTE_NONE)
        if table.fieldnames != ["Source", "Target"]:
            raise self.files.damaged(path, f"its header is {table.fieldnames}, expected Source, Target", self.folder)
        for line in table:
            rows.append(listops_tokens(line["Source"] or ""))
            if rows[-1] is None or line["Target"] not in tuple("0123456789"):
                why = f"line {table.line_num} is no ListOps row with a digit"
                raise self.files.damaged(path, why, self.folder)
            answers.append(int(line["Target"]))
        self.files.check_counts({f"{what} rows": len(rows)}, self.folder)
        return FixedPart(rows, np.array(answers, np.int64))


def listops_tokens(text: str) -> NDArray[Any] | None:
    """Return the tokens of a row without parentheses; None for another word."""
    words = ["X" if word == "]" else word for word in text.replace("(", " ").replace(")", " ").split()]
    known = {token: number for number, token in enumerate(LISTOPS_TOKENS)}
    if not words or not known.keys() >= set(words):
        return None
    return np.array([known[word] for word in words], np.uint8)
