"""The answers of a linear readout: what it is fitted to, and the losses of what it predicts."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

SHARPNESS = tuple(np.geomspace(0.5, 20, 40))  # factors of the scores before the softmax


class Readout(ABC):
    """What a linear readout is fitted to, in units of its own. outputs: O, their number."""

    outputs: int

    @abstractmethod
    def targets(self, targets: Tensor) -> Tensor:
        """Return what is fitted, (n, O), of the targets of series."""

    @abstractmethod
    def losses(self, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of the losses (S,) of predictions (n, O), for each factor by which they may be multiplied."""

    def guessed(self, targets: Tensor) -> Tensor:
        """Return which series (n,) say something about a readout that has not learnt from them: all of them."""
        return torch.ones(len(targets), dtype=torch.bool)

    def doubt(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return what is added to `losses`, so that probabilities are no surer than the number of series allows."""
        return torch.zeros(1, dtype=torch.float64)

    @abstractmethod
    def units(self, factor: int) -> tuple[Tensor, Tensor]:
        """Return location and scale (O,) of the answers of a model. factor: number of the factor of `losses`."""


class ClassReadout(Readout):
    """Logits of classes: 1 is fitted for the class of each series, and -1 for the others. The factors are `SHARPNESS`.

    A class of a single series cannot be guessed without it.
    """

    def __init__(self, classes: int) -> None:
        self.outputs = classes

    def targets(self, targets: Tensor) -> Tensor:
        return 2.0 * F.one_hot(targets, self.outputs).double() - 1

    def losses(self, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = predictions.double() * torch.tensor(SHARPNESS)[:, None, None]
        codes = targets.argmax(1).expand(len(SHARPNESS), -1)
        return F.cross_entropy(logits.transpose(1, 2), codes, reduction="none") @ weights

    def guessed(self, targets: Tensor) -> Tensor:
        codes = targets.argmax(1)
        return codes.bincount(minlength=self.outputs)[codes] > 1

    def doubt(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of one more series, which is classified as surely as the others, but wrongly."""
        others = predictions.masked_fill(targets > 0, -torch.inf).amax(1)
        margin = (predictions.gather(1, targets.argmax(1, keepdim=True))[:, 0] - others).mean().clamp(min=0)
        return F.softplus(margin.clamp(max=2) * torch.tensor(SHARPNESS))  # of a single class it is infinite

    def units(self, factor: int) -> tuple[Tensor, Tensor]:
        location = torch.zeros(self.outputs, dtype=torch.float64)
        return location, torch.full_like(location, SHARPNESS[factor])


class NumberReadout(Readout):
    """Numbers, which are fitted in deviations from their mean. scales: (O, 2), both in the units of the numbers."""

    def __init__(self, scales: Tensor) -> None:
        self.scales, self.outputs = scales, len(scales)

    def targets(self, targets: Tensor) -> Tensor:
        return (targets - self.scales[:, 0]) / self.scales[:, 1]

    def losses(self, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return ((predictions - targets).square().mean(1) @ weights)[None]

    def units(self, factor: int) -> tuple[Tensor, Tensor]:
        location, scale = self.scales.unbind(1)
        return location, scale
