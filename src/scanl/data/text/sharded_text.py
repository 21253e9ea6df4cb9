"""Documents in shards as a source: predict the next byte, in rows that are packed from one document after another."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scanl.data.base import (
    IGNORED,
    Exam,
    PackedDocuments,
    RepeatedIterable,
    Source,
    register,
)
from scanl.data.batch import Batch
from scanl.data.questions import NextToken, Vocabulary
from scanl.data.shards.listing import Shard, listed
from scanl.data.shards.reader import ShardPlace, ShardReader, ShardRow
from scanl.data.text.corpus import SEPARATOR, compressed, fraction
from scanl.data.text.text import MAX_HELD_BYTES
from scanl.errors import DataError
from scanl.options import Positive, Share

SAMPLE_SIZE = 32  # shards over which a sample of the held-out documents is spread, at most
SORTED_DOCUMENTS = 256  # held-out documents that are sorted by length, so that rows of a batch are about as long
STEPS = 2**20  # steps of a batch of held-out documents, at most, unless one document is longer
RECENT_MARKS = 4  # marks that are remembered: Lightning reads a batch before it needs it


class RowStart(NamedTuple):
    """The beginning of a row of a batch.

    rows: number of the row, over all processes.   cursor: before the document in which it begins.   tokens: number of
    the document's tokens that earlier rows have.
    """

    rows: int = 0
    cursor: ShardPlace = ShardPlace()
    tokens: int = 0


class PackedRow(NamedTuple):
    """A row of a batch.

    text: its T bytes and the byte after them.   begins: the steps where documents begin or go on.   end: where the next
    row begins.
    """

    text: bytes
    begins: list[int]
    end: RowStart


@register("shards")
@dataclass
class ShardedText(Source, PackedDocuments):
    """Documents of your own in shards: predict the next byte of Parquet, JSON lines, lines of text or WebDataset's tar.

    The documents are never all in memory. They follow one another, each after a zero byte, and are cut into rows of
    `sequence_length` bytes. The state is reset where a document begins, and where a row does. Each epoch reads the
    shards in another order. A document is held out when the SHA-256 of its shard's name and its number, modulo 1000,
    is below 1000 `held_out`.

    Args:
        data: files, folders, globs and URLs that fsspec opens, all of one form.
        held_out: fraction of the documents that is not used for training, above 0; 1 to measure all of them.
        sequence_length: bytes of a row.
        eval_bytes: held-out bytes in each measurement during training, from at most 32 shards.
        seed: seed of the order.
        column: of the documents; of WebDataset's tar the ending of their files, such as `txt`. A row without a value
            is no document.
        window: number of documents that follow one another and are shuffled. They are held in memory, and are what a
            resumed run reads again.
    """

    metric = "bits per byte"
    chance = 8.0
    question = NextToken(Vocabulary(256))

    data: Sequence[str | Path] = ()
    held_out: Share = 0.05
    sequence_length: Positive = 256
    eval_bytes: int = 16384
    seed: int = 0
    column: str = "text"
    window: Positive = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self._marks = deque([RowStart()], RECENT_MARKS)
        self._mark = RowStart()
        self._rows = self._packed(self._mark)

    @cached_property
    def reader(self) -> ShardReader:
        """All documents in the order of training; the shards are listed on first use."""
        shards, form = listed(self.data)
        return ShardReader(shards, form, [self.column], self.seed, self.window)

    def check(self) -> None:
        shards = self.reader.shards
        for held_out, texts in ((True, iter(self._sample)), (False, self._texts(shards, held_out=False))):
            if next(texts, None) is None:
                what, change = ("held out", "a larger") if held_out else ("to train on", "a smaller")
                raise DataError(
                    f"{self.name}: no document of {shards[0].path} and the other shards is {what}; give more documents "
                    f"or {change} --held-out"
                )

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        self._go_to(step * size * world)
        # The cut between two rows depends on the documents before it, so each process packs the rows of all.
        rows = [self._next() for _ in range(size * world)][rank * size : (rank + 1) * size]
        self._marks.append(self._mark)
        tokens = np.stack([np.frombuffer(row.text, np.uint8) for row in rows])
        starts = np.zeros((size, self.sequence_length), np.bool_)
        for row, flags in zip(rows, starts, strict=True):
            flags[row.begins] = True
        return Batch(tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64), starts=starts)

    def position(self, rows: int) -> Mapping[str, int]:
        mark = self._nearest(rows)
        return {"rows": mark.rows, "tokens": mark.tokens, **mark.cursor._asdict()}

    def resume(self, position: Mapping[str, int]) -> None:
        cursor = ShardPlace(*(position[name] for name in ShardPlace._fields))
        self._marks.append(RowStart(position["rows"], cursor, position["tokens"]))

    def unseen(self, step: int) -> Iterator[Batch]:
        yield from _batches(iter(self._sample))

    def exam(self, *, sample: bool = False) -> Exam:
        """Return an exam on the held-out documents."""
        if sample:
            texts = self._sampled(MAX_HELD_BYTES)
            count = sum(len(text) - 1 for text in texts)
            beside = compressed(np.frombuffer(b"".join(text[1:] for text in texts), np.uint8))
            title = f"{self.metric} on {count:,} bytes of held-out documents:"
            return Exam(title, RepeatedIterable(lambda: _batches(iter(texts))), beside, ".3f")
        shards = self.reader.shards
        title = f"{self.metric} on the held-out documents of {len(shards):,} shards:"
        return Exam(title, RepeatedIterable(lambda: _batches(self._texts(shards))), {}, ".3f")

    def digest(self) -> str:
        """Return the digest of the shards' names and sizes, and of the split, because no machine holds the shards."""
        digest = hashlib.sha256(f"{self.reader.form.name} {self.column} {self.held_out}".encode())
        for shard in self.reader.shards:
            digest.update(f"\n{shard.name} {shard.size}".encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        shards, form = self.reader.shards, self.reader.form.name
        return f"x {self.sequence_length} bytes, packed from the documents of {len(shards):,} shards of {form}"

    def _nearest(self, rows: int) -> RowStart:
        """Return the last known mark that is not behind a row."""
        return max((mark for mark in self._marks if mark.rows <= rows), default=RowStart())

    def _go_to(self, rows: int) -> None:
        """Let `_next` return the row of a number. What lies between the nearest known mark and the row is read."""
        if self._mark.rows != rows:
            self._mark = self._nearest(rows)
            self._rows = self._packed(self._mark)
            while self._mark.rows < rows:
                self._next()
            self._marks.append(self._mark)

    def _next(self) -> PackedRow:
        row = next(self._rows)
        self._mark = row.end
        return row

    def _packed(self, mark: RowStart) -> Iterator[PackedRow]:
        rows, cursor, skipped = mark
        pieces, begins, count = list[bytes](), list[int](), 0
        for row, behind in self.reader.endless(cursor):
            text = b"" if self._is_held_out(row) else self._text(row)
            begin, skipped = skipped, 0
            while begin < len(text):
                piece = text[begin : begin + self.sequence_length - count]
                pieces.append(piece)
                begins.append(count)
                begin, count = begin + len(piece), count + len(piece)
                if count == self.sequence_length:
                    rows += 1
                    ended = begin == len(text)
                    pieces.append(SEPARATOR if ended else text[begin : begin + 1])
                    end = RowStart(rows, behind) if ended else RowStart(rows, cursor, begin)
                    yield PackedRow(b"".join(pieces), begins, end)
                    pieces, begins, count = [], [], 0
            cursor = behind

    def _is_held_out(self, row: ShardRow) -> bool:
        return fraction(f"{row.shard.name}/{row.number}") < self.held_out

    def _text(self, row: ShardRow) -> bytes:
        """Return a document behind a zero byte; nothing for a row without a document."""
        document = row.record()[self.column]
        if isinstance(document, str):
            document = document.encode(errors="surrogatepass")
        if document is None:
            return b""
        if not isinstance(document, bytes):
            kind = type(document).__name__
            raise DataError(
                f"{self.name}: column {self.column!r} of {row.shard.path} has a {kind} in row {row.number}, expected "
                "text; name another column: --data-options.column NAME"
            )
        return SEPARATOR + document

    def _texts(self, shards: Sequence[Shard], held_out: bool = True) -> Iterator[bytes]:
        """Yield the documents of a part, between zero bytes."""
        for row, _ in replace(self.reader, shards=shards, seed=None, window=1).rows(ShardPlace()):
            if self._is_held_out(row) == held_out and (text := self._text(row)):
                yield text + SEPARATOR

    @cached_property
    def _sample(self) -> list[bytes]:
        return self._sampled(self.eval_bytes)

    def _sampled(self, count: int) -> list[bytes]:
        """Return about `count` bytes of held-out documents: the first of shards at equal distances."""
        every = self.reader.shards
        number = min(SAMPLE_SIZE, len(every), count)
        texts: list[bytes] = []
        for shard in (every[place * len(every) // number] for place in range(number)):
            remaining = count // number
            for text in self._texts([shard]):
                texts.append(text[: remaining + 1])
                remaining -= len(texts[-1]) - 1
                if remaining <= 0:
                    break
        return texts


def _batches(texts: Iterator[bytes]) -> Iterator[Batch]:
    """Yield documents between zero bytes as rows of batches. The rows of a batch are about equally long."""
    while group := sorted(islice(texts, SORTED_DOCUMENTS), key=len):
        rows: list[bytes] = []
        for text in group:
            if rows and (len(rows) + 1) * len(text) > STEPS:
                yield _batch(rows)
                rows = []
            rows.append(text)
        yield _batch(rows)


def _batch(texts: Sequence[bytes]) -> Batch:
    """Return documents as rows; targets behind the end of a document are IGNORED."""
    inputs = np.zeros((len(texts), len(texts[-1]) - 1), np.int16)  # a quarter of int64's memory, and enough for bytes
    targets = np.full_like(inputs, IGNORED)
    for row, text in enumerate(texts):
        tokens = np.frombuffer(text, np.uint8)
        inputs[row, : len(text) - 1], targets[row, : len(text) - 1] = tokens[:-1], tokens[1:]
    return Batch(inputs, targets)
