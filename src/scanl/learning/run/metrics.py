"""The file metrics.csv and the progress bar."""

import csv
import hashlib
import io
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from scanl.errors import CheckpointError
from scanl.files import writing
from scanl.learning.run.folder import RunFolder
from scanl.learning.run.plan import UNKNOWN_PLAN


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Format rows as lines of metrics.csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([row[name] for name in columns] for row in rows)
    return text.getvalue()


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """Read metrics.csv, without an incomplete last line of a killed process. Raises CheckpointError if damaged."""
    if not folder.metrics.exists():
        return []
    try:
        complete_lines, newline, _ = folder.metrics.read_text(encoding="utf-8").rpartition("\n")
        rows = list(csv.DictReader(io.StringIO(complete_lines + newline), strict=True))
        for row in rows:
            int(row["step"])
            for number in row.values():
                float(number or 0)  # an empty field: no measurement at that step
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise CheckpointError(f"run: {folder.metrics} cannot be read as metrics: {error}; put it back") from error
    return rows


@dataclass(frozen=True)
class MetricsLength:
    """Length of metrics.csv at a checkpoint, in bytes, and the SHA-256 of those bytes."""

    size: int
    sha256: str

    @classmethod
    def now(cls, folder: RunFolder) -> "MetricsLength":
        """Flush the file to the disk and describe it, so that a checkpoint on the disk never lacks its rows."""
        with writing(folder.metrics), folder.metrics.open("rb+") as file:
            os.fsync(file.fileno())
            text = file.read()
        return cls(len(text), hashlib.sha256(text).hexdigest())

    def read(self, folder: RunFolder) -> bytes:
        """Read those bytes; none if the file was removed. Raises CheckpointError when they have changed."""
        try:
            text = folder.metrics.read_bytes()[: self.size]
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise CheckpointError(f"run: {folder.metrics} cannot be read: {error.strerror}; put it back") from error
        if hashlib.sha256(text).hexdigest() != self.sha256:
            raise CheckpointError(
                f"run: {folder.metrics} is damaged, or has changed since the checkpoint; put it back, "
                "or remove it to go on without its rows"
            )
        return text


class ProgressBar:
    """Progress of a run: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, done: int) -> None:
        self._printed = -math.inf
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(initial=done, unit="step", dynamic_ncols=True)

    def show(self, row: Mapping[str, Any], line: str, steps: int) -> None:
        """Show a row of the metrics as `line`; `steps` is the present estimate of the run's length."""
        text = f"{line}  {row['tokens_per_second']:,} tokens/s"
        if self._bar is not None:
            self._bar.total = steps if steps < UNKNOWN_PLAN.steps else None
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(row["step"] - self._bar.n)
        elif time.monotonic() - self._printed >= 10 or row["step"] >= steps:
            print(
                f"step {row['step']}/{steps if steps < UNKNOWN_PLAN.steps else '?'}  {text}",
                file=sys.stderr,
                flush=True,
            )
            self._printed = time.monotonic()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
