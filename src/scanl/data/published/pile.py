"""The Pile: documents as packed JSON lines, one after the other as bytes."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from scanl.data.published.language import PublishedLanguage
from scanl.data.published.sources import published
from scanl.data.questions import NextToken, Vocabulary
from scanl.data.text.corpus import SEPARATOR, Bytes
from scanl.errors import ConfigError
from scanl.options import Positive


@published("pile")
@dataclass
class PileDocuments(PublishedLanguage):
    """The Pile by bytes: documents of 22 sources in the order of the files, a zero byte between two.

    The whole Pile has 825 GiB. Of each split, the first `max_bytes` bytes are read. The literature uses the
    tokens of GPT-NeoX, and its score is bits per byte or the perplexity of a token.

    Args:
        sequence_length, carry_state, eval_bytes, seed, folder: see `PublishedLanguage`.
        max_bytes: bytes of a part that are read.
        only: name of a source, such as Github or ArXiv: only its documents are read. Empty: all documents are read.
    """

    question = NextToken(Vocabulary(256))

    max_bytes: Positive = 10**9
    only: str = ""

    @cached_property
    def texts(self) -> tuple[Bytes, Bytes, Bytes]:
        shards = self.files.below("train", "*.jsonl.zst", self.folder)
        parts = [shards, *([self.files.path(name, self.folder)] for name in self.files.needs[1:])]
        train, validation, test = (self._joined(paths) for paths in parts)
        return train, validation, test

    def _joined(self, paths: list[Path]) -> Bytes:
        documents: list[bytes] = []
        count = 0
        for path in paths:
            for document in self._documents(path):
                documents.append(document)
                count += len(document) + 1
                if count > self.max_bytes:
                    break
            if count > self.max_bytes:
                break
        if not documents:
            raise self.files.damaged(
                paths[0], f"it has no document{f' of {self.only}' if self.only else ''}", self.folder
            )
        return np.frombuffer(SEPARATOR.join(documents)[: self.max_bytes], np.uint8)

    def _documents(self, path: Path) -> Iterator[bytes]:
        """Yield the documents of a file, which is unpacked as far as it is read."""
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError("pile: its files are packed by zstd: pip install 'scanl[pile]'") from error
        number = 0
        try:
            with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as content:
                for line in io.TextIOWrapper(content, encoding="utf-8"):
                    number += 1
                    row = json.loads(line)
                    if not self.only or row["meta"]["pile_set_name"] == self.only:
                        yield row["text"].encode()
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zstandard.ZstdError) as error:
            raise self.files.damaged(path, f"line {number} is no document: {error!r}", self.folder) from error
