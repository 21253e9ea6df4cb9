"""The registry of scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeAlias

from torch import Tensor

from scanl.registry import Functions


class Total(ABC):
    """Total of a score that is no mean over answers: the sum of two parts is the total of both."""

    @abstractmethod
    def __add__(self, other: Any) -> Self:
        """Return the total of this part and another."""

    @abstractmethod
    def __truediv__(self, count: int) -> float:
        """Return the score over all parts, which have `count` answers."""


Score: TypeAlias = Callable[[Any, Any, Any], tuple[float | Total, int]]
scores: Functions[Score] = Functions("score")
score = scores.add


def over_known(scores: Tensor, numbers: Tensor) -> tuple[float, int]:
    """Return the sum of scores where the number is known, no NaN, and how many are known."""
    known = ~numbers.isnan()
    return float(scores[known].sum()), int(known.sum())
