"""The shards of a data set: the files that paths, folders, globs and URLs stand for."""

import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple

from scanl.data.shards.forms import FORMS, UNPACKERS, ShardForm, form_of, is_packed, unpacked
from scanl.errors import ConfigError, DataError

OTHER_ENDINGS = (".md", ".json", ".yaml")  # files that describe shards and lie beside them


class Shard(NamedTuple):
    """A file of rows.

    path: as `opened` takes it.   name: its path below the folder that all shards share.   size: in bytes; None where
    the file system does not say.
    """

    path: str
    name: str
    size: int | None


def listed(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[list[Shard], ShardForm]:
    """Return the shards that paths stand for, and their form.

    A path is a file, a folder (with the folders in it), a glob, or a URL of one of these that fsspec opens. A folder or
    a glob stands for its files in the order of their names, without hidden ones and such with other endings.
    Raises DataError where there is none, or two forms.
    """
    words = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    sizes: dict[str, int | None] = {}
    for word in words:
        sizes.update(_files(os.fspath(word)))
    if not sizes:
        raise DataError(f"shards: data is {words}, expected one path or more")
    forms = {form_of(path): path for path in reversed(sizes)}
    if len(forms) > 1:
        one, other = list(forms.values())[:2]
        raise DataError(
            f"shards: {other} and {one} are of two forms, expected one; name a glob, such as 'FOLDER/*.jsonl'"
        )
    (form,) = forms
    assert form is not None
    shared = posixpath.commonpath([posixpath.dirname(path) for path in sizes])
    return [Shard(path, posixpath.relpath(path, shared or "."), size) for path, size in sizes.items()], form


def is_sharded(word: str) -> bool:
    """Whether a word of `--data` stands for shards, and not for texts that are read as bytes."""
    if _is_url(word):
        return True
    path, form = Path(word), form_of(word)
    if path.is_dir():
        files = [file for file in _visible(path) if not file.lower().endswith(OTHER_ENDINGS)]
        return bool(files) and all((form := form_of(file)) and (form.certain or is_packed(file)) for file in files)
    if form is None:
        return False
    return form.certain or is_packed(word) or (has_magic(word) and not path.exists())


def absolute(word: str) -> str:
    """Return a path as it is named from any folder; a URL as it is."""
    return word if _is_url(word) else str(Path(word).resolve())


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open a shard for reading, unpacked. Raises OSError."""
    system, name = _system(path)
    with system.open(name, "rb") as file, closing(unpacked(file, path)) as content:
        yield content


def _is_url(word: str) -> bool:
    return "://" in word or "::" in word


def _visible(folder: Path) -> Iterable[str]:
    for at, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (os.path.join(at, name) for name in files if not name.startswith((".", "_")))


def _system(word: str) -> tuple[Any, str]:
    """Return the file system of fsspec that holds a path, and the path there."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(word)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"shards: {word} cannot be opened: {error}") from error


def _files(word: str) -> dict[str, int | None]:
    """Return the files that a word stands for, in order, with their sizes."""
    system, path = _system(word)
    kinds = ", ".join(ending for form in FORMS for ending in form.endings)
    try:
        if has_magic(path) and not system.exists(path):
            entries, hint = system.glob(path, detail=True), "the glob stands for no such file"
        elif system.isdir(path):
            entries, hint = system.find(path, detail=True), "the folder has no such file"
        else:
            entries, hint = {path: system.info(path)}, "the file ends otherwise"
    except OSError as error:
        raise DataError(f"shards: {word} cannot be read: {error.strerror or 'there is no such file'}") from error
    at = path if system.isdir(path) else ""
    files = {
        system.unstrip_protocol(name) if _is_url(word) else name: entry.get("size")
        for name, entry in sorted(entries.items())
        if entry["type"] == "file" and form_of(name) and not _is_hidden(posixpath.relpath(name, at) if at else name, at)
    }
    if not files:
        raise DataError(
            f"shards: {word} has no shard, expected files of {kinds}, also packed ({', '.join(UNPACKERS)}): {hint}"
        )
    return files


def _is_hidden(name: str, at: str) -> bool:
    """Whether a file below a folder is hidden by its name or by that of a folder."""
    return any(word.startswith((".", "_")) for word in (name.split("/") if at else [posixpath.basename(name)]))
