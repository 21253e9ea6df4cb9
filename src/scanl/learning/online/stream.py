"""The stream of `scanl learn`: its rows become samples."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import scanl.tasks  # registers the streams  # noqa: F401
from scanl.data import sources
from scanl.data.base import IGNORED
from scanl.errors import ConfigError, DataError, nearest
from scanl.learning.online import reading
from scanl.learning.online.answers import AnswerClass, Answering, AnswerNumbers
from scanl.learning.online.columns import Item, StreamColumns
from scanl.learning.online.config import LearnConfig
from scanl.learning.online.reading import Row
from scanl.tasks.stream import StreamTask

MAX_SHOWN_LINES = 10  # lines that are reported one by one

Report = Callable[[str], None]


class Stream:
    """The samples of a stream. report: takes a line for the user.

    Attributes: lines, the number of the last one that was read. From the first sample on, `inputs`, `question` and
    `count`: numbers of a sample, the kind of its truth, and numbers or classes of a truth; and `columns` of rows.
    """

    def __init__(self, config: LearnConfig, report: Report) -> None:
        self.config, self.options, self.report = config, config.stream, report
        self.form = reading.Form()
        self.columns: StreamColumns | None = None
        self.question, self.count, self.inputs = "number", 1, 0
        self.lines = 0
        self.before = 0  # lines of a file that is followed, before it was cut
        self._known: set[Any] = set()  # names of columns
        self._unread = 0  # names of columns that came later

    @property
    def horizon(self) -> int | None:
        """Lines after which a line has the truth of a sample; None: its own line has it."""
        return None if self.columns is None else self.columns.horizon

    def kind(self) -> Answering:
        """Return the kind of answers, without any truth."""
        if self.question == "class":
            return AnswerClass(max(self.options.classes, self.count), self.options.feedback)
        feedback = self.options.feedback and self.horizon is None  # else the last truth is an input already
        return AnswerNumbers(self.count, self.config.learning.span, feedback)

    def items(self) -> Iterator[Item | DataError]:
        """Yield the samples after those that were read before; an error for a line that cannot be read."""
        data, skip = str(self.options.data), self.lines if self.config.run.replayed else 0
        if data.startswith("river:"):
            target, question, classes, rows = reading.river_rows(data.removeprefix("river:"), skip)
            classes = max(classes, 2) if question == "class" else self.options.classes
            question = self.options.question or question
            self.options = replace(self.options, target=target, question=question, classes=classes)
            yield from self._of_rows(rows)
        elif data == "-" or Path(data).is_file():
            if skip and data != "-" and reading.shorter(Path(data), skip - self.before):
                if not self.options.follow:
                    raise DataError(
                        f"learn: {data} has fewer than the {skip - self.before} lines that were read before; put it "
                        "back, or read what it has now: --replayed false"
                    )
                self._cut(self.lines, 0)
            if data == "-":
                lines: Iterable[bytes] = reading.lines_of(sys.stdin.buffer)
            elif self.options.follow:
                lines = reading.followed_lines(Path(data), partial(self._cut, self.before))
            else:
                lines = reading.file_lines(Path(data))
            rows = reading.rows(lines, max(0, skip - self.before), self.form, self.before)
            yield from self._of_rows(rows)
        else:
            yield from self._generated(data, skip)

    def _cut(self, before: int, count: int) -> None:
        """Let a file begin again after `count` lines of this process. before: lines of the files before it."""
        self.before = before + count
        self.report(f"the file was cut after line {self.before}; it is read from its begin")

    def _of_rows(self, rows: Iterable[Row | DataError]) -> Iterator[Item | DataError]:
        for row in rows:
            if isinstance(row, DataError):
                yield row
                continue
            if self.columns is None:
                self.columns = StreamColumns.of(row, self.options)
                self.question, self.inputs = self.columns.question, len(self.columns.names)
                if self.columns.text:
                    self.report(f"text is not read: {', '.join(self.columns.text)}")
            if self._unread < MAX_SHOWN_LINES and row.values.keys() - self._known:
                self._note(row, self.columns)
            try:
                yield self.columns.item(row)
            except DataError as error:
                yield error

    def _note(self, row: Row, columns: StreamColumns) -> None:
        """Say which columns of a row the first one had not."""
        self._known |= {columns.target, *columns.key, *columns.names, *columns.text, *self.options.leave_out}
        for name in row.values.keys() - self._known:
            self._known.add(name)
            self._unread += 1
            self.report(f"line {row.number}: column {name!r} is not read, because the first line has none")

    def _generated(self, name: str, skip: int) -> Iterator[Item]:
        known = [each for each in sources.names() if issubclass(sources.get(each), StreamTask)]
        if name not in known:
            if "/" in name or "." in name or Path(name).exists():
                raise ConfigError(f"learn: data is {name!r}, which is no file; name a file, a stream, or -")
            raise nearest("stream", name, known)
        entry: Any = sources.get(name)
        stream = entry.open(
            {"data_options": self.options.data_options, "seed": self.config.run.seed, "eval_examples": 1}
        )
        asked = stream.question
        self.inputs = asked.inputs.count
        self.question, self.count = ("number", asked.count) if asked.real else ("class", asked.classes)
        for number, (x, y) in enumerate(islice(stream.stream(), skip, None), skip + 1):
            none = y == IGNORED if isinstance(y, int) else not math.isfinite(y[0])
            yield Item(number, x, None if none else y)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in numbers, text and lists of them, without the lines."""
        return {
            "kind": [self.question == "class", self.count, self.inputs],
            "classes": self.options.classes,
            "columns": None if self.columns is None else vars(self.columns),
            "form": vars(self.form),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        is_class, self.count, self.inputs = state["kind"]
        self.question = "class" if is_class else "number"
        self.options = replace(self.options, classes=state["classes"])
        self.columns = None if state["columns"] is None else StreamColumns(**state["columns"])
        self.form = reading.Form(**state["form"])
