r"""Heads: linear maps from features to the parameters of a number's distribution, and the loss of each.

A head works in standardised units: a number y is (y - location) / scale there. `in_units` takes the parameters back.
The losses of distributions are their negative log-likelihoods, by `torch.distributions`.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution as Likelihood
from torch.distributions import NegativeBinomial, Normal, StudentT
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers.base import widen
from scanl.options import one_of

LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MIN_SCALE = 1e-4  # smallest scale, in standardised units
UNIT = 0.5413  # softplus(UNIT) is 1: a scale starts there


class Head(nn.Linear):
    """Map features (..., D) to parameters (..., numbers, P) of `numbers` distributions. Abstract.

    A subclass defines the P parameters. `moved` names the parameters to which a shift of the number is added.
    """

    width: ClassVar[int]  # P
    moved: ClassVar[slice] = slice(0, 1)
    counts: ClassVar[bool] = False  # the numbers are 0, 1, 2, ...; their location is then 0
    degree: ClassVar[int] = 0  # a loss in units of c is c ** degree times smaller, but for what no parameter changes

    def __init__(self, dim: int, numbers: int) -> None:
        super().__init__(dim, numbers * self.width)
        self.numbers = numbers

    def forward(self, h: Tensor, shift: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the parameters in standardised units, in float32 or wider. shift: (..., numbers), added to `moved`."""
        raw = widen(super().forward(h)).unflatten(-1, (self.numbers, self.width))
        if shift is not None:
            raw = torch.cat([raw[..., self.moved] + shift[..., None], raw[..., self.moved.stop :]], -1)
        return self._valid(raw)

    def _valid(self, raw: Tensor) -> Tensor:
        """Bring any numbers into the range of the parameters."""
        return raw

    def loss(self, parameters: Tensor, y: Tensor) -> Tensor:
        """Return the loss (...) of each number y (...), from parameters (..., P) in its units."""
        raise NotImplementedError

    def in_units(self, parameters: Tensor, location: Tensor, scale: Tensor) -> Tensor:
        """Return the parameters of location + scale * y. parameters: (..., P), of y."""
        raise NotImplementedError

    def mean(self, parameters: Tensor) -> Tensor:
        """Return the mean (...), or the number that stands for it."""
        raise NotImplementedError

    def quantiles(self, parameters: Tensor, levels: Tensor) -> Tensor:
        """Return the quantiles at levels (Q,) or (..., Q): (..., Q)."""
        raise NotImplementedError

    def sample(self, parameters: Tensor, generator: torch.Generator | None = None, temperature: float = 1.0) -> Tensor:
        """Draw a number (...) from each distribution: the quantile at a level that is uniform in (0, 1).

        temperature: a normal number is multiplied by the root of the temperature, and its level is taken. So a
        Gaussian's density is raised to the power 1 / temperature, as the probabilities of tokens are. A temperature of
        0 gives the median of every distribution. Levels are between 1e-6 and 1 - 1e-6.
        """
        levels = torch.rand(parameters.shape[:-1], generator=generator, device=parameters.device)
        normal = torch.special.ndtri(levels.clamp(1e-6, 1 - 1e-6).to(parameters)) * temperature**0.5
        return self.quantiles(parameters, torch.special.ndtr(normal).clamp(1e-6, 1 - 1e-6)[..., None])[..., 0]


class Points(Head):
    """One number, learnt by its squared error: the mean. P = 1. Every quantile is that number."""

    width = 1
    degree = 2

    def loss(self, parameters: Tensor, y: Tensor) -> Tensor:
        return (parameters[..., 0] - y).square()

    def in_units(self, parameters: Tensor, location: Tensor, scale: Tensor) -> Tensor:
        return location[..., None] + scale[..., None] * parameters

    def mean(self, parameters: Tensor) -> Tensor:
        return parameters[..., 0]

    def quantiles(self, parameters: Tensor, levels: Tensor) -> Tensor:
        return parameters.expand(*parameters.shape[:-1], levels.shape[-1])


