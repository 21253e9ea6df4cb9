"""Series and a question about them: what a user's table and a published one have in common."""

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from scanl.data.base import Exam, RepeatedIterable, Source
from scanl.data.batch import Batch
from scanl.data.questions import Question
from scanl.data.series.series import Collection
from scanl.data.series.windows import SeriesQuestion, SeriesWindows
from scanl.data.splits import TEST, TRAINING, VALIDATION, Piece
from scanl.errors import ConfigError, DataError

UNSEEN = ("data", "origins", "gaps", "freq", "folder")  # options that leave the digest unchanged


class SeriesSource(Source):
    """A source that has a collection of series in parts. A subclass is a dataclass with the options below.

    asked: what is asked.   horizon, season, distribution, sequence_length, origins, validation, test,
    seed: see `Table`.
    """

    asked: type[SeriesQuestion]
    horizon: int
    season: int | None
    distribution: str
    sequence_length: int
    origins: int | None
    validation: float
    test: float
    seed: int

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file with the series."""

    @property
    @abstractmethod
    def targets(self) -> list[str]:
        """Names of the target columns."""

    @cached_property
    def collection(self) -> Collection:
        """The series."""
        raise NotImplementedError

    @cached_property
    def parts(self) -> list[list[Piece]]:
        """The pieces of training, validation and test."""
        raise NotImplementedError

    @property
    def empty_parts(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of validation and test that have no piece."""
        return [split for split in (VALIDATION, TEST) if not self.parts[split]]

    @cached_property
    def asking(self) -> SeriesQuestion:
        """The question, and its batches. The series are read when it is first used."""
        collection, parts, asked = self.collection, self.parts, self.asked
        length = asked.length(collection.series, self.windowed, self.sequence_length)
        horizon = self.horizon if asked.ahead else 0
        return asked(SeriesWindows(collection, parts, length, horizon, self.origins, self.season), self.distribution)

    @property
    def windowed(self) -> Sequence[Piece]:
        """The pieces within which a window is; no window has more steps than the longest of them."""
        return self.parts[TRAINING]

    def ask_for(self, asked: type[SeriesQuestion]) -> None:
        """Set the question and the metric. Raises ConfigError for options that do not fit the question."""
        for name in ("horizon", "season"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"table: {name} is {value}, expected at least 1")
        if self.origins is not None and (self.origins < 1 or not asked.ahead):
            expected = "at least 1" if asked.ahead else "none because nothing is forecast"
            raise ConfigError(f"table: origins is {self.origins}, expected {expected}")
        if asked.horizon is not None and self.horizon not in (asked.horizon, type(self).horizon):
            raise ConfigError(f"table: horizon is {self.horizon}, expected 1 because generation goes step by step")
        self.asked, self.metric, self.horizon = asked, asked.metric, asked.horizon or self.horizon

    def divided(self, parts: list[list[Piece]], **options: Any) -> Self:
        """Return a copy with other parts, and other options by name. Nothing is read again."""
        copied = copy.copy(self)
        vars(copied).pop("asking", None)
        vars(copied).update(options, parts=parts)
        return copied

    def check(self) -> None:
        """Read the series, and refuse parts in which there is nothing to learn or to measure."""
        self.asking.check()
        assert self.question

    @property
    def length(self) -> int:
        return self.asking.windows.length

    @property
    def question(self) -> Question:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.asking.question

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        draw = np.random.default_rng((self.seed, TRAINING, step))
        return self.asking.batch(draw, size * world, slice(rank * size, (rank + 1) * size))

    def unseen(self, step: int) -> Iterator[Batch]:
        return self.asking.examples(VALIDATION)

    def exam(self, *, sample: bool = False) -> Exam:
        """Return an exam on the test part. Raises DataError if there is none."""
        if not self.parts[TEST]:
            raise DataError(f"table: test is 0, so {self.path} has no test part; measure other series: --data TABLE")
        asking, examples = self.asking, RepeatedIterable(lambda: self.asking.examples(TEST))
        count = sum(batch.size for batch in examples)
        title = f"{self.metric} of {count:,} {asking.noun} in the test part of {self.path.name}{asking.unit}:"
        return Exam(title, examples, {}, ".4g", asking.rivals(TEST))

    def digest(self) -> str:
        options = [field.name for field in fields(self)]  # pyright: ignore[reportArgumentType]: of a subclass
        digest = hashlib.sha256(repr([(name, getattr(self, name)) for name in options if name not in UNSEEN]).encode())
        for member in self.collection.series:
            for array in (member.target, member.past, member.static, member.future, member.times):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def class_names(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Names of the classes, in the order of their numbers; empty for numbers."""
        return self.collection.classes

    @property
    def is_forecast(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether steps ahead are asked for."""
        return self.asked.ahead > 0

    @property
    def described(self) -> str:
        """The file, its series, and what the question adds, in a line."""
        return f"{self.path.name}: {self.collection.summary}{self.asking.describe()}"

    def __str__(self) -> str:
        return f"x {self.length} steps of {self.described}"
