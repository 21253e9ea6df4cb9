"""Progress of a long choice: how much of it is done, and what it finds on the way."""

import math
import shutil
import sys
import time
from typing import Self


class Progress:
    """Listener of a long piece of work, which calls it as it goes on. This one passes everything over."""

    def note(self, line: str) -> None:
        """Take a line about something that the work has found."""

    def at(self, share: float, count: str) -> None:
        """Take how far the work is.

        share: of the work that is done, from 0 to 1, as well as it is known.   count: the same of the present part, in
        words: "simple forecasts: 30 of 96".
        """

    def part(self, begin: float, end: float) -> "Progress":
        """Return a listener for a part of the work, which takes it from the share `begin` to the share `end`."""
        return _PartProgress(self, begin, end)


SILENCE = Progress()


class _PartProgress(Progress):
    def __init__(self, whole: Progress, begin: float, end: float) -> None:
        self.whole, self.begin, self.end = whole, begin, end

    def note(self, line: str) -> None:
        self.whole.note(line)

    def at(self, share: float, count: str) -> None:
        self.whole.at(self.begin + share * (self.end - self.begin), count)


class PrintedProgress(Progress):
    """Progress on the standard error: on a terminal one line that is written again, elsewhere a line now and then.

    Behind the count stands the time that is left, if the rest goes on as fast as the work so far. As a context, it
    takes the line of a terminal away at the end.
    """

    INTERVALS = (0.2, 10.0)  # seconds between two lines: on a terminal, elsewhere
    UNCERTAIN_SECONDS = 1.0  # seconds before which nothing is said about the time left

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None  # time and share of the first call: no work is known before it
        self._printed = -math.inf
        self._terminal = sys.stderr.isatty()
        self._width = 0  # of the line on the terminal that is not ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def note(self, line: str) -> None:
        self._end()
        print(line, file=sys.stderr, flush=True)

    def at(self, share: float, count: str) -> None:
        now = time.monotonic()
        began, first = self._began = self._began or (now, share)
        if now - self._printed < self.INTERVALS[not self._terminal]:
            return
        self._printed, gone, done = now, now - began, share - first
        left = gone * (1 - share) / done if done > 0 and gone >= self.UNCERTAIN_SECONDS else None
        line = f"{share:4.0%}  {count}" + ("" if left is None else f", about {_spoken(left)} left")
        if self._terminal:
            line = line[: shutil.get_terminal_size().columns - 1]  # a line that is broken into two would stay
            padded, self._width = line.ljust(self._width), len(line)  # before it is printed: a signal may come then
            print(f"\r{padded}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _end(self) -> None:
        if self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


def _spoken(seconds: float) -> str:
    """Return a duration as it is said: "40 s", "3 min"."""
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{round(seconds / 60)} min"
