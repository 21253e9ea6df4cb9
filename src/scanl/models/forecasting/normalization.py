"""Normalisation of a series by its past, and the map of its targets to logarithms and back."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from scanl.models.forecasting.share import PretrainedShare
from scanl.models.saving import ModelPart
from scanl.options import WORDS, ConfiguredMeta, above

MAX_LOG = 80.0  # of a forecast, in units of the location: its exponential is finite in float32


@dataclass(frozen=True)
class Normalization(ModelPart, metaclass=ConfiguredMeta):
    """Normalisation of a series by the running mean and variance of its past."""

    span: Annotated[
        float | None,
        above(1),
        "after this many further numbers, a number has lost about two thirds of its weight in mean and variance. None: "
        "it keeps its weight",
    ] = None
    log: Annotated[
        bool,
        "normalise the logarithm of the targets, for series whose steps are ratios. A number that is not above 0 is "
        "then missing",
    ] = False
    rounded: Annotated[bool, "round the forecasts to whole numbers"] = False
    least: Annotated[float | None, "no forecast is below this number; None: no limit"] = None
    calibrated: Annotated[
        bool,
        "multiply the distances of the quantiles from the median by the factors in `calibration`, and by that of the "
        "recent errors",
    ] = False
    beside: Annotated[
        PretrainedShare | None,
        "share of the forecaster in the package, which needs no training, in a forecast; None: it is not used",
    ] = None

    def logged(self, y: Tensor, location: Tensor) -> Tensor:
        """Return L + L log(y / L) of targets y (..., C), NaN where y is not above 0; without `log` y itself.

        location: (C,), L.
        """
        if not self.log:
            return y
        y = y.double()
        return location + location * (torch.where(y > 0, y, torch.nan) / location).log()

    def unlogged(self, numbers: Tensor, location: Tensor) -> Tensor:
        """Return the targets whose `logged` are numbers (..., C, P)."""
        if not self.log:
            return numbers
        location = location[:, None]
        return location * (numbers / location - 1).clamp(max=MAX_LOG).exp()

    def allowed(self, y: Tensor) -> Tensor:
        """Return forecasts as `rounded` and `least` say."""
        y = y if self.least is None else y.clamp(min=self.least)
        return y.round() if self.rounded else y


WORDS[Normalization] = "Normalization()"
