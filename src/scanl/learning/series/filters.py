"""Random filters for series, whose readout is fitted in closed form, and chosen by series that are left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.learning.forecasting.leave_one_out import PENALTIES, Fit, fit_ridge
from scanl.learning.series.examples import Examples, features_of
from scanl.learning.series.readouts import Readout
from scanl.models import Features, RandomFilters
from scanl.models.forecasting.random_filters import TALLIES

TIME_CONSTANT_SHARE = 0.25  # time constant of the filters, in lengths of the series
# Series, and most filters for more of them: the readout takes the time of features cubed.
MANY_SERIES, FILTERS_OF_FEW, FILTERS_OF_MANY = 2048, 2048, 192
LEVELS = 4  # thresholds of a filter
MEMORY = 2**25  # most features times series

Report = Callable[[str], None]


class FilterFit(NamedTuple):
    """Filters with their readout.

    fit: the readout in its own units, and the predictions of series that were left out.   losses: the sums of their
    losses, for each factor of the readout.   loss: the smallest mean.
    """

    model: RandomFilters
    fit: Fit
    losses: Tensor
    loss: float

    @property
    def factor(self) -> int:
        """Number of the factor by which the readout is multiplied."""
        return int(self.losses.argmin())

    @property
    def options(self) -> dict[str, Any]:
        """The options of the filters, by name."""
        return {name: value for name, value in self.model.config.items() if name not in ("outputs", "inputs")}


def fit_filters(
    examples: Examples,
    readout: Readout,
    inputs: Features,
    weights: Tensor,
    seed: int,
    options: Mapping[str, Any] | None = None,
    penalties: Sequence[float] = PENALTIES,
    report: Report = lambda _: None,
) -> FilterFit:
    """Fit filters with the readout that predicts series best that are left out one by one.

    inputs: of the filters, with the scales of the series.   weights: (n,), of the losses.
    options: of `RandomFilters`; what is left open is chosen, and so is the penalty.
    """
    targets = readout.targets(examples.targets)
    guessed = readout.guessed(targets)
    fits = []
    for model in _candidates(examples.x, readout.outputs, inputs, seed, options or {}):
        fit = fit_ridge(features_of(model, examples.x), targets, weights, penalties, guessed)
        losses = readout.losses(fit.predictions, targets, weights * guessed)
        losses = losses + weights.mean() * readout.doubt(fit.predictions, targets)
        loss = (losses / weights.sum()).min().item()
        what = f"{model.thresholds.shape[1]} filters, leave_out={model.leave_out}"
        report(f"{what}: loss {loss:.4g} of series that are left out")
        fits.append(FilterFit(model, fit, losses, loss))
    best = min(fits, key=attrgetter("loss"))
    set_readout(best.model, readout, best.fit.weight, best.fit.bias, best.factor)
    return best


@torch.no_grad()
def set_readout(model: RandomFilters, readout: Readout, weight: Tensor, bias: Tensor, factor: int) -> None:
    """Set the readout of filters, from a weight and a bias in units of the fit."""
    location, scale = readout.units(factor)
    model.readout.weight.copy_(scale[:, None] * weight)
    model.readout.bias.copy_(location + scale * bias)


def _candidates(
    x: Tensor, outputs: int, inputs: Features, seed: int, options: Mapping[str, Any]
) -> Iterator[RandomFilters]:
    """Yield filters for each combination of the options that are left open."""
    known = ~x.isnan()
    steps = known.any(2)
    most = FILTERS_OF_FEW if len(x) <= MANY_SERIES else FILTERS_OF_MANY
    given: dict[str, Any] = {
        "filters": max(1, min(most, MEMORY // (TALLIES * LEVELS * len(x)))),
        "levels": LEVELS,
        "longest": max(2.0, TIME_CONSTANT_SHARE * steps.sum(1).double().mean().item()),
        **options,
    }
    for leave_out in [given["leave_out"]] if "leave_out" in given else [False] if steps.all() else [False, True]:
        torch.manual_seed(seed)
        counted = steps if leave_out else torch.ones_like(steps)
        some_missing = bool((~known)[counted].any())
        chosen = {"known": some_missing, **given, "leave_out": leave_out}
        model = RandomFilters(outputs, inputs, **chosen)
        model.prepare(x)
        yield model
