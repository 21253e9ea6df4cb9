"""Translation as one text: a sentence, a line break, and its translation. Only the translation counts in the loss."""

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED
from scanl.data.files import Files, whole_lines
from scanl.data.fixed import FixedPart, FixedRows, Parts
from scanl.data.published.sources import published
from scanl.data.questions import TokenLabel, Vocabulary
from scanl.data.readers.sword import entries
from scanl.options import at_least

Pairs = list[tuple[str, str]]
MEASURED_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


class JoinedRows(Sequence[NDArray[np.uint8]]):
    """Rows of bytes one after the other in one array, because millions of small arrays take much memory."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        self.bytes = np.frombuffer(b"".join(rows), np.uint8)
        self.ends = np.cumsum([0, *map(len, rows)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, place: Any) -> Any:
        return self.bytes[self.ends[place] : self.ends[place + 1]]


@dataclass
class Translation(FixedRows):
    """Pairs of sentences by bytes: predict each byte of a translation from the sentence and from the bytes before it.

    A row is a sentence, a line break, its translation, and a line break. Only the bytes after the first line break
    count in the loss and the score. The literature has an encoder and a decoder, and word pieces. Here one model reads
    both sentences in turn, so `scanl generate` translates a prompt that ends with a line break. While it trains, the
    score is bits per byte. `scanl eval` lets it translate the test part greedily, and writes the published score, BLEU,
    too, where sacrebleu is installed: `pip install 'scanl[bleu]'`. Pairs that are longer than `max_length` bytes, or
    that lack a sentence, are left out of every split.

    A subclass defines `pairs`.

    Args:
        seed, eval_examples, folder: see `FixedRows`.
        max_length: bytes of a row.
    """

    metric = "bits per byte"
    chance = 8.0
    question = TokenLabel(Vocabulary(256), scores=("bits",), written=("BLEU",))

    max_length: Annotated[int, at_least(4, ", two bytes and two line breaks")] = 512

    @property
    def length(self) -> int:
        return self.max_length - 1

    def pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        """Read the pairs for training, validation and test."""
        raise NotImplementedError

    def read(self) -> Parts:
        return Parts(*(self._part(pairs) for pairs in self.pairs()))

    def _part(self, pairs: Pairs) -> FixedPart:
        rows = [f"{first}\n{second}\n".encode() for first, second in pairs if first and second]
        examples = JoinedRows([row for row in rows if len(row) <= self.max_length])
        return FixedPart(examples, np.zeros(len(examples), np.int64))

    def form(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        inputs = np.zeros((len(rows), self.length), np.int64)
        for place, row in zip(inputs, rows, strict=True):
            place[: len(row) - 1] = row[:-1]
        return inputs

    def answers(self, split: FixedPart) -> NDArray[Any]:
        targets = np.full((len(split.rows), self.length), IGNORED, np.int64)
        for place, row in zip(targets, split.rows, strict=True):
            line = int((row == 10).argmax())
            place[line : len(row) - 1] = row[line + 1 :]
        return targets

    def parallel(self, files: Files, names: Sequence[str], lines: Sequence[Sequence[str]]) -> Pairs:
        """Return lines of two files as pairs. Raises DataError unless there are as many in both."""
        first, second = lines
        if len(first) != len(second):
            why = f"it has {len(second)} sentences, and {names[0]} has {len(first)}"
            raise files.damaged(files.path(names[1], self.folder), why, self.folder)
        return list(zip(first, second, strict=True))


@published("wmt14")
@dataclass
class WMT14Pairs(Translation):
    """WMT14: English news to German, byte by byte. Validation is newstest2013, test newstest2014.

    The files are lines of text, one sentence a line, such as the Stanford NLP group's, 4.5 million pairs. Other
    pairs of the same form are read with the options: WMT17 from Chinese with `first` zh and `second` en.

    Args:
        seed, eval_examples, folder, max_length: see `Translation`.
        first, second: endings of the files: the language of the sentence, and of its translation.
        validated_on, tested_on: names of the files of these parts.
    """

    first: str = "en"
    second: str = "de"
    validated_on: str = "newstest2013"
    tested_on: str = "newstest2014"

    def pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        train, validation, test = (self._read(split) for split in ("train", self.validated_on, self.tested_on))
        return train, validation, test

    def _read(self, split: str) -> Pairs:
        names = [f"{split}.{language}" for language in (self.first, self.second)]
        texts = [whole_lines(self.files.text(name, self.folder)) for name in names]
        return self.parallel(self.files, names, [[" ".join(line.split()) for line in lines] for lines in texts])


@published("iwslt14")
@dataclass
class IWSLT14Pairs(Translation):
    """IWSLT14: German talks to English, byte by byte, in small letters. About 160,000, 7,300 and 6,750 pairs.

    Every 23rd of the training pairs is for validation. Test has the sentences of dev2010, dev2012 (TEDX) and tst2010 to
    tst2012. A training pair is left out if it has more than 175 words, or if one side has over 1.5 times the words of
    the other. In the literature words are Moses' tokens. Here they are what stands between blanks, so the numbers of
    pairs differ a little.

    Args: see `Translation`.
    """

    def pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        names = [f"train.tags.de-en.{language}" for language in ("de", "en")]
        spoken = self.parallel(self.files, names, [list(self._spoken(name)) for name in names])
        train = [pair for pair in spoken if _alike(*pair)]
        test = [pair for split in MEASURED_SETS for pair in self._segments(split)]
        self.files.check_counts({"test pairs": len(test)}, self.folder)
        return [pair for i, pair in enumerate(train, 1) if i % 23], train[22::23], test

    def _spoken(self, name: str) -> Iterator[str]:
        """Yield the sentences, titles and descriptions of a training file, without the lines of other tags."""
        for line in whole_lines(self.files.text(name, self.folder)):
            if not re.match(r"\s*<(url|talkid|keywords|speaker|reviewer|translator|/?doc)", line):
                yield _plain(re.sub(r"</?(title|description)>", "", line))

    def _segments(self, split: str) -> Pairs:
        names = [f"IWSLT14.{split}.de-en.{language}.xml" for language in ("de", "en")]
        texts = []
        for name in names:
            segments = re.findall(r"<seg id=\"\d+\">(.*?)</seg>", self.files.text(name, self.folder))
            if not segments:
                raise self.files.damaged(self.files.path(name, self.folder), "it has no sentence <seg>", self.folder)
            texts.append([_plain(segment) for segment in segments])
        return self.parallel(self.files, names, texts)


@published("verses")
@dataclass
class Verses(Translation):
    """The Bible verse by verse, byte by byte: the English of 1769 to the Spanish of 1909.

    Both have the same verses, so each is a pair. Brackets and signs of paragraphs of the English are left out. A
    thousand verses at random are for validation and a thousand for test, at most a tenth of all each. They are of the
    same books as the training part, so the score is one of a narrow domain with old words. Packages have it: a small
    translation in the place of `iwslt14`.

    Args: see `Translation`.
    """

    def pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        pairs = self._aligned()
        self.files.check_counts({"pairs": len(pairs)}, self.folder)
        aside = min(1000, len(pairs) // 10)
        order = np.random.default_rng(42).permutation(len(pairs))
        test, validation, train = ([pairs[i] for i in sorted(chosen)] for chosen in np.split(order, [aside, 2 * aside]))
        return train, validation, test

    def _aligned(self) -> Pairs:
        """Return the pairs in the order of the book. A verse that one side has joined to another is left out."""
        path = self.files.path("verses-1769.json", self.folder)
        try:
            english = [
                (*_place(key), value) for key, value in json.loads(self.files.text(path.name, self.folder)).items()
            ]
        except (ValueError, AttributeError) as error:
            raise self.files.damaged(path, f"it is no object of verses: {error!r}", self.folder) from error
        spanish = {testament: entries(self.files, testament, self.folder) for testament in ("ot", "nt")}
        pairs, testament, last, at = [], "ot", ("", ""), 1
        for book, chapter, line in english:
            if book != last[0]:
                testament, at = ("nt", 1) if book == "Matthew" else (testament, at)
                at += 1  # the heading of the book
            at += (book, chapter) != last  # the heading of the chapter
            at, last = at + 1, (book, chapter)
            if at >= len(spanish[testament]):
                why = f"it ends before {book} {chapter} does"
                raise self.files.damaged(self.files.path(f"{testament}.bzv", self.folder), why, self.folder)
            first = " ".join(re.sub(r"[\[\]#]", " ", line).split())
            pairs += [(first, spanish[testament][at])] if first and spanish[testament][at] else []
        return pairs


def _place(key: str) -> tuple[str, str]:
    """Return the book and the chapter of "Genesis 1:1"."""
    book, verse = key.rsplit(" ", 1)
    chapter, _ = verse.split(":")
    return book, chapter


def _plain(line: str) -> str:
    return " ".join(html.unescape(line).lower().split())


def _alike(first: str, second: str) -> bool:
    shorter, longer = sorted(len(line.split()) for line in (first, second))
    return shorter > 0 and longer <= 175 and longer <= 1.5 * shorter
