"""Read files and folders of text into a corpus of bytes."""

import gzip
import hashlib
import lzma
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scanl.data.base import IGNORED
from scanl.data.batch import Batch
from scanl.errors import DataError

Bytes = NDArray[np.uint8]
SEPARATOR = b"\0"  # between two files, and before the first one
FILES_FOR_SPLIT = 20  # with fewer files, a split by file would be too uneven

# Folders of the standard library that are skipped: tests, which some systems do not ship, and generated tables
# (code pages, help topics), which are almost copies of each other.
NOT_SOURCE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Corpus:
    """Training bytes and held-out bytes, each one array (N,) uint8. A zero byte separates files."""

    train: Bytes
    held_out: Bytes

    def digest(self) -> str:
        """Return a fingerprint of the bytes and of their split."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        for text in (self.train, self.held_out):
            digest.update(text.data)
        return digest.hexdigest()

    def check(self, length: int) -> None:
        """Raise DataError unless both parts are long enough for a sequence and its targets."""
        if len(self.train) <= length:
            raise DataError(
                f"corpus: {len(self.train)} bytes to train on, expected more than {length} because of the sequence "
                "length; give more text or a smaller --sequence-length"
            )
        if len(self.held_out) < 2:
            raise DataError(
                f"corpus: {len(self.held_out)} bytes held out, expected at least 2; "
                "give more text or a larger --held-out"
            )


def read_corpus(paths: Sequence[str | Path] = (), held_out: float = 0.05) -> Corpus:
    """Read files, and all text files below folders. Without paths, read the source of Python's standard library.

    The split is by file: a file is held out when the SHA-256 of its relative path, modulo 1000, is below
    1000 `held_out`. With fewer than 20 files the last part of the bytes is held out instead; with
    `held_out` 1 all bytes are.
    Raises DataError for a path that is missing, unreadable or empty.
    """
    if not 0 < held_out <= 1:
        raise DataError(f"corpus: held_out is {held_out}, expected above 0 and at most 1")
    texts = _texts(paths)
    aside = {name for name in texts if fraction(name) < held_out}
    if len(texts) >= FILES_FOR_SPLIT and 0 < len(aside) < len(texts):
        train = [text for name, text in texts.items() if name not in aside]
        return Corpus(_join(train), _join([texts[name] for name in texts if name in aside]))
    content = _join(list(texts.values()))
    cut = len(content) - round(len(content) * held_out)
    return Corpus(content[:cut], content[cut:])


def _texts(paths: Sequence[str | Path]) -> dict[str, bytes]:
    files = _files(paths) if paths else standard_library()
    texts = {name: _read(path) for name, path in files.items()}
    # Empty files below a folder are skipped. `_files` refuses an empty file that the user named.
    return {name: text for name, text in texts.items() if text}


def standard_library() -> dict[str, Path]:
    """Return the source files of the running Python's standard library by relative path, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return {name: names[name] for name in sorted(names) if not NOT_SOURCE.intersection(name.split("/"))}


def _files(paths: Sequence[str | Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            texts = _text_files(path)
            if not texts:
                raise DataError(
                    f"corpus: folder {path} has no text: every file in it is empty, hidden or binary; "
                    "name a folder with text files"
                )
            files.update({f"{path.name}/{name}": file for name, file in texts.items()})
        elif not path.exists():
            raise DataError(f"corpus: {path} does not exist; name a file or a folder")
        elif not _read(path):
            raise DataError(f"corpus: {path} is empty; name a file with text in it")
        else:
            files[path.as_posix() if path.name in files else path.name] = path
    return files


def _text_files(folder: Path) -> dict[str, Path]:
    """Find the text files below a folder: not hidden, not empty, no zero byte at the start (git's rule)."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(segment.startswith(".") for segment in name.split("/")):
            start = _read(path, 8000)
            if start and SEPARATOR not in start:
                files[name] = path
    return {name: files[name] for name in sorted(files)}


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise DataError(
            f"corpus: {path} cannot be read: {error.strerror}; change its permissions or leave it out"
        ) from error


def fraction(name: str) -> float:
    """Return a number from 0 to below 1 that depends on a name alone: what is below `held_out` is held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 1000 / 1000


def _join(texts: list[bytes]) -> Bytes:
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)


def spread(data: Bytes, count: int, parts: int = 32) -> Bytes:
    """Sample at most `count` bytes: `parts` pieces of equal length, at equal distances over all of `data`."""
    if len(data) <= count:
        return data
    parts = min(parts, count)
    starts = np.arange(parts) * len(data) // parts
    return np.concatenate([data[start : start + count // parts] for start in starts])


def side_by_side(data: Bytes, streams: int = 32, chunk: int = 256) -> Batch:
    """Cut a text into `streams` contiguous parts of equal length, the rows of a batch. The targets are the next bytes.

    The first input of a part is the byte before it; for the first part that is a zero byte. Targets past the end of
    the text are IGNORED. A short text is cut into fewer parts, so that each has at least four chunks of steps.
    """
    streams = max(1, min(streams, len(data) // (4 * chunk)))
    length = math.ceil(len(data) / streams)
    # int16 is a quarter of int64's memory, and enough for bytes.
    inputs, targets = np.zeros((2, streams * length), np.int16 if data.dtype == np.uint8 else np.int64)
    inputs[1 : len(data)], targets[: len(data)] = data[:-1], data
    targets[len(data) :] = IGNORED
    return Batch(inputs.reshape(streams, length), targets.reshape(streams, length))


def compressed(data: Bytes) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz` need for these bytes."""
    text = data.tobytes()
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text)) / len(text),
    }
