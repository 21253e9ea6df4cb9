"""The columns of a stream of rows: inputs, target and key, as the first row has them."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scanl.data.series.columns import BETWEEN_NAMES, MISSING, quoted, split_names
from scanl.errors import ConfigError, DataError, unknown
from scanl.learning.online.config import StreamConfig
from scanl.learning.online.reading import SHOWN_LETTERS, Row, number_of


class Item(NamedTuple):
    """A sample, or a truth alone. inputs: None if the line has only a truth.   truth: None if it has none."""

    number: int
    inputs: list[float] | None
    truth: Any
    key: Hashable = None


@dataclass
class StreamColumns:
    """The roles of the columns.

    key: columns that together name a sample.   names: of the inputs.   text: columns that are not read, because they
    are text.   question: number or class.
    """

    target: str
    horizon: int | None
    key: list[str]
    names: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    question: str = "number"

    @classmethod
    def of(cls, row: Row, options: StreamConfig) -> "StreamColumns":
        """Read the first row. Raises ConfigError for a column that it lacks."""
        target, horizon, without = options.target, options.horizon, options.leave_out
        key = [] if options.key is None else split_names(options.key)
        values = row.values
        if target is None and len(values) == 1:
            (target,) = values
        if target is None:
            raise ConfigError(f"learn: target is none, expected one of the columns {', '.join(values)}")
        for name in [*key, *without] if key else [target, *without]:
            if name not in values:
                raise ConfigError(f"learn: {unknown('column', name, list(values))}")
        rest = [name for name in values if name not in (target, *key, *without)]
        numbers = [name for name in rest if _number(values[name]) is not None]
        text = [name for name in rest if name not in numbers]
        if horizon is None and not numbers and not key:
            horizon = 1
        first = values.get(target)
        guess = "class" if isinstance(first, bool) or _number(first) is None else "number"
        question = options.question or guess
        if horizon is not None:
            if question == "class":
                raise ConfigError("learn: the target is a class, and no other column has numbers; expected inputs")
            numbers = [target, *numbers]
        if not numbers:
            raise ConfigError(f"learn: no column but {target} has numbers, expected inputs")
        return cls(target, horizon, key, numbers, text, question)

    def item(self, row: Row) -> Item:
        """Return the sample of a row. Raises DataError for a value of another kind, or a column that has vanished."""
        values, parts = row.values, []
        for name in self.key:
            part = values.get(name)
            if isinstance(part, list | dict):
                raise _wrong(row, name, "a name or a number")
            if part == "" or part is None or part != part:
                raise _missing(row, name, "the name of a sample")
            parts.append(part)
        key = parts[0] if len(parts) == 1 else BETWEEN_NAMES.join(quoted(str(part)) for part in parts) or None
        truth = self._truth(row)
        lacking = [name for name in self.names if name not in values]
        if lacking and self.key and len(lacking) == len(self.names) and truth is not None:
            return Item(row.number, None, truth, key)
        if lacking:
            raise _missing(row, lacking[0], "it as in the first line")
        return Item(row.number, [_known(row, name, missing=True) for name in self.names], truth, key)

    def _truth(self, row: Row) -> Any:
        """Return the truth in a row, None where it is missing."""
        if self.target not in row.values:
            if not self.key:
                raise _missing(row, self.target, "the target")
            return None
        value = row.values[self.target]
        if _is_missing(value):
            return None
        if self.question == "number":
            return _known(row, self.target)
        if isinstance(value, list | dict):
            raise _wrong(row, self.target, "a class")
        return value if isinstance(value, str | bool) else str(value)


def _known(row: Row, name: str, missing: bool = False) -> float:
    """Return a finite number of a row. missing: or NaN for one that is missing."""
    number = _number(row.values[name])
    if number is None or math.isinf(number) or (math.isnan(number) and not missing):
        raise _wrong(row, name, "a finite number")
    return number


def _wrong(row: Row, name: str, expected: str) -> DataError:
    """Return the error of a value of another kind; a long one is cut."""
    value = row.values[name]
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)
    text = text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."
    return DataError(f"line {row.number}: column {name!r} is {text}, expected {expected}")


def _missing(row: Row, name: str, expected: str) -> DataError:
    return DataError(f"line {row.number}: column {name!r} is missing, expected {expected}")


def _is_missing(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and value in MISSING)


def _number(value: Any) -> float | None:
    """Return a value as a number, NaN for a missing one, and None for another kind."""
    if _is_missing(value):
        return math.nan
    if isinstance(value, str):
        return number_of(value)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.inf
