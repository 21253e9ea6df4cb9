"""The registry of scores."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from scanl.registry import Functions

Score = Callable[[Any, Tensor, Any], tuple[float, int]]
scores: Functions[Score] = Functions("score")
score = scores.add


def over_known(scores: Tensor, numbers: Tensor) -> tuple[float, int]:
    """Return the sum of scores where the number is known, no NaN, and how many are known."""
    known = ~numbers.isnan()
    return float(scores[known].sum()), int(known.sum())
