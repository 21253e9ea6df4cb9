"""Coverage of a forecast's interval: 1 for a number in it, 0 for another."""

from torch import Tensor

from scanl.data.batch import Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.learning.scores.base import over_known, score


@score("coverage")
def coverage(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> tuple[float, int]:
    """Return how many numbers are from the first to the last of quantiles (N, H, C, Q), and how many are known."""
    inside = (outputs[..., 0] <= targets.numbers) & (targets.numbers <= outputs[..., -1])
    return over_known(inside.double(), targets.numbers)
