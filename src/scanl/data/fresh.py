"""Sources that generate new rows for every step, from files or from rules."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scanl.data.base import Exam, Source
from scanl.data.batch import Batch

# Seeds are (seed of the run, one of these, ...). Models train on the first only.
TRAINING, WHILE_TRAINING, AFTER_TRAINING = 0, 1, 2
ROWS_AT_A_TIME = 32  # rows in a batch of a measurement


@dataclass
class FreshRows(Source):
    """Rows that are generated: every step has new ones, always the same for a seed.

    A subclass defines `question`, `metric`, `length` and `generate`.

    Args:
        seed: seed of the rows. Training and measurements have different rows.
        eval_examples: number of rows in a measurement.
    """

    seed: int
    eval_examples: int = 512

    @abstractmethod
    def generate(self, count: int, random: np.random.Generator, *, training: bool) -> Batch:
        """Generate rows. training: whether a model may learn from them."""

    def check(self) -> None:
        """Do nothing: the rows are made of rules. A source that reads files overrides this method."""

    def _rows(self, count: int, *seed: int) -> Batch:
        return self.generate(count, np.random.default_rng((self.seed, *seed)), training=seed[0] == TRAINING)

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        batch = self._rows(size * world, TRAINING, step)
        rows = slice(rank * size, (rank + 1) * size)
        return batch.rows(rows)

    def digest(self) -> str:
        first = self._rows(2, TRAINING, 0)
        return hashlib.sha256(first.inputs.tobytes() + first.targets.tobytes()).hexdigest()

    def unseen(self, step: int) -> Iterator[Batch]:
        return self._batches(self.eval_examples, WHILE_TRAINING, step)

    def _batches(self, count: int, *seed: int) -> Iterator[Batch]:
        for start in range(0, count, ROWS_AT_A_TIME):
            yield self._rows(min(ROWS_AT_A_TIME, count - start), *seed, start)

    def exam(self, *, sample: bool = False, count: int | None = None) -> Exam:
        """Return an exam on rows that training never sees. count: number of rows; None for `eval_examples`."""
        count = self.eval_examples if count is None else count
        beside = {} if self.chance is None else {"chance": self.chance}
        title = f"{self.metric} on {count} new rows of {self.name}:"
        return Exam(title, list(self._batches(count, AFTER_TRAINING)), beside, ".4g")
