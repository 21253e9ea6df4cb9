"""The folder of `scanl learn`: config.yaml, predictions.csv, scores.csv and checkpoint.ckpt.

The tables grow line by line. A checkpoint has their sizes, so that a resumed run cuts off what came after it.
"""

import csv
import io
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from scanl.errors import CheckpointError, ConfigError
from scanl.files import check_new_folder, locked, writing, written_whole
from scanl.learning.online.config import LearnConfig
from scanl.learning.run.checkpoint import read_whole, write_checkpoint

FLUSH = 1.0  # seconds for which a line may stay in memory


class RowFile:
    """A table of CSV to which lines are appended. header: its first line.   size: bytes to keep; None for a new one."""

    def __init__(self, path: Path, header: Iterable[str], size: int | None) -> None:
        self.path, self._flushed = path, time.monotonic()
        with writing(path):
            if size is not None and (not path.exists() or path.stat().st_size < size):
                raise CheckpointError(f"{path} has fewer than the {size} bytes of the checkpoint; put it back")
            self._file = path.open("wb" if size is None else "rb+")
            if size is None:
                self.append(header)
            else:
                self._file.truncate(size)
                self._file.seek(size)

    def append(self, row: Iterable[Any]) -> None:
        """Write a line. It is on the disk after a second at the latest, if another one follows."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(row)
        with writing(self.path):
            self._file.write(text.getvalue().encode())
            if time.monotonic() - self._flushed > FLUSH:
                self.flush()

    def flush(self) -> None:
        """Hand the lines to the system."""
        with writing(self.path):
            self._file.flush()
        self._flushed = time.monotonic()

    def settle(self) -> int:
        """Write everything to the disk, and return the size of the table."""
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        """Close the file. What cannot be written any more is lost."""
        with writing(self.path):
            self._file.close()


class OnlineFolder:
    """Paths of a run of `scanl learn`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.predictions = self.path / "predictions.csv"
        self.scores = self.path / "scores.csv"
        self.checkpoint = self.path / "checkpoint.ckpt"

    @classmethod
    def fresh(cls, config: LearnConfig) -> "OnlineFolder":
        """Make the folder of a new run. Raises ConfigError when the path is in use."""
        assert config.run.out is not None
        folder = cls(config.run.out)
        check_new_folder("learn", "out", folder.path)
        if folder.path.exists() and any(each.name != ".lock" for each in folder.path.iterdir()):
            raise ConfigError(
                f"learn: out is {folder.path}, which is in use; choose another --out, or go on with it: "
                f"scanl learn --resume {folder.path}"
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        with written_whole(folder.config_file) as temporary:
            temporary.write_text(config.to_yaml(), encoding="utf-8")
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "OnlineFolder":
        """Open an existing run. Raises CheckpointError when there is none."""
        folder = cls(path)
        if not folder.config_file.is_file():
            raise CheckpointError(f"learn: {path} has no config.yaml; name a folder that `scanl learn` has written")
        return folder

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder for writing."""
        return locked(self.path)

    def config(self) -> LearnConfig:
        return LearnConfig.from_yaml(self.config_file)

    def save(self, state: dict[str, Any]) -> None:
        """Write the checkpoint, whole or not at all."""
        write_checkpoint(state, self.checkpoint)

    def stored(self) -> dict[str, Any] | None:
        """Return the checkpoint; None if the run was ended before the first."""
        for leftover in self.path.glob(".*.tmp*"):
            leftover.unlink()
        return read_whole(self.checkpoint, "scanl learn") if self.checkpoint.exists() else None
