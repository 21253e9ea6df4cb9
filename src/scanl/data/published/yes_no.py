"""Sources that ask for several answers of yes or no at every step: notes that sound, actions that go on."""

from dataclasses import dataclass
from functools import cached_property

from scanl.data.fixed import FixedRows


@dataclass
class YesNoRows(FixedRows):
    """Rows of features, and at every step several answers of yes or no. A subclass defines `read`.

    A target is 1 or 0, or NaN where no answer is wanted. The score is the negative log-likelihood of all answers of a
    step, in nats, as a mean over steps. The answers of a step are independent, given the steps that were read.

    Args: see `FixedRows`.
    """

    metric = "nats per step"

    @property
    def length(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return max(len(row) for split in self.parts for row in split.rows)
