"""Accuracy: 1 for the right class, 0 for another."""

from typing import Any

from torch import Tensor

from scanl.data.base import IGNORED
from scanl.learning.scores.base import score


@score("accuracy")
def accuracy(question: Any, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the number of the most likely classes of logits (n, V) that are the classes (n,), and n."""
    is_target = targets != IGNORED
    return float((outputs.argmax(-1) == targets)[is_target].sum()), int(is_target.sum())
