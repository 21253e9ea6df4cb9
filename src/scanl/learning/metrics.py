"""What is measured while training: metrics.csv and the progress bar."""

import csv
import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from scanl.learning.optimizer import UNKNOWN
from scanl.learning.run import RunFolder


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Lines of metrics.csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([row[name] for name in columns] for row in rows)
    return text.getvalue()


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """The rows of metrics.csv; a last line that a killed process has cut short is left out."""
    if not folder.metrics.exists():
        return []
    whole, newline, _ = folder.metrics.read_text(encoding="utf-8").rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole + newline)))


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, done: int) -> None:
        self._printed = -math.inf
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(initial=done, unit="step", dynamic_ncols=True)

    def show(self, row: Mapping[str, Any], line: str, steps: int) -> None:
        """A row of the metrics, what to say of it, and how many steps there will be as far as is known."""
        text = f"{line}  {row['tokens_per_second']:,} tokens/s"
        if self._bar is not None:
            self._bar.total = steps if steps < UNKNOWN.steps else None
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(row["step"] - self._bar.n)
        elif time.monotonic() - self._printed >= 10 or row["step"] >= steps:
            print(f"step {row['step']}/{steps if steps < UNKNOWN.steps else '?'}  {text}", file=sys.stderr, flush=True)
            self._printed = time.monotonic()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
