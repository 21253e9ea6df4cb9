"""Streams without end: generated samples, each with what a model should answer to it."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from scanl.data.batch import Batch
from scanl.data.fresh import FreshRows
from scanl.options import Positive

ENDLESS_KEY = 3  # part of the seed of a stream, beside those of `scanl.data.fresh`

Sample = tuple[list[float], Any]  # inputs, and the numbers or the class; NaN or IGNORED where no answer is wanted


@dataclass
class StreamTask(FreshRows):
    """Samples without end, the same for a seed, for `scanl learn`. For `scanl train` a row has `length` of them.

    A subclass defines `question`, `metric` and `samples`.

    Args:
        seed, eval_examples: see `FreshRows`.
        length: T of a row. Every row is the beginning of another stream.
    """

    length: Positive = 500

    @abstractmethod
    def samples(self, random: np.random.Generator) -> Iterator[Sample]:
        """Yield samples without end."""

    def stream(self) -> Iterator[Sample]:
        """Yield the samples of the seed without end, always the same."""
        return self.samples(np.random.default_rng((self.seed, ENDLESS_KEY)))

    def generate(self, count: int, random: np.random.Generator, *, training: bool) -> Batch:
        rows = [list(islice(self.samples(each), self.length)) for each in random.spawn(count)]
        kind = np.float32 if self.question.real else np.int64
        inputs = np.array([[x for x, _ in row] for row in rows], np.float32)
        return Batch(inputs, np.array([[y for _, y in row] for row in rows], kind))
