"""Samples of a stream: from lines of CSV, JSON or numbers, from a data set of river, or from a stream of ours."""

import csv
import json
import math
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from scanl.data.columns import MISSING
from scanl.errors import ConfigError, DataError, unknown

VALUE = "value"  # name of the column of bare numbers
POLL = 0.1  # seconds between two looks at the end of a file that grows


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


def file_lines(path: Path, follow: bool) -> Iterator[bytes]:
    """Yield the lines of a file. follow: at its end wait for more, without end."""
    try:
        with path.open("rb") as file:
            begun = b""
            for line in file:
                if follow and not line.endswith(b"\n"):
                    begun = line
                    break
                yield line
            while follow:
                more = file.readline()
                begun += more
                if begun.endswith(b"\n"):
                    yield begun
                    begun = b""
                elif not more:
                    time.sleep(POLL)
    except OSError as error:
        raise DataError(f"learn: {path} cannot be read: {error.strerror}") from error


def rows(lines: Iterable[bytes], skip: int, header: list[str] | None = None) -> Iterator[Row | DataError]:
    """Yield the rows of lines: JSON objects, numbers, or CSV with a line of names first; the first line says which.

    A line that is none yields a DataError, and the next line follows. skip: lines to pass over, after which the names
    of CSV are in `header`.
    """
    names, form = header, None if header is None else "csv"
    for number, line in enumerate(lines, 1):
        if number <= skip:
            continue
        try:
            text = line.decode("utf-8-sig").strip()
            if not text:
                continue
            if form is None:
                form = "json" if text.startswith("{") else "number" if _is_number(text) else "csv"
            if form == "json":
                values = json.loads(text)
                if not isinstance(values, dict):
                    raise DataError(f"it is {text[:40]!r}, expected an object of JSON")
            elif form == "number":
                values = {VALUE: _float(text)}
            else:
                fields = [each.strip() for each in next(csv.reader([text]))]
                if names is None:
                    names = _checked_header(fields)
                    continue
                if fields == names:
                    continue
                if len(fields) != len(names):
                    raise DataError(f"it has {len(fields)} fields, expected {len(names)} as in the line of names")
                values = dict(zip(names, fields, strict=True))
        except (ValueError, csv.Error) as error:  # DataError, UnicodeDecodeError and JSONDecodeError are ValueErrors
            yield DataError(f"line {number}: {error}")
            continue
        yield Row(number, values)


def _checked_header(fields: list[str]) -> list[str]:
    if any(map(_is_number, fields)):
        raise DataError(f"it is {','.join(fields)[:40]!r}, expected a line of names before several columns")
    twice = sorted({name for name in fields if fields.count(name) > 1})
    if twice:
        raise DataError(f"it has two columns called {twice[0]!r}; rename one")
    return fields


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"it is {text[:40]!r}, expected a number") from None


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
            if key is None or key == "":
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
            raise DataError(f"line {row.number}: column {name!r} is {row.values[name]!r}, expected a finite number")
        return number

    def _truth(self, row: Row) -> Any:
        if self.target not in row.values:
            if self.key is None:
                raise DataError(f"line {row.number}: column {self.target!r} is missing, expected the target")
            return None
        value = row.values[self.target]
        if value is None or (isinstance(value, str) and value in MISSING):
            return None
        if self.question == "class":
            return value if isinstance(value, str | bool) else str(value)
        number = _number(value)
        if number is None or not math.isfinite(number):
            raise DataError(f"line {row.number}: column {self.target!r} is {value!r}, expected a finite number")
        return number


def _number(value: Any) -> float | None:
    """Return a value as a number, NaN for a missing one, and None for what is none."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        if value in MISSING:
            return math.nan
        return float(value) if _is_number(value) else None
    return float(value) if isinstance(value, int | float) else None


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

    def each() -> Iterator[Row]:
        for number, (x, y) in enumerate(islice(data, skip, None), skip + 1):
            yield Row(number, {**x, "target": y if question == "number" else str(y)})

    return "target", question, classes, each()


def standard_input() -> Iterator[bytes]:
    """Yield the lines of standard input as they come."""
    yield from sys.stdin.buffer