class Quantiles(Head):
    r"""Quantiles at `LEVELS`, learnt by the pinball loss. P is their number, 11.

    .. math:: \rho_p(y, q) = \max(p (y - q), (p - 1)(y - q))

    Source: Koenker and Bassett, "Regression Quantiles", Econometrica 46(1), 1978, eq. (3.1). The loss is the mean over
    the levels, times two: for quantiles at all levels that is the CRPS. Quantiles that cross are sorted
    (Chernozhukov, Fernández-Val and Galichon, arXiv:0704.3649). Other levels are interpolated. Beyond the first and the
    last level the distance from the median grows as a normal distribution's does. The median stands for the mean.
    """

    width = len(LEVELS)
    moved = slice(0, width)
    degree = 1

    def loss(self, parameters: Tensor, y: Tensor) -> Tensor:
        return pinball(parameters, y, parameters.new_tensor(LEVELS)).mean(-1) * 2

    def in_units(self, parameters: Tensor, location: Tensor, scale: Tensor) -> Tensor:
        return location[..., None] + scale[..., None] * parameters

    def mean(self, parameters: Tensor) -> Tensor:
        return self.quantiles(parameters, parameters.new_tensor([0.5]))[..., 0]

    def quantiles(self, parameters: Tensor, levels: Tensor) -> Tensor:
        known, ordered = parameters.new_tensor(LEVELS), parameters.sort(-1).values
        levels = levels.expand(*parameters.shape[:-1], levels.shape[-1])
        within = levels.clamp(known[0], known[-1]).contiguous()
        upper = torch.searchsorted(known, within).clamp(1, len(LEVELS) - 1)
        weight = (within - known[upper - 1]) / (known[upper] - known[upper - 1])
        inside = ordered.gather(-1, upper - 1).lerp(ordered.gather(-1, upper), weight)
        median = ordered[..., LEVELS.index(0.5), None]
        outside = levels != within
        ratio = torch.special.ndtri(levels) / torch.special.ndtri(torch.where(outside, within, known[0]))
        return inside + torch.where(outside, ratio - 1, 0) * (inside - median)


class _Likelihood(Head):
    """A head whose loss is the negative log-likelihood of a distribution of torch."""

    def distribution(self, parameters: Tensor) -> Likelihood:
        """Return the distribution of parameters (..., P)."""
        raise NotImplementedError

    def loss(self, parameters: Tensor, y: Tensor) -> Tensor:
        # In float64: the logarithms of gamma functions of large numbers are large, and nearly cancel.
        return -self.distribution(parameters.double()).log_prob(y.double()).to(parameters.dtype)

    def mean(self, parameters: Tensor) -> Tensor:
        return self.distribution(parameters).mean


class Gaussian(_Likelihood):
    """Normal distribution. P = 2: its mean and its standard deviation."""

    width = 2

    def _valid(self, raw: Tensor) -> Tensor:
        return torch.stack([raw[..., 0], F.softplus(raw[..., 1] + UNIT) + MIN_SCALE], -1)

    def in_units(self, parameters: Tensor, location: Tensor, scale: Tensor) -> Tensor:
        return torch.stack([location + scale * parameters[..., 0], scale * parameters[..., 1]], -1)

    def distribution(self, parameters: Tensor) -> Normal:
        return Normal(*parameters.unbind(-1), validate_args=False)

    def quantiles(self, parameters: Tensor, levels: Tensor) -> Tensor:
        return self.distribution(parameters[..., None, :]).icdf(levels)


class Student(_Likelihood):
    """Student's t-distribution, with heavier tails. P = 3: location, scale and degrees of freedom, above 2."""

    width = 3

    def _valid(self, raw: Tensor) -> Tensor:
        scale, df = F.softplus(raw[..., 1] + UNIT) + MIN_SCALE, 2 + F.softplus(raw[..., 2] + 3) + MIN_SCALE
        return torch.stack([raw[..., 0], scale, df], -1)

    def in_units(self, parameters: Tensor, location: Tensor, scale: Tensor) -> Tensor:
        where, spread, df = parameters.unbind(-1)
        return torch.stack([location + scale * where, scale * spread, df], -1)

    def distribution(self, parameters: Tensor) -> StudentT:
        where, spread, df = parameters.unbind(-1)
        return StudentT(df, where, spread, validate_args=False)

    def quantiles(self, parameters: Tensor, levels: Tensor) -> Tensor:
        where, spread, df = parameters[..., None, :].unbind(-1)
        return where + spread * _scipy("t", levels.to(parameters), df)


