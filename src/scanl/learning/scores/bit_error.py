"""Bit error: 1 for a wrong answer of yes or no, 0 for the right one."""

from typing import Any

from torch import Tensor

from scanl.learning.scores.base import over_known, score


@score("bit error")
def bit_error(question: Any, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the number of wrong answers by logits (n, C), and the number of known answers (n, C)."""
    return over_known(((outputs > 0) != (targets > 0.5)).double(), targets)
