r"""Running mean and variance of a series with missing numbers, by linear recurrences. They depend on the past alone.

.. math::
    n_t = (1 - (1 - \lambda) o_t) n_{t-1} + o_t, \quad w_t = o_t / n_t, \quad d_t = x_t - m_{t-1}

    m_t = (1 - w_t) m_{t-1} + w_t x_t, \quad v_t = (1 - w_t) v_{t-1} + (1 - w_t) w_t d_t^2

    p_t = (1 - o_t / 2) p_{t-1}, \quad \mathrm{variance}_t = (n_t v_t + p_t) / (n_t + p_t) + \epsilon_t

with o_t = 1 where x_t is known, else 0, and λ = 1 - 1 / span. With λ = 1, m and v are the mean and the variance of all
numbers so far. p is the weight of a prior variance of 1, which stands for a series without known numbers. It halves
with each number. ε_t is ε while the series is constant (v_t is 0 up to rounding), and 0 as soon as it varies. No square
of a mean is subtracted, so a large mean costs no precision.

Source: Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", Technometrics 4(3), 1962;
with weights: West, "Updating Mean and Variance Estimates: An Improved Method", CACM 22(9), 1979.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scanl.layers.state import loadable
from scanl.ops import linear_scan

ROUNDINGS = 64  # of the mean: a deviation below is no variation


@loadable
class Running(NamedTuple):
    """Weight n, mean m and variance v of the numbers so far, and p, (B, C) each, in float64."""

    weight: Tensor
    mean: Tensor
    variance: Tensor
    prior: Tensor

    def total(self, epsilon: float) -> Tensor:
        """Return the variance with its prior, and with ε while the series is constant."""
        rounding = ROUNDINGS * torch.finfo(self.mean.dtype).eps * self.mean.abs()
        constant = self.variance <= rounding.square()
        return (self.weight * self.variance + self.prior) / (self.weight + self.prior) + epsilon * constant


def nothing_read(mean: Tensor) -> Running:
    """Return the statistics before any number; mean: (B, C), what stands for it until one comes."""
    return Running(torch.zeros_like(mean), mean, torch.zeros_like(mean), torch.ones_like(mean))


def running(
    x: Tensor,
    previous: Running,
    span: float | None = None,
    cu_seqlens: Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Running]:
    """Return mean and variance (B, T, C) after each step of x (B, T, C), NaN where missing, and the last statistics.

    previous: the statistics before the first step.   span: how many further numbers take about two thirds of a number's
    weight; None: its weight stays.   epsilon: ε, added to the variance while the series is constant.
    """
    known = ~x.isnan()
    count = known.to(previous.weight.dtype)
    x = torch.where(known, x, 0).to(count)
    keep = 1 - count * (0.0 if span is None else 1 / span)
    weight, weight_last = linear_scan(count, keep, previous.weight, cu_seqlens=cu_seqlens)
    gain = count / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    mean, mean_last = linear_scan(gain * x, 1 - gain, previous.mean, cu_seqlens=cu_seqlens)
    off = x - _previous(mean, previous.mean, cu_seqlens)
    added = (1 - gain) * gain * off.square()
    variance, variance_last = linear_scan(added, 1 - gain, previous.variance, cu_seqlens=cu_seqlens)
    prior, prior_last = linear_scan(torch.zeros_like(count), 1 - count / 2, previous.prior, cu_seqlens=cu_seqlens)
    total = Running(weight, mean, variance, prior).total(epsilon)
    return mean, total, Running(weight_last, mean_last, variance_last, prior_last)


def _previous(values: Tensor, first: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the value before each step of (B, T, C); `first` (B, C) is that before the first step of a sequence."""
    if cu_seqlens is None:
        return torch.cat([first[:, None], values[:, :-1]], 1) if values.shape[1] else values
    filled = cu_seqlens.diff() > 0
    shifted = values.roll(1, 1)
    return shifted.index_copy(1, cu_seqlens[:-1][filled].long(), first[filled][None].to(shifted))
