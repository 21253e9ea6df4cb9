"""Nats: the negative log-likelihood of all answers of yes and no of a step."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from scanl.learning.scores.base import score


@score("nats")
def nats(question: Any, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the nats of answers (n,) by logits (n,), times the answers of a step, and how many answers there are."""
    total = F.binary_cross_entropy_with_logits(outputs.double(), targets.double(), reduction="sum").item()
    return total * question.count, targets.numel()
