r"""Running mean and variance of the numbers of a stream, of the past alone.

.. math::
    w_t = 1 / \min(n_t, \mathrm{span}), \quad d_t = x_t - m_{t-1}

    m_t = m_{t-1} + w_t d_t, \quad v_t = (1 - w_t) (v_{t-1} + w_t d_t^2)

n counts the numbers that are known. Up to `span` numbers m and v are the mean and the variance of all; after that the
past fades. No gradient passes through them.

Source: Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", Technometrics 4(3), 1962;
with weights: West, "Updating Mean and Variance Estimates: An Improved Method", CACM 22(9), 1979.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

SPAN = 10_000  # numbers after which the past fades, unless it is said
MAX_DEVIATION = 10.0  # a standardised number is cut here: an outlier is at most that far from the mean


class Statistics:
    """Running numbers of a stream. span: numbers after which the past fades."""

    span: int

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers, and arrays of them as lists."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
            if name != "span"
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from statistics of `state_dict`."""
        for name, value in self.state_dict().items():
            kept = np.array(state[name], np.float64).reshape(np.shape(value))
            setattr(self, name, kept if isinstance(value, list) else int(kept))


class Scaling(Statistics):
    """Standardises vectors of `width` numbers; NaN is a missing number, and stays NaN."""

    def __init__(self, width: int, span: int) -> None:
        self.span = span
        self.count, self.mean, self.variance = np.zeros(width), np.zeros(width), np.zeros(width)

    def update(self, x: Values) -> None:
        """Read a vector (width,)."""
        known = np.isfinite(x)
        self.count += known
        weight = known / np.minimum(np.maximum(self.count, 1), self.span)
        off = np.where(known, x - self.mean, 0.0)
        change = weight * off
        self.mean += change
        self.variance = (1 - weight) * (self.variance + change * off)

    def scaled(self, x: Values) -> Values:
        """Return (x - m) / sqrt(v) by the numbers read so far, cut at `MAX_DEVIATION`; 0 where those were equal."""
        return _clipped(_ratio(x - self.mean, np.sqrt(self.variance)), -MAX_DEVIATION, MAX_DEVIATION)


class Innovation(Statistics):
    r"""Base and scale of a vector of numbers: what is learnt is z in y = base + scale z.

    .. math:: \mathrm{base} = m + \rho (l - m_l), \quad \rho = \mathrm{clip}(\mathrm{cov}(y, l) / v_l, 0, 1)

    l is the last truth that was known when the answer was made. So the base is the mean on a stream whose numbers are
    independent, the last value on a random walk, and in between the answer of a first-order autoregression. The scale
    is the root of the running mean square of y - base. Before the first truth the base is 0.
    """

    def __init__(self, width: int, span: int) -> None:
        self.span, self.count = span, 0
        self.mean, self.last_mean = np.zeros(width), np.zeros(width)
        self.last_variance, self.covariance, self.square = np.zeros(width), np.zeros(width), np.zeros(width)
        self.pairs = 0

    def base(self, last: Values | None) -> Values:
        """Return the base of an answer (width,). last: the last truth, None before any."""
        if last is None or not self.pairs:
            return self.mean.copy() if last is None else last.copy()
        return self.mean + _clipped(_ratio(self.covariance, self.last_variance), 0, 1) * (last - self.last_mean)

    @property
    def scale(self) -> Values:
        """Root of the mean square of what the base leaves, (width,)."""
        return np.sqrt(self.square)

    def update(self, y: Values, base: Values, last: Values | None) -> Values:
        """Read a truth, and return z (width,) of it; NaN for the first truth, which has nothing to be compared with."""
        self.count += 1
        weight = 1 / min(self.count, self.span)
        off = y - self.mean
        self.mean = self.mean + weight * off
        if self.count == 1:
            return np.full_like(y, np.nan)
        if last is not None:
            self.pairs += 1
            paired = 1 / min(self.pairs, self.span)
            moved = last - self.last_mean
            self.last_mean = self.last_mean + paired * moved
            self.covariance = (1 - paired) * (self.covariance + paired * moved * off)
            self.last_variance = (1 - paired) * (self.last_variance + paired * moved * moved)
        residual = y - base
        among = 1 / min(self.count - 1, self.span)
        self.square = (1 - among) * self.square + among * residual * residual
        return _clipped(_ratio(residual, self.scale), -MAX_DEVIATION, MAX_DEVIATION)


def _ratio(x: Values, scale: Values) -> Values:
    """Return x / scale; 0 where the scale is 0."""
    return x / np.where(scale > 0, scale, np.inf)


def _clipped(x: Values, low: float, high: float) -> Values:
    """Return `np.clip` of x. For a few numbers its checks take longer than it."""
    return np.minimum(np.maximum(x, low), high)
