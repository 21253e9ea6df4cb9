"""Coverage of a forecast's interval: 1 for a number in it, 0 for another."""

from torch import Tensor

from scanl.data.batch import Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.learning.scores.base import over_known, score


@score("coverage")
def coverage(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> tuple[float, int]:
    """Return the number of numbers between the first and the last of quantiles (N, H, C, Q), and of known numbers."""
    inside = (outputs[..., 0] <= targets.numbers) & (targets.numbers <= outputs[..., -1])
    return over_known(inside.double(), targets.numbers)
