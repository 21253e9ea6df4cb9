"""Squared error of numbers."""

from typing import Any

from torch import Tensor

from scanl.learning.scores.base import score


@score("squared error")
def squared_error(question: Any, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the sum of the squared errors of numbers (n,), and how many there are."""
    return float((outputs.double() - targets).square().sum()), targets.numel()