class Counts(_Likelihood):
    r"""Negative binomial distribution of counts. P = 2: its mean μ and its dispersion α; the variance is μ + α μ².

    The parameters of torch's distribution are total_count 1/α and logits log(α μ).
    Source: Salinas et al., "DeepAR", arXiv:1704.04110, eq. (3). Differs: α is not divided by the root of the scale.
    """

    width = 2
    counts = True

    def _valid(self, raw: Tensor) -> Tensor:
        mean, dispersion = F.softplus(raw[..., 0] + UNIT) + MIN_SCALE, F.softplus(raw[..., 1] + UNIT) + MIN_SCALE
        return torch.stack([mean, dispersion], -1)

    def in_units(self, parameters: Tensor, location: Tensor, scale: Tensor) -> Tensor:
        return torch.stack([scale * parameters[..., 0], parameters[..., 1]], -1)

    def distribution(self, parameters: Tensor) -> NegativeBinomial:
        mean, dispersion = parameters.unbind(-1)
        return NegativeBinomial(1 / dispersion, logits=(mean * dispersion).log(), validate_args=False)

    def mean(self, parameters: Tensor) -> Tensor:
        return parameters[..., 0]

    def quantiles(self, parameters: Tensor, levels: Tensor) -> Tensor:
        mean, dispersion = parameters[..., None, :].unbind(-1)
        return _scipy("nbinom", levels.to(parameters), 1 / dispersion, 1 / (1 + mean * dispersion))


HEADS: dict[str, type[Head]] = {
    "points": Points,
    "quantiles": Quantiles,
    "gaussian": Gaussian,
    "student_t": Student,
    "negative_binomial": Counts,
}


Distribution = Annotated[str, one_of(HEADS), f"distribution of the answers: {', '.join(HEADS)}"]


def make_head(name: str, dim: int, numbers: int) -> Head:
    """Make the head called `name` in `HEADS`, of `numbers` numbers."""
    return HEADS[name](dim, numbers)


def check_counts(who: str, name: str, numbers: Tensor) -> None:
    """Raise ShapeError unless all numbers are counts 0, 1, 2, ..., or NaN."""
    odd = numbers[(numbers < 0) | (numbers % 1 != 0) & ~numbers.isnan()]
    if odd.numel():
        raise ShapeError(
            f"{who}: {name} has {odd[0].item():g}, expected counts 0, 1, 2, ... because the distribution is "
            "negative_binomial"
        )


def pinball(quantiles: Tensor, y: Tensor, levels: Tensor) -> Tensor:
    """Return the pinball loss (..., Q) of quantiles (..., Q) at levels (Q,), for numbers y (...)."""
    error = y[..., None] - quantiles
    return torch.maximum(levels * error, (levels - 1) * error)


def as_levels(levels: Sequence[float], like: Tensor) -> Tensor:
    """Return the levels of quantiles as a tensor. Raises ConfigError unless all are between 0 and 1."""
    for level in levels:
        if not 0 < level < 1:
            raise ConfigError(f"forecast: levels are {tuple(levels)}, expected each above 0 and below 1")
    return like.new_tensor(tuple(levels))


def _scipy(name: str, *arguments: Tensor) -> Tensor:
    """Return the quantiles of a distribution of `scipy.stats`, in float64. torch has none of these."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigError(
            "forecast: quantiles of student_t and negative_binomial need scipy: pip install 'scanl[series]'"
        ) from error
    arrays = (argument.detach().double().cpu().numpy() for argument in arguments)
    return torch.as_tensor(getattr(stats, name).ppf(*arrays)).to(arguments[0])
