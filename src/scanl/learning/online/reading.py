"""Samples of a stream: from lines of CSV, JSON or numbers, from a data set of river, or from a stream of ours."""

import csv
import json
import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from scanl.data.series.columns import MISSING
from scanl.errors import ConfigError, DataError, unknown

VALUE = "value"  # name of the column of bare numbers
POLL = 0.1  # seconds between two looks at the end of a file that grows
LONGEST = 2**24  # bytes of a line
MARK = 64  # bytes before the end that tell a file that grows from one that begins anew
SHOWN = 40  # characters of a wrong value


class Row(NamedTuple):
    """A line of a stream. number: of the line, from 1.   values: by the names of the columns."""

    number: int
    values: Mapping[str, Any]


class Item(NamedTuple):
    """A sample, or a truth alone. inputs: None if the line has only a truth.   truth: None if it has none."""

    number: int
    inputs: list[float] | None
    truth: Any
    key: Hashable


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file. Of a line over `LONGEST` bytes only one more than these is kept."""
    while line := file.readline(LONGEST + 1):
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST + 1)
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
                more = b"" if cut else file.read(LONGEST)
                *lines, begun = (begun + more).split(b"\n")
                if cut or (not more and replaced):
                    lines, begun = [begun] if begun else [], b""
                for line in lines:
                    count += 1
                    yield line + b"\n"
                begun = begun[: LONGEST + 1]
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
            if len(line) > LONGEST:
                raise DataError(f"it has more than {LONGEST:,} bytes, expected fewer")
            text = line.decode("utf-8-sig").strip()
            if not text:
                continue
            if form.syntax is None:
                form.syntax = "json" if text.startswith("{") else "number" if _is_number(text) else "csv"
            if form.syntax == "json":
                values = _object(text)
            elif form.syntax == "number":
                values = {VALUE: _float(text)}
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
        raise DataError(f"it is {text[:SHOWN]!r}, expected an object of JSON")
    if "\\u" in text:
        json.dumps(values, ensure_ascii=False).encode()  # raises for half a character, which no file can hold
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values by their names. Raises DataError for a name that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"it has {twice[:SHOWN]!r} twice, expected each name once")
    return values


def _shown(value: Any) -> str:
    """Return the begin of a value, as it is written in a message."""
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _checked_header(fields: list[str]) -> list[str]:
    if any(map(_is_number, fields)):
        raise DataError(f"it is {','.join(fields)[:SHOWN]!r}, expected a line of names before several columns")
    twice = sorted({name for name in fields if fields.count(name) > 1})
    if twice:
        raise DataError(f"it has two columns called {twice[0]!r}; rename one")
    return fields


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"it is {text[:SHOWN]!r}, expected a number") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass
class Columns:
    """Which columns are inputs, and which is the target, as the first row has them.

    names: of the inputs.   text: columns that are not read, because they are text.   question: number or class.
    """

    target: str
    horizon: int | None
    key: str | None
    names: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    question: str = "number"

    @classmethod
    def of(
        cls,
        row: Row,
        target: str | None,
        question: str | None,
        horizon: int | None,
        key: str | None,
        without: list[str],
    ) -> "Columns":
        """Read the first row. Raises ConfigError for a column that it lacks."""
        values = row.values
        if target is None and len(values) == 1:
            (target,) = values
        if target is None:
            raise ConfigError(f"learn: target is none, expected one of the columns {', '.join(values)}")
        for name in filter(None, [target if key is None else None, key, *without]):
            if name not in values:
                raise ConfigError(f"learn: {unknown('column', name, list(values))}")
        rest = [name for name in values if name not in (target, key, *without)]
        numbers = [name for name in rest if _number(values[name]) is not None]
        text = [name for name in rest if name not in numbers]
        if horizon is None and not numbers and key is None:
            horizon = 1
        if question is None:
            first = values.get(target)
            question = "class" if isinstance(first, bool) or _number(first) is None else "number"
        if horizon is not None:
            if question == "class":
                raise ConfigError("learn: the target is a class, and no other column has numbers; expected inputs")
            numbers = [target, *numbers]
        if not numbers:
            raise ConfigError(f"learn: no column but {target} has numbers, expected inputs")
        return cls(target, horizon, key, numbers, text, question)

    def item(self, row: Row) -> Item:
        """Return the sample of a row. Raises DataError for a value of another kind, or a column that has vanished."""
        values, key = row.values, None
        if self.key is not None:
            key = values.get(self.key)
            if isinstance(key, list | dict):
                raise DataError(f"line {row.number}: column {self.key!r} is {_shown(key)}, expected a name or a number")
            if key is None or key == "" or key != key:
                raise DataError(f"line {row.number}: column {self.key!r} is missing, expected the name of a sample")
        truth = self._truth(row)
        lacking = [name for name in self.names if name not in values]
        if lacking and self.key is not None and len(lacking) == len(self.names) and truth is not None:
            return Item(row.number, None, truth, key)
        if lacking:
            raise DataError(f"line {row.number}: column {lacking[0]!r} is missing, expected it as in the first line")
        return Item(row.number, [self._input(row, name) for name in self.names], truth, key)

    def _input(self, row: Row, name: str) -> float:
        number = _number(row.values[name])
        if number is None or math.isinf(number):
            shown = _shown(row.values[name])
            raise DataError(f"line {row.number}: column {name!r} is {shown}, expected a finite number")
        return number

    def _truth(self, row: Row) -> Any:
        if self.target not in row.values:
            if self.key is None:
                raise DataError(f"line {row.number}: column {self.target!r} is missing, expected the target")
            return None
        value = row.values[self.target]
        if value is None or (isinstance(value, str) and value in MISSING) or value != value:
            return None
        if self.question == "class":
            if isinstance(value, list | dict):
                raise DataError(f"line {row.number}: column {self.target!r} is {_shown(value)}, expected a class")
            return value if isinstance(value, str | bool) else str(value)
        number = _number(value)
        if number is None or not math.isfinite(number):
            shown = _shown(value)
            raise DataError(f"line {row.number}: column {self.target!r} is {shown}, expected a finite number")
        return number


def _number(value: Any) -> float | None:
    """Return a value as a number, NaN for a missing one, and None for what is none."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        if value in MISSING:
            return math.nan
        return float(value) if _is_number(value) else None
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.inf


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


def standard_input() -> Iterator[bytes]:
    """Yield the lines of standard input as they come."""
    yield from lines_of(sys.stdin.buffer)
