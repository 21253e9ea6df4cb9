r"""Continuous ranked probability score of a forecast, by its quantiles.

.. math:: \mathrm{CRPS} = \frac{2}{Q} \sum_{p} \max(p (y - q_p), (p - 1) (y - q_p))

It is the mean pinball loss over `LEVELS`, times two, in units of the series' errors (`Outcomes`). Source: Gneiting and
Raftery, "Strictly Proper Scoring Rules, Prediction, and Estimation", JASA 102(477), 2007, section 4.2.
"""

import torch
from torch import Tensor

from scanl.data.base import LEVELS
from scanl.data.batch import Outcomes
from scanl.data.questions import ForecastQuestion
from scanl.learning.scores.base import over_known, score


@score("CRPS")
def crps(question: ForecastQuestion, outputs: Tensor, targets: Outcomes) -> tuple[float, int]:
    """Return the sum over the known numbers of quantiles (N, H, C, Q), and how many are known."""
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    error = targets.numbers[..., None] - outputs
    pinball = torch.maximum(levels * error, (levels - 1) * error).mean(-1)
    return over_known(2 * pinball / targets.units[:, None], targets.numbers)
