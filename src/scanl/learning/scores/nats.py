"""Nats: the negative log-likelihood of all answers of yes and no of a step."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from scanl.learning.scores.base import over_known, score


@score("nats")
def nats(question: Any, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the nats of answers (n, C) by logits (n, C), times C, and how many answers are known, no NaN."""
    parts = F.binary_cross_entropy_with_logits(outputs.double(), targets.double(), reduction="none")
    return over_known(parts * question.count, targets)
