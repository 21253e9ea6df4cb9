"""Errors of standardised values, as the literature on long horizons measures them: MSE and MAE of a forecast's median.

Source: Zhou et al., "Informer", arXiv:2012.07436.
"""

import torch
from torch import Tensor

from scanl.data.base import LEVELS
from scanl.data.batch import Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.learning.scores.base import over_known, score


def _error(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> Tensor:
    """Return the errors of the medians of quantiles (N, H, C, Q), in units of the columns' scales."""
    scales = [scale for _, scale in (question.scales or ((0.0, 1.0),) * question.target)[: question.target]]
    return (targets.numbers - outputs[..., LEVELS.index(0.5)]) / torch.tensor(scales, dtype=torch.float64)


@score("MSE")
def mse(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> tuple[float, int]:
    """Return the sum of the squared errors, and how many numbers are known."""
    return over_known(_error(question, outputs, targets).square(), targets.numbers)


@score("MAE")
def mae(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> tuple[float, int]:
    """Return the sum of the absolute errors, and how many numbers are known."""
    return over_known(_error(question, outputs, targets).abs(), targets.numbers)
