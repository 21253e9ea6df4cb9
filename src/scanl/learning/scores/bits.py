"""Bits: the negative log-likelihood of a token, to the base 2."""

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from scanl.data.base import IGNORED
from scanl.learning.scores.base import score


@score("bits")
def bits(question: Any, outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Return the bits of tokens (n,) by logits (n, V), and how many tokens there are."""
    nats = F.cross_entropy(outputs.float(), targets, ignore_index=IGNORED, reduction="sum").item()
    return nats / math.log(2), int((targets != IGNORED).sum())
