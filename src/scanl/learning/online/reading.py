"""Rows of a stream: from lines of CSV, JSON or numbers, or from a data set of river."""

import csv
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from scanl.errors import ConfigError, DataError, unknown

VALUE = "value"  # name of the column of bare numbers
POLL = 0.1  # seconds between two looks at the end of a file that grows
MAX_LINE_BYTES = 2**24  # bytes of a line
MARK = 64  # bytes before the end that tell a file that grows from one that begins anew
SHOWN_LETTERS = 40  # characters of a wrong value in a message


class Row(NamedTuple):
    """A line of a stream. number: of the line, from 1.   values: by the names of the columns."""

    number: int
    values: Mapping[str, Any]


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file. Of a line over `MAX_LINE_BYTES` bytes only one more than these is kept."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield line


def file_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file."""
    try:
        with path.open("rb") as file:
            yield from lines_of(file)
    except OSError as error:
        raise DataError(f"learn: {path} cannot be read: {error.strerror}") from error


def shorter(path: Path, count: int) -> bool:
    """Return whether a file has fewer lines than `count`."""
    return sum(1 for _ in islice(file_lines(path), max(count, 0))) < count


def followed_lines(path: Path, anew: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the lines of a file that grows, without end. At its end wait for more.

    A file that was cut, or that another one has replaced under its name, is read from its begin. anew: takes the number
    of lines that were yielded before.
    """
    count = 0
    try:
        file = path.open("rb", buffering=0)
        try:
            begun, mark, replaced = b"", b"", False
            while True:
                file.seek(-len(mark), os.SEEK_CUR)
                cut = file.read(len(mark)) != mark
                more = b"" if cut else file.read(MAX_LINE_BYTES)
                *lines, begun = (begun + more).split(b"\n")
                if cut or (not more and replaced):
                    lines, begun = [begun] if begun else [], b""
                for line in lines:
                    count += 1
                    yield line + b"\n"
                begun = begun[: MAX_LINE_BYTES + 1]
                if cut or (not more and replaced):
                    anew(count)
                    file.close()
                    file, mark, replaced = path.open("rb", buffering=0), b"", False
                elif more:
                    mark = (mark + more)[-MARK:]
                else:
                    time.sleep(POLL)
                    here = os.fstat(file.fileno())
                    try:
                        there = path.stat()
                    except FileNotFoundError:  # between two files of one name
                        continue
                    replaced = (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev)
        finally:
            file.close()
    except OSError as error:
        raise DataError(f"learn: {path} cannot be read: {error.strerror}") from error


@dataclass
class Form:
    """The form of the lines of a stream. syntax: json, number or csv; None before the first line.   names: of CSV."""

    syntax: str | None = None
    names: list[str] | None = None


def rows(lines: Iterable[bytes], skip: int, form: Form, before: int = 0) -> Iterator[Row | DataError]:
    """Yield the rows of lines: JSON objects, numbers, or CSV with a line of names first.

    A line that is none yields a DataError, and the next line follows. skip: lines to pass over.   form: what the first
    line says is written there.   before: lines that are counted before the first.
    """
    for number, line in enumerate(lines, before + 1):
        if number <= before + skip:
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"it has more than {MAX_LINE_BYTES:,} bytes, expected fewer")
            text = line.decode("utf-8-sig").strip()
            if not text:
                continue
            if form.syntax is None:
                form.syntax = "json" if text.startswith("{") else "csv" if number_of(text) is None else "number"
            if form.syntax == "json":
                values = _object(text)
            elif form.syntax == "number":
                values = {VALUE: number_of(text)}
                if values[VALUE] is None:
                    raise DataError(f"it is {text[:SHOWN_LETTERS]!r}, expected a number")
            else:
                fields = [each.strip() for each in next(csv.reader([text]))]
                if form.names is None:
                    form.names = _checked_header(fields)
                    continue
                if fields == form.names:
                    continue
                if len(fields) != len(form.names):
                    raise DataError(f"it has {len(fields)} fields, expected {len(form.names)} as in the line of names")
                values = dict(zip(form.names, fields, strict=True))
        except (ValueError, csv.Error) as error:  # DataError, UnicodeDecodeError and JSONDecodeError are ValueErrors
            yield DataError(f"line {number}: {error}")
            continue
        yield Row(number, values)


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise DataError("its brackets are too deep, expected an object of JSON") from None
    if not isinstance(values, dict):
        raise DataError(f"it is {text[:SHOWN_LETTERS]!r}, expected an object of JSON")
    if "\\u" in text:
        json.dumps(values, ensure_ascii=False).encode()  # raises for half a character, which no file can hold
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values by their names. Raises DataError for a name that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"it has {twice[:SHOWN_LETTERS]!r} twice, expected each name once")
    return values


def _checked_header(fields: list[str]) -> list[str]:
    if any(number_of(name) is not None for name in fields):
        raise DataError(f"it is {','.join(fields)[:SHOWN_LETTERS]!r}, expected a line of names before several columns")
    twice = sorted({name for name in fields if fields.count(name) > 1})
    if twice:
        raise DataError(f"it has two columns called {twice[0]!r}; rename one")
    return fields


def number_of(text: str) -> float | None:
    """Return a text as a number, None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def river_rows(name: str, skip: int) -> tuple[str, str, int, Iterator[Row]]:
    """Return the target's name, the question and the classes of a data set of river, and its rows after `skip`."""
    try:
        from river import datasets
    except ImportError as error:
        raise ConfigError("learn: data sets of river need river: pip install 'scanl[online]'") from error
    known = [each for each in datasets.__all__ if each not in ("base", "synth")]
    if name not in known:
        raise ConfigError(f"learn: {unknown('data set of river', name, known)}")
    data = getattr(datasets, name)()
    if not getattr(data, "is_downloaded", True):
        raise DataError(
            f"learn: river has not downloaded {name} yet; do it: python -c 'from river import datasets as d; "
            f"d.{name}().download()'"
        )
    if data.n_outputs not in (None, 1):
        raise ConfigError(f"learn: {name} has {data.n_outputs} targets, expected one")
    question = "number" if data.task == "Regression" else "class"
    classes = data.n_classes or 2

    names = dict.fromkeys(next(iter(data))[0])  # a feature that a later sample lacks is a missing number

    def each() -> Iterator[Row]:
        for number, (x, y) in enumerate(islice(data, skip, None), skip + 1):
            yield Row(number, {**names, **x, "target": y if question == "number" else str(y)})

    return "target", question, classes, each()
