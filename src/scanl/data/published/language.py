"""Long texts with a published split: enwik8, text8, Penn Treebank, WikiText-103, PG-19, and genomes as FASTA."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.files import Files, lines
from scanl.data.published.sources import kind, published
from scanl.data.questions import NextToken, Question, Vocabulary
from scanl.data.readers import fasta, text
from scanl.data.text.corpus import Bytes, Corpus
from scanl.data.text.text import TokenText
from scanl.options import Positive

PART_NAMES = {"train": "training", "validation": "validation", "test": "test"}  # how published numbers call the parts


@dataclass
class PublishedLanguage(TokenText):
    """A long text in published parts. A subclass defines `texts`.

    While training runs, a sample of the validation part is measured; at the end and by `scanl eval`, the test part.

    Args:
        sequence_length, carry_state, eval_bytes, seed: see `TokenText`.
        folder: where the files lie; none: in the folder of the data set.
    """

    folder: str = ""

    @property
    def files(self) -> Files:
        """The files of the data set."""
        assert self.needs is not None
        return self.needs

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        """Read the files: the parts for training, validation and test."""
        raise NotImplementedError

    @cached_property
    def corpus(self) -> Corpus:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Corpus(*self.texts[:2])

    @property
    def test(self) -> Bytes:
        return self.texts[2]


@dataclass
class InParts(PublishedLanguage):
    """A text whose files a layout names: three for the parts, or a whole one whose last two twentieths are cut off.

    A subclass defines `readers`. Each makes the tokens of a file; its argument names the part.
    """

    readers: ClassVar[Mapping[str, Callable[..., Bytes]]]
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("train", "validation", "test"), ("whole",)]

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        layout = self.files.laid_out(self.folder)

        def read(split: str, what: str) -> Bytes:
            (name,) = layout.parts[split]
            return self.readers[layout.reader](self.files, name, self.folder, what, **layout.options)

        if "whole" in layout.parts:
            tokens = read("whole", "")
            twentieth = len(tokens) // 20
            return tokens[: -2 * twentieth], tokens[-2 * twentieth : -twentieth], tokens[-twentieth:]
        train, validation, test = (read(split, what) for split, what in PART_NAMES.items())
        return train, validation, test


@kind
@dataclass
class PublishedText(InParts):
    """A text by bytes: predict the next of 256.

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `PublishedLanguage`.
    """

    question = NextToken(Vocabulary(256))
    readers: ClassVar[Mapping[str, Callable[..., Bytes]]] = {
        "bytes": text.whole,
        "lines": text.lined,
        "books": text.books,
    }


@kind
@dataclass
class Words(PublishedLanguage):
    """A text in three files, of words between blanks; the end of a line is the word `<eos>`.

    The vocabulary comes from the training file, in the order of first occurrence.

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `PublishedLanguage`.
    """

    unit = "word"
    word_perplexity = True
    splits: ClassVar[Sequence[tuple[str, ...]]] = [("train", "validation", "test")]
    readers: ClassVar[Mapping[str, Callable[..., list[str]]]] = {"lines": text.words}

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        layout, known, parts = self.files.laid_out(self.folder), dict[str, int](), []
        for split, what in PART_NAMES.items():
            (name,) = layout.parts[split]
            words = self.readers[layout.reader](self.files, name, self.folder)
            if split == "train":
                known = {word: number for number, word in enumerate(dict.fromkeys(words))}
            try:
                parts.append(np.array([known[word] for word in words], np.int64))
            except KeyError as error:
                path = self.files.path(name, self.folder)
                raise self.files.damaged(path, f"its word {error} is not in the training file", self.folder) from error
            self.files.check_counts({f"{what} words": len(words)}, self.folder)
        self.files.check_counts({"different words": len(known)}, self.folder)
        self._size = len(known)
        return parts[0], parts[1], parts[2]

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        _ = self.texts
        return NextToken(Vocabulary(self._size))


@kind
@dataclass
class Genome(InParts):
    """A genome: predict the next of A, C, G, T and N (unknown).

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `PublishedLanguage`.
    """

    unit = "base"
    question = NextToken(Vocabulary(5))
    readers: ClassVar[Mapping[str, Callable[..., Bytes]]] = {"fasta": fasta.bases}


@published("hg38")
@dataclass
class HumanGenome(Genome):
    """The human genome in published intervals, base by base; the intervals of a part follow one another.

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `PublishedLanguage`.
        interval: bases of each interval. A shorter published interval is extended on both sides, within its chromosome.
            Of a longer one only the first bases are read.
    """

    interval: Positive = 131_072

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        genome = fasta.records(self.files, "hg38.ml.fa", self.folder)
        bed = self.files.path("human-sequences.bed", self.folder)
        parts: dict[str, list[NDArray[np.uint8]]] = {"train": [], "valid": [], "test": []}
        for line in lines(self.files.text("human-sequences.bed", self.folder)):
            fields = line.split("\t")
            right = len(fields) == 4 and fields[0] in genome and fields[3] in parts
            if not right or not all(field.isdigit() for field in fields[1:3]):
                raise self.files.damaged(bed, f"line {line!r} is no interval of a chromosome and a part", self.folder)
            begin, end = extended(int(fields[1]), int(fields[2]), self.interval, len(genome[fields[0]]))
            parts[fields[3]].append(genome[fields[0]][begin:end])
        for name, what in (("train", "training"), ("valid", "validation"), ("test", "test")):
            self.files.check_counts({f"{what} intervals": len(parts[name])}, self.folder)
            if not parts[name]:
                raise self.files.damaged(bed, f"it has no interval of part {name}", self.folder)
        train, valid, test = map(np.concatenate, parts.values())
        return train, valid, test


def extended(begin: int, end: int, length: int, total: int) -> tuple[int, int]:
    """Return the bounds of an interval with another length, inside a chromosome of `total` bases."""
    more = length - (end - begin)
    if more <= 0:
        return begin, begin + length
    return max(0, begin - more // 2), min(total, end + more - more // 2)
