r"""Fit a linear readout by ridge regression, in float64 and in one pass over the data.

.. math:: C = \arg\min_C \sum_t \|y_t - C s_t - d\|^2 + \lambda \|C\|^2
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError


class Ridge:
    """Ridge regression of targets on features, from data that come in pieces; the intercept has no penalty.

    Only means and products about the means are kept, so memory does not grow. Pieces are merged by the formula of Chan,
    Golub and LeVeque (1979), so a large constant in the features costs no precision.

    >>> fit = Ridge()
    >>> s = torch.tensor([[0.0], [1.0], [4.0]])
    >>> fit.add(s[:2], 2 * s[:2] + 3).add(s[2:], 2 * s[2:] + 3)
    Ridge(penalty=0.0, rows=3)
    >>> weight, bias = fit.solve()
    >>> round(weight.item(), 9), round(bias.item(), 9)
    (2.0, 3.0)
    """

    def __init__(self, penalty: float = 0.0) -> None:
        """Penalty: λ, at least 0. With 0 the solution has the least norm of all that fit best."""
        if penalty < 0:
            raise ConfigError(f"Ridge: penalty is {penalty}, expected at least 0")
        self.penalty, self.rows = penalty, 0
        self.mean, self.products = torch.zeros(0), torch.zeros(0)  # of features and targets side by side
        self.features = 0

    def add(self, features: Tensor, targets: Tensor, weights: Tensor | None = None) -> "Ridge":
        """Add features (..., E) and targets (..., O), and return this object.

        weights: (...), of the squared errors; a weight of 2 equals the row twice. None: 1.
        """
        if features.shape[:-1] != targets.shape[:-1]:
            expected = (*features.shape[:-1], "O")
            raise ShapeError(
                f"Ridge: targets has shape {tuple(targets.shape)}, expected {expected} because of features"
            )
        rows = torch.cat([features.detach(), targets.detach()], -1).flatten(0, -2).double()
        if not self.rows:
            self.features, width = features.shape[-1], rows.shape[-1]
            self.mean, self.products = rows.new_zeros(width), rows.new_zeros(width, width)
        elif (features.shape[-1], rows.shape[-1]) != (self.features, len(self.mean)):
            channels, expected = features.shape[-1], self.features
            raise ShapeError(
                f"Ridge: features and targets have {channels} and {targets.shape[-1]} channels, expected {expected} "
                f"and {len(self.mean) - expected} because of the data that were added before"
            )
        w = rows.new_ones(len(rows)) if weights is None else weights.detach().flatten().double()
        count = len(rows) if weights is None else w.sum().item()
        if count:
            mean, total = w @ rows / count, self.rows + count
            centered, apart = rows - mean, mean - self.mean
            self.products += centered.T @ (w[:, None] * centered) + torch.outer(apart, apart) * (
                self.rows * count / total
            )
            self.mean += apart * (count / total)
            self.rows = total
        return self

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the weight (O, E) and the bias (O), in float64. Raises ConfigError before any data."""
        if not self.rows:
            raise ConfigError("Ridge: no data were added, expected at least one row of features and targets")
        E = self.features
        values, vectors = torch.linalg.eigh(self.products[:E, :E])
        tiny = E * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
        inverse = torch.where(values > tiny, 1 / (values + self.penalty), 0)  # smaller ones are rounding
        weight = self.products[E:, :E] @ (vectors * inverse) @ vectors.T
        return weight, self.mean[E:] - weight @ self.mean[:E]

    def __repr__(self) -> str:
        return f"Ridge(penalty={self.penalty}, rows={self.rows})"


@torch.no_grad()
def fit_readout(
    model: Callable[[Tensor], Any],
    readout: nn.Linear,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    penalty: float = 1e-6,
    washout: int = 0,
) -> Ridge:
    """Fit the weight and the bias of `readout`, a part of `model`, to the targets.

    model: called with each x (B, T, D); the inputs of `readout` in this call are the features.   batches: pairs of x
    and the targets (B, T, O) of the readout.   penalty: λ.   washout: how many first steps of each batch to leave out,
    because the state still depends on its start.
    Returns the regression, to which more pieces can be added.
    """
    if washout < 0:
        raise ConfigError(f"fit_readout: washout is {washout}, expected at least 0")
    if readout.bias is None:
        raise ConfigError("fit_readout: the readout has no bias, expected one because the data are centred")
    fit, features = Ridge(penalty), []
    hook = readout.register_forward_pre_hook(lambda _module, inputs: features.append(inputs[0]))
    try:
        for x, targets in batches:
            features.clear()
            model(x)
            if len(features) != 1:
                raise ConfigError(
                    f"fit_readout: the model called the readout {len(features)} times, expected once for each batch"
                )
            fit.add(features[0][:, washout:], targets[:, washout:])
    finally:
        hook.remove()
    weight, bias = fit.solve()
    readout.weight.copy_(weight)
    readout.bias.copy_(bias)
    return fit
