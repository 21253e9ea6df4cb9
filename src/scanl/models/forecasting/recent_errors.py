r"""The factor by which the recent errors of a map of lags are larger than its usual ones.

.. math::
    r_j = \operatorname{mean}_h \frac{|x_{t-j} - \hat x_{t-j \mid t-j-h}|}{e_h s_t}, \quad
    \mathrm{factor}_t = \frac{P + \sum_{j < m} r_j}{P + m}

x̂ is what the map forecast h steps before, and e_h its usual absolute error in units of the scale s. P is the weight of
a prior of 1. Values and errors that are not known are left out of the means and of m. Intervals that are
wider by this factor cover a series whose errors have grown since training (locally weighted conformal prediction:
Lei et al., "Distribution-Free Predictive Inference for Regression", JASA 113(523), 2018, section 5.2).
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d

PRIOR = 16.0  # P
MIN_STEPS = 10  # of m
MIN_KNOWN_SHARE = 0.5  # share of the lags that are known, from which a forecast counts


def recent_steps(horizon: int) -> int:
    """Return m, the number of last values whose errors count."""
    return max(MIN_STEPS, 2 * horizon)


def further_lags(horizon: int) -> int:
    """Return how many values the factor reads beyond the lags of a map but one."""
    return recent_steps(horizon) + horizon


def recent_factor(values: Tensor, location: Tensor, scale: Tensor, weight: Tensor, usual: Tensor) -> Tensor:
    """Return the factors (n,) of the last values of n series.

    values, location: (n, q - 1 + `further_lags`), the newest last; a missing value is NaN. The location is that of the
    steps, by which the map normalises.   scale: (n,), s_t.   weight: (H, q), of the map.   usual: (n, H), e_h; NaN
    where it is not known.

    >>> values = torch.zeros(1, 11, dtype=torch.float64)
    >>> values[0, -1] = 26.0  # the last of ten steps has an error of 26, where 1 is usual
    >>> one = values.new_ones(1, 1)
    >>> recent_factor(values, 0 * values, one[0], 0 * one, one).tolist()
    [1.6153846153846154]
    """
    (horizon, lags), steps = weight.shape, recent_steps(len(weight))
    known = ~values.isnan()
    read = torch.stack([torch.where(known, values, 0), known.to(values)], 1)[..., :-1]
    sums = conv1d(read.flatten(0, 1)[:, None], weight[:, None].flip(2)).unflatten(0, (-1, 2))
    full = known[:, :-1].unfold(1, lags, 1).sum(2) >= MIN_KNOWN_SHARE * lags
    ahead = sums[:, 0] + location[:, None, lags - 1 : -1] * (1 - sums[:, 1])  # (n, H, origins), the newest last
    forecasts = torch.where(full[:, None], ahead, torch.nan)
    errors = [values[:, -steps:] - forecasts[:, h, horizon - 1 - h : horizon - 1 - h + steps] for h in range(horizon)]
    ratios = torch.stack(errors, 2).abs() / (scale[:, None] * usual)[:, None]
    of_step = ratios.nanmean(2)
    counted = ~of_step.isnan()
    return (PRIOR + torch.where(counted, of_step, 0).sum(1)) / (PRIOR + counted.sum(1))
