"""Mean absolute scaled error of a forecast's median.

Source: Hyndman and Koehler, "Another Look at Measures of Forecast Accuracy", International Journal of Forecasting
22(4), 2006, section 3.
"""

from torch import Tensor

from scanl.data.base import LEVELS
from scanl.data.batch import Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.learning.scores.base import over_known, score


@score("MASE")
def mase(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> tuple[float, int]:
    """Return the sum of the absolute errors of the medians of quantiles (N, H, C, Q), in units of the series' errors
    (`Outcomes`), and how many numbers are known."""
    error = targets.numbers - outputs[..., LEVELS.index(0.5)]
    return over_known(error.abs() / targets.units[:, None], targets.numbers)
