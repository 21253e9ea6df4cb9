"""JSON lines: an object a line."""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from scanl.data.files import Files, whole_lines

T = TypeVar("T")


def rows(files: Files, name: str, folder: str, make: Callable[[Any], T], thing: str) -> Iterator[tuple[int, T]]:
    """Yield the number of each line, and what `make` makes of it.

    thing: name of the lines' content, for the DataError about a line that `make` refuses.
    """
    path = files.path(name, folder)
    for number, line in enumerate(whole_lines(files.text(name, folder)), 1):
        try:
            row = make(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise files.damaged(path, f"line {number} is no {thing}: {error!r}", folder) from error
        yield number, row


def field(row: Any, path: str) -> Any:
    """Return a field of an object by the names on the way to it, such as `question.choices.text`.

    Of a list below the first name it is the list of the fields.
    """
    first, *names = path.split(".")
    value = row[first]
    for name in names:
        value = [element[name] for element in value] if isinstance(value, list) else value[name]
    return value
