r"""Mean average precision of answers of yes and no: how far the right answers come first, for each question.

.. math:: \mathrm{mAP} = \frac{1}{C} \sum_c \mathrm{AP}_c, \quad
    \mathrm{AP} = \sum_n (R_n - R_{n-1}) P_n

The answers of all steps to one question are ranked by their logits. P_n and R_n are precision and recall of those from
the n-th logit on; equal logits are one. The mean is over the questions that are answered yes at least once.

Source: Everingham et al., "The PASCAL Visual Object Classes (VOC) Challenge", IJCV 88(2), 2010, without interpolation,
as Sigurdsson et al., "Hollywood in Homes", arXiv:1604.01753, measure Charades.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.learning.scores.base import Total, score


@dataclass(frozen=True)
class RankedAnswers(Total):
    """Logits and answers (n, C) of some steps, in parts. NaN where an answer is not known."""

    outputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    def __add__(self, other: Any) -> "RankedAnswers":
        return RankedAnswers(self.outputs + other.outputs, self.targets + other.targets)

    def __truediv__(self, count: int) -> float:
        columns = zip(torch.cat(self.outputs).unbind(1), torch.cat(self.targets).unbind(1), strict=True)
        of_each = [average_precision(outputs, targets) for outputs, targets in columns if (targets > 0.5).any()]
        return sum(of_each) / len(of_each) if of_each else torch.nan


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Return the average precision of logits (n,) for answers (n,), of which at least one is yes.

    >>> average_precision(torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0]))  # (1 + 2/3) / 2
    0.8333333333333333
    """
    known = ~targets.isnan()
    logits, order = outputs[known].double().sort(descending=True, stable=True)
    right = (targets[known][order] > 0.5).double().cumsum(0)
    last = torch.cat([logits[1:] != logits[:-1], logits.new_ones(1, dtype=torch.bool)])  # of equal logits
    ranks = torch.arange(1, len(logits) + 1, dtype=torch.float64)
    right, ranks = right[last], ranks[last]
    return float((right.diff(prepend=right.new_zeros(1)) * right / ranks).sum() / right[-1])


@score("mAP")
def mean_average_precision(question: Any, outputs: Tensor, targets: Tensor) -> tuple[RankedAnswers, int]:
    """Return the logits (n, C) and the answers (n, C), NaN where one is not known, and how many are known."""
    return RankedAnswers((outputs.detach().cpu(),), (targets.detach().cpu(),)), int((~targets.isnan()).sum())
