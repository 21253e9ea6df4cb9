"""Text as a source: predict the next byte, in shuffled windows or in streams whose state is carried over."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import Exam, Source, register
from scanl.data.batch import Batch
from scanl.data.order import epoch, shuffled
from scanl.data.questions import NextToken, Vocabulary
from scanl.data.series.columns import KINDS, ending
from scanl.data.text.corpus import Bytes as Bytes
from scanl.data.text.corpus import Corpus as Corpus
from scanl.data.text.corpus import compressed, side_by_side, spread
from scanl.data.text.corpus import read_corpus as read_corpus
from scanl.data.text.corpus import standard_library as standard_library
from scanl.errors import ConfigError
from scanl.options import Natural, Positive

MAX_HELD_BYTES = 2**20  # bytes measured at the end of training, at most; `scanl eval` reads all


class Order(Protocol):
    """The order in which steps read bytes. It is a pure function of the step, so resuming replays nothing."""

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Return the sequences of one process: (size, length + 1). The last byte of a row is only a target.

        Process `rank` of `world` reads rows rank*size to (rank+1)*size of the batch of world*size rows that a single
        process would read.
        """
        ...


@dataclass(frozen=True)
class Windows:
    """Independent sequences. Each epoch reads the corpus as a ring, cuts it at a random offset, and shuffles the
    pieces."""

    data: Bytes
    length: int
    seed: int

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """See `Order.batch`."""
        total = len(self.data)
        offsets, pieces = shuffled(self.seed, total, total // self.length, step, size, rank, world)
        return _cut(self.data, offsets + pieces * self.length, self.length)


@dataclass(frozen=True)
class ContiguousStreams:
    """One contiguous stream for each row of the batch; each step reads the next chunk, so a state can be carried over.

    The streams start at equal distances in the corpus, which is read as a ring.
    """

    data: Bytes
    length: int
    seed: int

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """See `Order.batch`."""
        offset, _ = epoch(self.seed, 0, len(self.data), 1)
        rows = rank * size + np.arange(size)
        starts = offset + rows * len(self.data) // (size * world) + step * self.length
        return _cut(self.data, starts, self.length)


def _words(data: Bytes) -> int:
    """Return the number of words in bytes: of stretches without white space and without the end of a file."""
    blank = np.isin(data, list(b" \t\n\r\v\f\0"))
    return int((~blank[1:] & blank[:-1]).sum()) + int(not blank[:1].all())


def _cut(data: Bytes, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    places = starts[:, None] + np.arange(length + 1)
    return data.take(places, mode="wrap").astype(np.int64)


@dataclass
class TokenText(Source):
    """Predict the next token of a long text: bytes, words or other units. The training part is one array.

    A subclass defines `corpus`. If the published test part is not the part held out during training, it defines `test`.
    The metric bears the name of its `unit`.

    Args:
        sequence_length: tokens of a training sequence.
        carry_state: read the text in order (`ContiguousStreams`), so that a state can be carried over; otherwise in
            shuffled `Windows`.
        eval_bytes: held-out tokens in each measurement during training: a sample spread over all of them.
        seed: seed of the order.
        length_doublings, doubling_steps: warm-up of the length: training begins with sequences of sequence_length /
            2^length_doublings tokens, and their length doubles every doubling_steps steps. The number of tokens in a
            batch stays the same. Source: Nguyen et al., "HyenaDNA", arXiv:2306.15794, sec. 3.2.
    """

    unit: ClassVar[str] = "byte"
    word_perplexity: ClassVar[bool] = False  # whether an exam measures the perplexity of a word too

    sequence_length: int = 256
    carry_state: bool = False
    eval_bytes: int = 16384
    seed: int = 0
    length_doublings: Natural = 0
    doubling_steps: Positive = 1000

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.metric = f"bits per {cls.unit}"

    @property
    @abstractmethod
    def corpus(self) -> Corpus:
        """The training part and the part held out while training; read on first use."""

    @property
    def test(self) -> Bytes:
        """The part on which a trained model is measured."""
        return self.corpus.held_out

    @cached_property
    def order(self) -> Order:
        order = ContiguousStreams if self.carry_state else Windows
        return order(self.corpus.train, self.sequence_length, self.seed)

    @property
    def length(self) -> int:
        return self.sequence_length

    def check(self) -> None:
        if self.sequence_length % 2**self.length_doublings:
            of = f"2^{self.length_doublings} because of length_doublings"
            raise ConfigError(f"{self.name}: sequence_length is {self.sequence_length}, expected a multiple of {of}")
        if self.length_doublings and self.carry_state:
            raise ConfigError(f"{self.name}: carry_state is True, expected False because of length_doublings")
        self.corpus.check(self.sequence_length)

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        tokens = self.order.batch(step, size, rank, world)
        length = self.sequence_length >> max(0, self.length_doublings - step // self.doubling_steps)
        return Batch(*(array.reshape(-1, length) for array in (tokens[:, :-1], tokens[:, 1:])))

    def digest(self) -> str:
        return self.corpus.digest()

    def unseen(self, step: int) -> Iterator[Batch]:
        yield side_by_side(spread(self.corpus.held_out, self.eval_bytes))

    def exam(self, *, sample: bool = False) -> Exam:
        """Return an exam on the test part."""
        text, total = spread(self.test, MAX_HELD_BYTES) if sample else self.test, len(self.test)
        return self._exam(
            text, f"held-out {self.unit}s" if len(text) == total else f"{self.unit}s, a sample of {total:,} held out"
        )

    def _exam(self, data: Bytes, what: str) -> Exam:
        beside = compressed(data) if self.unit == "byte" else {}
        question = None
        if self.word_perplexity:
            words = len(data) if self.unit == "word" else _words(data)
            asked = {
                "scores": (*cast(NextToken, self.question).scores, "word perplexity"),
                "tokens_per_word": len(data) / max(1, words),
            }
            question = replace(cast(NextToken, self.question), **asked)
        return Exam(f"{self.metric} on {len(data):,} {what}:", [side_by_side(data)], beside, ".3f", question=question)

    def __str__(self) -> str:
        train, held_out = len(self.corpus.train), len(self.corpus.held_out)
        return f"x {self.sequence_length} {self.unit}s; {train:,} {self.unit}s to train on, {held_out:,} held out"


@register("text")
@dataclass
class Text(TokenText):
    """Predict the next byte of files and folders, split into a training part and a held-out part.

    Args:
        data: files and folders; if none, the source of Python's standard library.
        held_out: fraction of the text that is not used for training, above 0; 1 to measure all of it.
        sequence_length, carry_state, eval_bytes, seed: see `TokenText`.
    """

    id = "B-arxivgithub"  # the documents are not published, so a folder of one's own is read
    chance = 8.0
    question = NextToken(Vocabulary(256))
    is_text = True

    data: Sequence[str | Path] = ()
    held_out: float = 0.05

    @cached_property
    def corpus(self) -> Corpus:  # pyright: ignore[reportIncompatibleMethodOverride]
        return read_corpus(self.data, self.held_out)

    def held_out_bytes(self) -> bytes:
        return self.corpus.held_out.tobytes()

    @property
    def notes(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A line on the first table among the files."""
        tables = [path.name for path in map(Path, self.data) if ending(path) in KINDS]
        read = "is read as a text; as a table it is read with --question and --target"
        return [f"text: {tables[0]} {read}"] if tables else []
