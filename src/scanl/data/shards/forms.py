"""The forms of shards: Parquet, JSON lines, lines of text, and WebDataset's tar. A form reads rows one after another.

A row is read from the file at once and decoded only if it is used. A shard that is cut short or damaged raises an
error, even where the cut lies between two rows; a plain text is the exception, since any beginning of it is a text.
"""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from scanl.errors import ConfigError

Record = dict[str, Any]
Raw = Callable[[], Record]  # decodes a row
BATCH = 1024  # rows of a row group that are decoded together


def _zstandard(file: Any) -> Any:
    # zstandard and fsspec take the end of a file in the middle of a frame for its end; Arrow refuses it.
    return io.BufferedReader(_pyarrow().CompressedInputStream(file, "zstd"))


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError("shards: pyarrow is not installed: pip install 'scanl[series]'") from error
    return pyarrow


UNPACKERS: Mapping[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _zstandard,
}


class NoColumn(Exception):
    """A shard or a row has not a column. The text says which, and which columns there are."""


class ShardForm(ABC):
    """A form of shards. A subclass is listed in `FORMS`.

    name: in messages.   endings: of its files, before that of a packed file.   certain: whether a file with such an
    ending is a shard wherever it lies; else it may be a text of its own.
    """

    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]
    certain: ClassVar[bool] = True

    @abstractmethod
    def rows(self, file: Any, columns: Sequence[str] | None, row: int, offset: int) -> Iterator[tuple[Raw, int]]:
        """Yield the rows from number `row` on, each with the offset behind it.

        file: opened, unpacked, at its beginning.   columns: of the records; None for all.   offset: of the row in the
        unpacked file, as it was yielded with the row before; 0 where a form finds rows by their numbers.
        Raises ValueError, OSError, EOFError or TarError for a damaged file, and NoColumn.
        """


class Parquet(ShardForm):
    """Parquet: rows of the columns. One row group is read at a time, and those before the row are not read."""

    name = "Parquet"
    endings = (".parquet",)

    def rows(self, file: Any, columns: Sequence[str] | None, row: int, offset: int) -> Iterator[tuple[Raw, int]]:
        _pyarrow()
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(file)
        names = [field.name for field in table.schema_arrow] if columns is None else list(columns)
        if lacking := [name for name in names if name not in table.schema_arrow.names]:
            raise NoColumn(f"no column {lacking[0]!r}, only {', '.join(table.schema_arrow.names)}")
        first = 0
        for group in range(table.num_row_groups):
            behind = first + table.metadata.row_group(group).num_rows
            if behind <= row:
                first = behind
                continue
            for batch in table.iter_batches(BATCH, row_groups=[group], columns=names, use_threads=False):
                for place in range(max(0, row - first), batch.num_rows):
                    yield partial(_row, batch, place), 0
                first += batch.num_rows


def _row(batch: Any, place: int) -> Record:
    return {name: batch.column(name)[place].as_py() for name in batch.schema.names}


class InLines(ShardForm):
    """A row is a line that is not blank. A plain file is entered at the row; a packed one is unpacked up to it."""

    @abstractmethod
    def decoded(self, line: bytes, columns: Sequence[str] | None) -> Record:
        """Return the record of a line."""

    def rows(self, file: Any, columns: Sequence[str] | None, row: int, offset: int) -> Iterator[tuple[Raw, int]]:
        _skip(file, offset)
        for line in file:
            offset += len(line)
            if not line.isspace():
                yield partial(self.decoded, line, columns), offset


class JSONLines(InLines):
    """JSON lines: a line is an object, and its names are the columns."""

    name = "JSON lines"
    endings = (".jsonl", ".ndjson")

    def decoded(self, line: bytes, columns: Sequence[str] | None) -> Record:
        try:
            record = json.loads(line)
        except RecursionError as error:
            raise ValueError("its line has too many brackets within each other") from error
        if not isinstance(record, dict):
            raise ValueError(f"its line is a {type(record).__name__}, expected an object")
        return _chosen(record, columns)


class Lines(InLines):
    """Text: a line, without its end, is the column `text`."""

    name = "lines of text"
    endings = (".txt",)
    certain = False

    def decoded(self, line: bytes, columns: Sequence[str] | None) -> Record:
        return _chosen({"text": line.decode().rstrip("\r\n")}, columns)


class Tar(ShardForm):
    """WebDataset's tar: files in a row whose names differ only behind their first dot are a row.

    The columns are the rest of the names, such as `txt` or `cls`, with the bytes of the files, and `__key__`, what the
    names share.
    """

    name = "WebDataset's tar"
    endings = (".tar", ".tgz")

    def rows(self, file: Any, columns: Sequence[str] | None, row: int, offset: int) -> Iterator[tuple[Raw, int]]:
        _skip(file, offset)
        record: Record = {}
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_StrictHeader) as archive:
            while (member := archive.next()) is not None:
                vars(archive)["members"] = []  # tarfile keeps all of them
                folder, _, base = member.name.rpartition("/")
                stem, _, kind = base.partition(".")
                if not member.isfile() or not stem or stem.startswith("__"):
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if record and record["__key__"] != key:
                    yield partial(_chosen, record, columns), offset + member.offset
                    record = {}
                content = archive.extractfile(member)
                assert content is not None
                record = {"__key__": key, **record, kind.lower(): content.read()}
            if record:
                yield partial(_chosen, record, columns), offset + archive.offset
        while file.read(2**20):  # a packed file has its checksum behind the archive
            pass


class _StrictHeader(tarfile.TarInfo):
    """A header of an archive, which ends with a block of zeros: tarfile takes any end of the file for its end."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error


FORMS: tuple[ShardForm, ...] = (Parquet(), JSONLines(), Lines(), Tar())


def form_of(path: str) -> ShardForm | None:
    """Return the form of a file by the ending of its name, or None for another file."""
    name = path.lower()
    for ending in UNPACKERS:
        name = name.removesuffix(ending)
    return next((form for form in FORMS if name.endswith(form.endings)), None)


def is_packed(path: str) -> bool:
    """Whether a file is unpacked when it is read."""
    return path.lower().endswith((*UNPACKERS, ".tgz"))


def unpacked(file: Any, path: str) -> Any:
    """Return an open file with the content of a packed one; another file as it is."""
    ending = path.lower().replace(".tgz", ".gz")
    return next((opened(file) for packed, opened in UNPACKERS.items() if ending.endswith(packed)), file)


def _skip(file: Any, count: int) -> None:
    """Go to a byte of a file that was just opened."""
    if not count:
        return
    if file.seekable():
        file.seek(count)
        return
    while count and (content := file.read(min(count, 2**20))):
        count -= len(content)


def _chosen(record: Record, columns: Sequence[str] | None) -> Record:
    if columns is None:
        return record
    if lacking := [name for name in columns if name not in record]:
        raise NoColumn(f"no column {lacking[0]!r}, only {', '.join(record)}")
    return {name: record[name] for name in columns}
